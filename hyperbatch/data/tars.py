"""What a tar holds, and whether it is whole. tarfile takes a block of zeros, or one that it cannot read, for the end of
the archive."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO, Any, cast

_PIECE_BYTES = 1 << 20


def plain_files(file: IO[bytes]) -> Iterator[tuple[str, int, int]]:
    """(name, offset, length) of every plain file, and after them of every further name of one (a hard link). Symbolic
    links and devices are passed over. tarfile.TarError, ValueError or OverflowError for a tar that is not whole, or
    has sparse files, whose bytes do not lie one after the other."""
    names: dict[str, list[str]] = {}  # first name -> the others
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in _members(tar):
            if member.isreg() and not member.issparse():
                yield member.name, member.offset_data, member.size
            elif member.issparse():
                raise tarfile.ReadError(f"{member.name!r} is stored with holes, so write the tar without --sparse")
            elif member.islnk():
                names.setdefault(member.linkname, []).append(member.name)
        check_end(tar)
    if not names:
        return
    file.seek(0)  # again, instead of keeping the place of every file for links that hardly any tar has
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in _members(tar):
            if member.isreg() and not member.issparse():
                for name in names.pop(member.name, ()):
                    yield name, member.offset_data, member.size
    for target, (name, *_) in names.items():
        raise tarfile.ReadError(f"{name!r} is a hard link to {target!r}, which is not a file of the tar")


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        cast(Any, tar).members.clear()  # a large tar's would fill the memory
        yield member


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
