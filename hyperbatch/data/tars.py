"""Lists the files of a tar and checks that the tar is complete. The check is needed because tarfile takes a block of
zeros, or one that it cannot read, for the end of the archive."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO, Any, cast

_PIECE_BYTES = 1 << 20


def plain_files(file: IO[bytes]) -> Iterator[tuple[str, int, int]]:
    """Yields (name, offset, length) of every regular file, and then of every hard link to one. Symbolic links and
    devices are skipped. Raises tarfile.TarError, ValueError or OverflowError if the tar is incomplete or has sparse
    files, whose bytes are not contiguous."""
    names: dict[str, list[str]] = {}  # name of a file -> its hard links
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
    file.seek(0)  # a second pass, because few tars have hard links, and keeping the place of every file costs memory
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in _members(tar):
            if member.isreg() and not member.issparse():
                for name in names.pop(member.name, ()):
                    yield name, member.offset_data, member.size
    for target, (name, *_) in names.items():
        raise tarfile.ReadError(f"{name!r} is a hard link to {target!r}, which is not a file of the tar")


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        cast(Any, tar).members.clear()  # the list of a large tar would fill the memory
        yield member


def check_end(tar: tarfile.TarFile) -> None:
    """Raises tarfile.ReadError unless the last member is followed by the end marker and then only by zeros. Data after
    it would be lost silently. Call it after iterating over all members."""
    file = cast(IO[bytes], tar.fileobj)
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("there is no end mark after the last member, so it is truncated or damaged")
    while piece := file.read(_PIECE_BYTES):
        if piece.strip(b"\0"):
            raise tarfile.ReadError(
                "there is data after its end mark, so a header is damaged or several tars were concatenated"
            )
