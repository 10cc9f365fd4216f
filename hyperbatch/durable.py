"""Files that are there whole or not at all, and that show when a bit of them has changed.

    name.partial  [ bytes ... | hyperbatch crc32 1a2b3c4d ]  --fsync, rename, fsync of the folder-->  name

The last line is the CRC-32 of all bytes before it. Readers of zip archives, torch.load among them, pass over it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hyperbatch.errors import Damaged

PARTIAL = ".partial"
CHUNK_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)  # the file system, or this user's share of it


def write(path: Path, put: Callable[[Any], None]) -> None:
    """Gives `put` a file to write to. The file has its name once all of its bytes are on the disk; if that fails,
    nothing is left of it, and what had the name before still has it."""
    with _replaced(path, path.with_suffix(PARTIAL)) as file:
        summed = _Summed(file)
        put(summed)
        summed.finish()
    sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Writes a file that somebody has named: whole or not at all where it is a plain file, and what was there before
    stays if that fails. A link stays one, and a device or a pipe is written to and not replaced. Names of files that
    are not in UTF-8 are written as the bytes that they are."""
    target = path.resolve() if path.is_symlink() else path
    if target.exists() and not target.is_file():
        with open(target, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        return
    with _replaced(target, _beside(target)) as file:
        file.write(text.encode(errors="surrogateescape"))


def _beside(path: Path) -> Path:
    """A name that nobody else has: several processes may replace a file at once, on several hosts."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")


@contextlib.contextmanager
def _replaced(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """The file beside it that becomes `path` once its bytes are on the disk, or goes."""
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def check(path: Path) -> bool:
    """True: the bytes are those that were written. False: the file has no checksum. Damaged: they have changed."""
    length = len(_last_line(0))
    with open(path, "rb") as file:
        left = file.seek(0, os.SEEK_END) - length
        if left < 0:
            return False
        file.seek(left)
        last = file.read()
        if not re.fullmatch(_last_line(0).replace(b"0" * 8, b"[^\n]{8}"), last):
            return False
        file.seek(0)
        total = 0
        while left and (chunk := file.read(min(left, CHUNK_BYTES))):
            total, left = zlib.crc32(chunk, total), left - len(chunk)
    if _last_line(total) != last:
        raise Damaged(f"{path} is damaged: its bytes do not match its checksum")
    return True


def make_folder(folder: Path) -> None:
    """A folder that is still there after a power cut."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Brings the names in the folder to the disk: fsync of a file says nothing about its name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(handle)


def remove_partials(folder: Path) -> None:
    """Removes what writes that were cut short have left. Only for whoever holds the folder: others may be writing."""
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):
            path.unlink()


class _Summed:
    """Adds up what is written. An error is kept until `finish`: torch's archive writer, which is C++, may be in between
    and would replace it by one of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sum = file, 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
            self._sum = zlib.crc32(data, self._sum)
        return len(data)

    def flush(self) -> None:
        """`finish` does it."""

    def finish(self) -> None:
        if self._error is None:
            self._file.write(_last_line(self._sum))
            self._file.flush()
        else:
            raise self._error


def _last_line(total: int) -> bytes:
    return b"\nhyperbatch crc32 %08x\n" % total
