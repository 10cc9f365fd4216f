"""Writes files atomically and with a checksum that detects changed bits.

    name.partial  [ bytes ... | hyperbatch crc32 1a2b3c4d ]  --fsync, rename, fsync of the folder-->  name

The last line is the CRC-32 of all bytes before it. Readers of zip archives, such as torch.load, ignore it.
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
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full file system, and of a full quota of this user


def write(path: Path, put: Callable[[Any], None]) -> None:
    """Writes a file by calling `put` with a file object. The file gets its name once all of its bytes are on the disk.
    If that fails, no partial file remains, and a previous file of this name is unchanged."""
    with _replaced(path, path.with_suffix(PARTIAL)) as file:
        summed = _Summed(file)
        put(summed)
        summed.finish()
    sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Writes text to a path that the user has given. A plain file is replaced atomically, and keeps its old content if
    that fails. A link stays a link, and a device or a pipe is written to instead of replaced. File names in the text
    that are not valid UTF-8 are written as their original bytes."""
    target = path.resolve() if path.is_symlink() else path
    if target.exists() and not target.is_file():
        with open(target, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        return
    with _replaced(target, _beside(target)) as file:
        file.write(text.encode(errors="surrogateescape"))


def _beside(path: Path) -> Path:
    """Returns a unique name next to `path`: several processes, also on several hosts, may replace a file at once."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")


@contextlib.contextmanager
def _replaced(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """A context with a temporary file that becomes `path` once its bytes are on the disk, or is removed on an error."""
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
    """Verifies a file's checksum: returns True if it matches and False if there is none, and raises Damaged
    otherwise."""
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
    """Creates a folder so that it still exists after a power failure."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Writes the names in the folder to the disk, because fsync of a file does not include its name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system does not support it
            raise
    finally:
        os.close(handle)


def remove_partials(folder: Path) -> None:
    """Removes the files of interrupted writes. Only for the process that has locked the folder: others may be
    writing."""
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):
            path.unlink()


class _Summed:
    """A file object that computes the checksum of what is written. An error is kept until `finish`, because torch's
    archive writer, which is C++ and may be the caller, would replace it by an error of its own."""

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
        """Does nothing, because `finish` flushes the file."""

    def finish(self) -> None:
        if self._error is None:
            self._file.write(_last_line(self._sum))
            self._file.flush()
        else:
            raise self._error


def _last_line(total: int) -> bytes:
    return b"\nhyperbatch crc32 %08x\n" % total
