"""Keeps what was computed once from a large file: an archive's index next to it, and unpacked contents in a cache.

Entries are found by the file's path, size and modification time, so a changed file is read again. All of these files
can be deleted at any time. If nothing can be written, nothing is kept.
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

WORTH_KEEPING_BYTES = 16 << 20  # smaller files are just as fast to read again
_CHECKSUM_BYTES = 4
INDEX_VERSION = 3  # raised when archives are read differently, so that the indexes of older versions are made again

Arrays = dict[str, np.ndarray]


def state_of(files: list[Path]) -> str:
    """Returns a hash that changes when one of the files changes."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def indexed(path: Path, what: str, make: Callable[[], Arrays]) -> Arrays:
    """Returns `make()`, or its earlier result for this file, which is stored next to the file or in the cache folder.

    The arrays have one row per member: `names`, `spans` (offset and length), and possibly others. `what` names the kind
    of members, because the same tar may be indexed by its files and later by its samples.
    """
    if path.stat().st_size < WORTH_KEEPING_BYTES:
        return make()
    # An index next to the file is identified by size and time only, because the folder may be mounted elsewhere later.
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
    """Returns the stored arrays, or None if they are missing, damaged (a zip has a checksum for every array), or those
    of another file."""
    try:
        # The file is opened here because numpy does not close a file that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    # RuntimeError: a flipped bit can mark an array as encrypted.
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError):
        return None
    if "state" not in found or found.pop("state").tolist() != [state, *found]:
        return None
    names, spans = found["names"], found["spans"]
    sound = names.dtype.kind == "S" and spans.dtype == np.int64 and spans.shape == (len(names), 2)
    return found if sound and (spans >= 0).all() and all(len(array) == len(names) for array in found.values()) else None


def made_once(name: str, write: Callable[[IO[bytes]], None]) -> Path | None:
    """Returns the file of this name in the cache folder. One process writes it while others wait. Returns None if it
    cannot be written.

    An OSError in `write` may come from the input or from the cache. The caller then reads the input without the cache,
    which raises the error again if the input is its cause.
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
                for part in path.parent.glob(f".{name}-*"):  # of a process that was killed
                    part.unlink()
                with whole_file(path) as file:
                    write(file)
    except OSError:
        return None
    return path


def shared_rows(name: str, dtype: np.dtype, count: int, parts: Callable[[], Iterator[np.ndarray]]) -> np.ndarray:
    """Returns the `count` rows that `parts` yields, read-only. From 16 MB on, they are kept in a file and mapped into
    memory, which the processes of a host then share. `name` must change when their content changes."""
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
    """Returns the rows of a kept file, or None if it is missing or damaged. A damaged file is removed, so that it is
    written again the next time."""
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
    """Writes to a temporary file and renames it, so that the final file is always complete."""
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
