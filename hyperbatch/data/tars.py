"""Whether a tar is whole. tarfile takes a block of zeros, or one that it cannot read, for the end of the archive."""

from __future__ import annotations

import mmap
import tarfile

_PIECE_BYTES = 1 << 20


def check_end(content: bytes | mmap.mmap, offset: int) -> None:
    """tarfile.ReadError unless the archive's end mark, and nothing but zeros, follows its last member at `offset`."""
    if content[offset : offset + tarfile.BLOCKSIZE] != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("no end mark after the last member, so it is cut off or damaged")
    for start in range(offset, len(content), _PIECE_BYTES):
        if content[start : start + _PIECE_BYTES].strip(b"\0"):
            raise tarfile.ReadError(
                "it goes on after its end mark, so a header is damaged or several tars were joined into one"
            )
