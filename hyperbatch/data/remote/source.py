"""Packed shards at an address, and archives that are fetched from one."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import zlib
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from hyperbatch.data.layouts.archives import SUFFIXES
from hyperbatch.data.remote.mirror import DiskFull, Mirror, NoRoom, fetch_all
from hyperbatch.data.remote.store import (
    Address,
    Missing,
    RemoteError,
    Store,
    file_name,
    file_url,
    not_readable,
    open_store,
    persist,
    read_range,
)
from hyperbatch.data.shards import (
    MANIFEST,
    PLAN,
    Manifest,
    Shard,
    ShardSource,
    incomplete,
    index_path,
    is_plan,
    names_path,
    parse_manifest,
)
from hyperbatch.data.source import BadSample, DataError, Location, max_open_files
from hyperbatch.errors import InputError

_PARQUET = ".parquet"
_CONNECTIONS = 32  # connections of a rank for reading single samples
_MAX_AHEAD = 4096  # the most samples that are requested and not taken yet; beyond that, the oldest are dropped
_SHARDS_AT_ONCE = 2  # shards that a rank fetches into the cache at the same time
_TRIES = 3  # attempts for a sample whose bytes arrive damaged


class RemoteShards:
    """An opened packed set at an address: its manifest, and its folder in the cache."""

    def __init__(self, address: Address, store: Store, content: bytes) -> None:
        self.manifest: Manifest = parse_manifest(content, file_url(address.url, MANIFEST))
        if self.manifest.schema == 1:
            raise InputError(f"{address} was packed without checksums, which remote data needs; pack it again")
        self._address, self._store = address, store
        self._version = str(zlib.crc32(content))

    def fetch_shard(self, shard: Shard, folder: Path) -> None:
        """Downloads a shard, its index and its names into the folder. Raises Missing if one of them does not exist, and
        InputError if they cannot be read or written."""
        tar = folder / shard.name
        for path in (index_path(tar), names_path(tar), tar):
            try:
                size = persist(lambda name=path.name: self._store.stat(name).size_bytes, patient=True)
                with open(path, "wb") as file:
                    for data in read_range(self._store, path.name, 0, size):
                        file.write(data)
            except RemoteError as error:
                told = not_readable(file_url(self._address.url, path.name), error)
                raise (Missing(str(told)) if isinstance(error, Missing) else told) from error
            except OSError as error:
                raise InputError(f"{path} cannot be written: {error.strerror}; free some space") from error

    def open(self, split: str) -> ShardSource:
        mirror = Mirror(self._store, self._version, self._address.cache_bytes)
        shards = self.manifest.splits[split].shards
        checksums = {index_path(Path(shard.name)).name: shard.index_crc32 for shard in shards}
        mirror.fetch_small(checksums | {names_path(Path(shard.name)).name: shard.names_crc32 for shard in shards})
        if all(mirror.path(shard.name).exists() for shard in shards):
            return ShardSource(mirror.folder, split, self.manifest)
        return RemoteShardSource(mirror, split, self.manifest)


def open_packed(address: Address) -> RemoteShards | None:
    """Opens the packed shards at an address. Returns None if there are none."""
    store = open_store(address.url)
    if _is_archive(address):
        return None
    try:
        content = _read(store, MANIFEST)
    except Missing:
        return None
    except RemoteError as error:
        raise not_readable(address.url, error) from error
    return RemoteShards(address, store, content)


def _read(store: Store, name: str) -> bytes:
    size = persist(lambda: store.stat(name).size_bytes, patient=False)
    return b"".join(read_range(store, name, 0, size, patient=False))


def fetched(address: Address) -> Path:
    """Fetches a set in archives to this host's disk. Returns the file at the address, or a folder with the files below
    the address."""
    return _fetched_file(address) if _is_archive(address) else _fetched_folder(address)


def _is_archive(address: Address) -> bool:
    return address.url.partition("?")[0].endswith(SUFFIXES)


def _fetched_file(address: Address) -> Path:
    """Fetches the file at the address to this host's disk."""
    store = open_store(address.url)
    try:
        stat = persist(lambda: store.stat(""), patient=False)
    except RemoteError as error:
        raise not_readable(address.url, error) from error
    return fetch_all(store, {"": stat}, address.cache_bytes) / file_name(address.url)


def _fetched_folder(address: Address) -> Path:
    store = open_store(address.url)
    try:
        names = persist(store.names, patient=False)
        if names is None:
            raise InputError(
                f"{address} has no {MANIFEST}, and a web server cannot be asked for a list of files; "
                f"give the address of packed shards, or of one archive ({', '.join(SUFFIXES)})"
            )
        if PLAN in names and is_plan(_read(store, PLAN)):
            raise InputError(incomplete(address))
        safe = [name for name in names if not {"", ".", ".."} & set(name.split("/")) and "\\" not in name]
        wanted = [name for name in safe if name.endswith((*SUFFIXES, _PARQUET))]
        if not wanted:
            raise InputError(
                f"{address} holds no packed shards, and no file that ends in {', '.join((*SUFFIXES, _PARQUET))}; "
                "check the address"
            )
        files = {name: persist(lambda name=name: store.stat(name), patient=False) for name in wanted}
    except RemoteError as error:
        raise not_readable(address.url, error) from error
    return fetch_all(store, files, address.cache_bytes)


class RemoteShardSource(ShardSource):
    """One split of a packed set at an address.

    Threads, which start with the first read, fetch whole shards into the cache. A sample whose shard is not cached yet
    is read by a range request: when the loader announces it (`will_read`), or at the latest when the loader reads it.
    """

    def __init__(self, mirror: Mirror, split: str, manifest: Manifest) -> None:
        super().__init__(mirror.folder, split, manifest, has_shards=False)
        self._mirror = mirror
        self._lock = threading.Lock()
        self._ahead: dict[int, Future[bytearray]] = {}  # by sample
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._started = False

    def __del__(self) -> None:
        if hasattr(self, "_stopped"):
            self._stopped.set()
            for _ in range(_CONNECTIONS):
                self._requests.put(None)
        super().__del__()

    def locations(self, ids: list[int]) -> list[Location] | None:
        return None  # threads of this process read the samples, from the cache or from the address

    def describe(self, index: int) -> str:
        return super().describe(index).replace(str(self._mirror.folder), self._mirror.store.url.rstrip("/"), 1)

    def will_read(self, ids: np.ndarray) -> None:
        self._start()
        for index in ids.tolist():
            with self._lock:
                if index in self._ahead or self._is_here(self.shard_of(index)):
                    continue
                request = self._request(index)
                self._ahead[index] = request.answer
                while len(self._ahead) > _MAX_AHEAD:
                    del self._ahead[next(iter(self._ahead))]
            self._requests.put(request)

    def read_buffer(self, index: int) -> bytearray:
        self._start()
        with self._lock:
            answer = self._ahead.pop(index, None)
            is_here = self._is_here(self.shard_of(index))
        if answer is None and is_here:
            with contextlib.suppress(BadSample):  # the cached sample is damaged or removed; read it from the address
                return super().read_buffer(index)
        if answer is None:
            request = self._request(index)
            request.run(self._mirror.store)
            answer = request.answer
        try:
            return answer.result()
        except _Damaged as error:
            raise BadSample(f"{self.describe(index)}: the bytes do not match the index's checksum") from error

    def _request(self, index: int) -> _Request:
        offset, length, _, _, _, checksum = self.index[index].item()
        return _Request(self._paths[self.shard_of(index)].name, offset, length, checksum)

    def _is_here(self, shard: int) -> bool:
        """Whether the whole shard is in the cache. If so, it is opened, so that it can be read even after it is
        removed."""
        if shard in self._open:
            return True
        if len(self._open) >= max_open_files():
            return self._paths[shard].exists()
        with contextlib.suppress(OSError):
            self._open[shard] = os.open(self._paths[shard], os.O_RDONLY)
        return shard in self._open

    def _start(self) -> None:
        """Starts the threads. They keep no reference to this source, and end with it or with the process."""
        with self._lock:
            if self._started:
                return
            self._started = True
        names = [path.name for path in self._paths]
        for _ in range(_SHARDS_AT_ONCE if self._mirror.limit_bytes else 0):
            threading.Thread(target=_fill_cache, args=(self._mirror, names, self._stopped), daemon=True).start()
        for _ in range(_CONNECTIONS):
            threading.Thread(target=_answer, args=(self._requests, self._mirror.store), daemon=True).start()


class _Damaged(Exception):
    """The received bytes differ from those that were packed."""


class _Request:
    """A request for one sample by its range, and a future for its bytes or its error."""

    def __init__(self, shard: str, offset: int, length: int, checksum: int) -> None:
        self._shard, self._offset, self._length, self._checksum = shard, offset, length, checksum
        self.answer: Future[bytearray] = Future()

    def run(self, store: Store) -> None:
        try:
            for _ in range(_TRIES):
                data = bytearray()
                for piece in read_range(store, self._shard, self._offset, self._offset + self._length):
                    data += piece
                if zlib.crc32(data) == self._checksum:
                    self.answer.set_result(data)
                    return
            self.answer.set_exception(_Damaged())
        except RemoteError as error:
            # This is not a BadSample: the loader would replace the sample, and the run would not be reproducible.
            where = file_url(store.url, self._shard)
            failed = DataError(f"{where} cannot be read: {error}; when it can, continue the run with --resume")
            failed.__cause__ = error
            self.answer.set_exception(failed)
        except BaseException as error:  # every error is passed on to the thread that waits
            self.answer.set_exception(error)


def _answer(requests: queue.SimpleQueue[_Request | None], store: Store) -> None:
    while (request := requests.get()) is not None:
        request.run(store)


def _fill_cache(mirror: Mirror, names: list[str], stopped: threading.Event) -> None:
    """Fetches one shard after the other until the cache is full. Shards that another thread or rank is fetching are
    skipped."""
    for name in names:
        if mirror.path(name).exists():
            continue
        try:
            stat = persist(partial(mirror.store.stat, name), patient=True, stopped=stopped)
            mirror.fetch(name, stat, wait=False, stopped=stopped)
        except DiskFull as error:
            _say(f"{error}; samples that are not cached are read from {mirror.store.url}")
            return
        except NoRoom:
            return
        except RemoteError:
            pass  # a read of one of the shard's samples will report the error
        except OSError as error:
            _say(
                f"no more data is cached in {mirror.folder}: {error.strerror}; samples are read from {mirror.store.url}"
            )
            return
        if stopped.is_set():
            return


def _say(line: str) -> None:
    print(f"hyperbatch: {line}", file=sys.stderr, flush=True)
