"""Whether a tar is whole. tarfile takes a block of zeros, or one that it cannot read, for the end of the archive."""

from __future__ import annotations

import tarfile
from typing import IO, cast

_PIECE_BYTES = 1 << 20


def check_end(tar: tarfile.TarFile) -> None:
    """For a tar whose members have all been walked: tarfile.ReadError unless its end mark, and nothing but zeros,
    follows the last of them. Whatever came after would be lost without a word."""
    file = cast(IO[bytes], tar.fileobj)
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("there is no end mark after the last member, so it is truncated or damaged")
    while piece := file.read(_PIECE_BYTES):
        if piece.strip(b"\0"):
            raise tarfile.ReadError(
                "there is data after its end mark, so a header is damaged or several tars were concatenated"
            )
