"""What is worked out once about a large file and kept: the index of an archive beside it, unpacked contents in a cache.

What was kept is found by the file's path, size and time, so a file that changed is read anew. Everything here can be
deleted at any time, and where nothing can be written nothing is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from hyperbatch.choices import cache_folder

WORTH_KEEPING_BYTES = 16 << 20  # smaller files are read again as quickly
_CHECKSUM_BYTES = 4
INDEX_VERSION = 2  # changes when an archive is understood otherwise, so that what older versions kept is made anew

Arrays = dict[str, np.ndarray]


def state_of(files: list[Path]) -> str:
    """Changes when one of the files does."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def indexed(path: Path, what: str, make: Callable[[], Arrays]) -> Arrays:
    """`make()`, or what it gave for this file before: kept beside it, or in the cache folder.

    Its arrays have a row for each member: `names`, `spans` (offset and length), and what else is known of them. `what`
    says which members these are: a tar may be asked for its files, and later for its samples.
    """
    if path.stat().st_size < WORTH_KEEPING_BYTES:
        return make()
    # Beside the file only its size and time count: a folder may be mounted elsewhere tomorrow.
    state = f"{what} {INDEX_VERSION} {path.stat().st_size} {path.stat().st_mtime_ns}"
    places = [path.with_name(f"{path.name}.index.npz"), cache_folder() / f"index-{state_of([path])[:16]}.npz"]
    for place in places:
        found = _load_arrays(place, state)
        if found is not None:
            return found
    made = make()
    for place in places:
        with contextlib.suppress(OSError):
            with whole_file(place) as file:
                np.savez(file, **{"state": np.array([state, *made]), **made})  # pyright: ignore[reportArgumentType]
            break
    return made


def _load_arrays(path: Path, state: str) -> Arrays | None:
    """None: not there, not whole (every array of a zip has a checksum), or of another file."""
    try:
        # Opened here, because numpy leaves a file open that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    # RuntimeError: a flipped bit says that an array is encrypted.
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError):
        return None
    if "state" not in found or found.pop("state").tolist() != [state, *found]:
        return None
    names, spans = found["names"], found["spans"]
    sound = names.dtype.kind == "S" and spans.dtype == np.int64 and spans.shape == (len(names), 2)
    return found if sound and (spans >= 0).all() and all(len(array) == len(names) for array in found.values()) else None


def made_once(name: str, write: Callable[[IO[bytes]], None]) -> Path | None:
    """The file of this name in the cache folder, written by one process while others wait; None: it cannot be written.

    An OSError of `write` may come from either side, so the caller reads again without the cache to learn which.
    """
    path = cache_folder() / name
    if path.is_file():
        return path
    if not path.is_absolute():  # no home
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(f"{name}.lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                with whole_file(path) as file:
                    write(file)
    except OSError:
        return None
    return path


def shared_rows(name: str, dtype: np.dtype, count: int, parts: Callable[[], Iterator[np.ndarray]]) -> np.ndarray:
    """The `count` rows that `parts` gives, read-only. From 16 MB on they are kept in a file and mapped into memory,
    which the processes of a host then share; `name` must change with their content."""
    if count * dtype.itemsize >= WORTH_KEEPING_BYTES:
        path = made_once(name, lambda file: _write_rows(file, parts()))
        rows = None if path is None else _mapped_rows(path, dtype, count)
        if rows is not None:
            return rows
    rows, start = np.empty(count, dtype), 0
    for part in parts():
        rows[start : start + len(part)] = part
        start += len(part)
    return rows


def _write_rows(file: IO[bytes], parts: Iterator[np.ndarray]) -> None:
    checksum = 0
    for part in parts:
        file.write(part.data)
        checksum = zlib.crc32(part.data, checksum)
    file.write(checksum.to_bytes(_CHECKSUM_BYTES, "little"))


def _mapped_rows(path: Path, dtype: np.dtype, count: int) -> np.ndarray | None:
    """None: gone, or not what was written. It is then removed, so that the next opening writes it anew."""
    size = count * dtype.itemsize
    try:
        content = np.memmap(path, mode="r")
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    rows, checksum = content[:size], content[size:].tobytes()
    if len(checksum) == _CHECKSUM_BYTES and zlib.crc32(rows.data) == int.from_bytes(checksum, "little"):
        return np.asarray(rows).view(dtype)
    with contextlib.suppress(OSError):
        path.unlink()
    return None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Written beside and renamed, so that whoever finds the file finds all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
