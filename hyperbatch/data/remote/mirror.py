"""Caches remote files on this host, up to a size that all sets in the cache folder share.

CACHE/remote/.lock                         locked while space is reserved or freed
CACHE/remote/3f2a.../                      one set in one version
    .in-use                                locked by every process that reads the set; its time is that of the last use
    manifest.json  train-000000.tar  ...   complete files: written under another name and renamed
    .train-000001.tar.536870912.part       being fetched by the process that holds its lock; counts with its full size

An interrupted download continues where it stopped, in this process or another. When space is needed, sets that no
process uses are removed, the least recently used one first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hyperbatch.data import kept
from hyperbatch.data.remote.store import (
    Refused,
    RemoteError,
    Stat,
    Store,
    file_name,
    file_url,
    not_readable,
    persist,
    read_range,
)
from hyperbatch.errors import InputError

_IN_USE = ".in-use"
_PART = re.compile(r"\..*\.(\d+)\.part")
_SMALL_FILES_AT_ONCE = 16
_LEFT_FREE_BYTES = 256 << 20  # disk space that is left for other programs


class NoRoom(Exception):
    """The file would not fit; the message says why."""


class DiskFull(NoRoom):
    """The disk is full, although the limit of the cache is not reached."""


class Mirror:
    """A set's folder in the cache. It is in use, and is therefore not removed, until this process ends."""

    def __init__(self, store: Store, version: str, limit_bytes: int) -> None:
        self.store = store
        self.limit_bytes = limit_bytes
        key = hashlib.sha256(f"{store.url.rstrip('/')}\n{version}".encode()).hexdigest()[:16]
        self.folder = _root() / key
        try:
            if self._hold():
                self._remove_what_is_too_much()
        except OSError as error:
            raise InputError(
                f"the cache folder {self.folder.parent} cannot be written: {error.strerror}; "
                "set XDG_CACHE_HOME to a writable folder"
            ) from error

    def _hold(self) -> bool:
        """Locks the folder as in use. Returns whether this process had not locked it before."""
        path, new = self.folder / _IN_USE, self.folder not in _held
        while self.folder not in _held:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder
                lock = _opened(path)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if _is_at(lock, path):
                    _held[self.folder] = lock
                else:
                    os.close(lock)
        os.utime(path)
        return new

    def path(self, name: str) -> Path:
        return self.folder / name

    def fetch_small(self, checksums: Mapping[str, int | None]) -> None:
        """Fetches small files, regardless of the cache's limit, and checks their CRC-32. Raises InputError if that
        fails."""
        if all(self.path(name).exists() for name in checksums):
            return
        try:
            with open(self.folder / ".small", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one process fetches the files, and the others wait for it
                names = [name for name in checksums if not self.path(name).exists()]
                with ThreadPoolExecutor(min(len(names) or 1, _SMALL_FILES_AT_ONCE)) as pool:
                    list(pool.map(lambda name: self._fetch_small(name, checksums[name]), names))
        except OSError as error:
            raise self._not_written(error) from error

    def _fetch_small(self, name: str, checksum: int | None) -> None:
        try:
            stat = persist(lambda: self.store.stat(name), patient=False)
            with kept.whole_file(self.path(name)) as file:
                total = 0
                for data in read_range(self.store, name, 0, stat.size_bytes, patient=False):
                    file.write(data)
                    total = zlib.crc32(data, total)
                if checksum not in (None, total):
                    raise Refused("it does not match the manifest's checksum")
        except RemoteError as error:
            raise not_readable(file_url(self.store.url, name), error) from error

    def fetch(
        self, name: str, stat: Stat, *, wait: bool, local_name: str = "", stopped: threading.Event | None = None
    ) -> bool:
        """Fetches a file and returns True. An earlier attempt is continued. Returns False if another process is
        fetching it and `wait` is not set, or if `stopped` is set. Raises NoRoom, RemoteError, or OSError of the
        disk."""
        path = self.path(local_name or name)
        part = path.with_name(f".{path.name}.{stat.size_bytes}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        while not path.exists():
            if not part.exists():
                self._reserve(part, stat.size_bytes)
            with open(part, "ab") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    return False
                if not _is_at(file.fileno(), part):  # another process has finished or given up in the meantime
                    continue
                if path.exists():  # another process had finished before `open` created a new .part file
                    part.unlink()
                    continue
                try:
                    for data in read_range(
                        self.store, name, file.tell(), stat.size_bytes, version=stat.version or None, stopped=stopped
                    ):
                        file.write(data)
                        if stopped is not None and stopped.is_set():
                            return False
                    file.flush()
                except OSError:  # the disk is full, and the part would only keep it full
                    part.unlink(missing_ok=True)
                    raise
                os.replace(part, path)
        return True

    def _reserve(self, part: Path, size: int) -> None:
        """Reserves space by creating the .part file. Raises NoRoom if there is not enough."""
        with self._room_lock():
            free = shutil.disk_usage(self.folder).free - _LEFT_FREE_BYTES
            if size > free:
                raise DiskFull(f"the disk of {self.folder.parent} has no room for {size:,} more bytes")
            if self._make_room(size) < 0:
                raise NoRoom(
                    f"the cache may hold {self.limit_bytes / 1e9:g} GB, and other runs use it; raise --data-cache-gb"
                )
            part.touch()

    def _make_room(self, size: int) -> int:
        """Removes unused sets until `size` more bytes fit. Returns how many bytes are then left below the limit."""
        sets = {folder: _size_bytes(folder) for folder in self.folder.parent.iterdir() if folder.is_dir()}
        room = self.limit_bytes - sum(sets.values()) - size
        for folder in sorted(sets, key=_last_use_s):
            if room >= 0:
                break
            if folder in _held:
                continue
            with _alone(folder) as alone:
                if alone:
                    shutil.rmtree(folder, ignore_errors=True)
                    room += sets[folder]
        return room

    def _remove_what_is_too_much(self) -> None:
        """Shrinks the cache to the limit, in case an earlier run had a larger one."""
        with self._room_lock():
            if self._make_room(0) >= 0:
                return
            with _alone(self.folder) as alone:
                for path in sorted(self.folder.rglob("*.tar"), reverse=True) if alone else ():
                    path.unlink()
                    if self._make_room(0) >= 0:
                        return

    @contextlib.contextmanager
    def _room_lock(self) -> Iterator[None]:
        with open(self.folder.parent / ".lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _not_written(self, error: OSError) -> InputError:
        return InputError(
            f"{self.store.url} cannot be kept in {self.folder}: {error.strerror or error}; "
            "free some space, or set XDG_CACHE_HOME to a folder on another disk"
        )


_held: dict[Path, int] = {}  # the locks of this process: folder -> descriptor


def fetch_all(store: Store, files: dict[str, Stat], limit_bytes: int) -> Path:
    """Fetches files and returns their folder. The name "" means the address itself, whose file is called `file_name`.
    Raises InputError if they cannot be fetched."""
    version = repr(sorted(files.items()))
    mirror = Mirror(store, version, limit_bytes)
    total = sum(stat.size_bytes for stat in files.values())
    if total > limit_bytes:
        raise InputError(
            f"{store.url} has {total / 1e9:.1f} GB, which must be fetched before it can be read, and the cache may "
            f"hold {limit_bytes / 1e9:g} GB; raise --data-cache-gb, or pack the set: packed shards need no cache"
        )
    try:
        with ThreadPoolExecutor(4) as pool:
            fetch = partial(mirror.fetch, wait=True)
            list(pool.map(lambda name: fetch(name, files[name], local_name=name or file_name(store.url)), files))
    except RemoteError as error:
        raise not_readable(store.url, error) from error
    except NoRoom as error:
        raise InputError(f"{store.url} cannot be fetched: {error}") from error
    except OSError as error:
        raise mirror._not_written(error) from error
    return mirror.folder


def _root() -> Path:
    return kept.cache_folder().absolute() / "remote"


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still at this path. It may have been removed or renamed before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Yields whether no other process uses the set. If so, it is locked until the block ends. This process itself may
    use the set."""
    held = _held.get(folder)
    try:
        lock = _opened(folder / _IN_USE) if held is None else held
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        if held is None:
            os.close(lock)
        else:
            fcntl.flock(lock, fcntl.LOCK_SH)


def _last_use_s(folder: Path) -> float:
    try:
        return (folder / _IN_USE).stat().st_mtime
    except OSError:
        return 0.0


def _size_bytes(folder: Path) -> int:
    """Returns the size of the set on disk. Files that are being fetched count with their full size."""
    total = 0
    for path in folder.rglob("*"):
        part = _PART.fullmatch(path.name)
        with contextlib.suppress(OSError):
            total += int(part[1]) if part else path.stat().st_size if path.is_file() else 0
    return total
