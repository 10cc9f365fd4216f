"""Packed shards: tars that WebDataset can read, each with an index, so that any sample takes a single read.

DIR/manifest.json                     classes, counts, the list of shards; written last, so it marks a complete set
DIR/train-000000.tar                  <key>.jpg <key>.cls <key>.jpg <key>.cls ...
DIR/train-000000.index.npy            one INDEX_DTYPE row per image
DIR/train-000000.names                the original name of each image, separated by zero bytes

The manifest has a checksum of itself and of every index and names file, and the index has one of every image, so
changed labels are detected as well as changed pixels. Sets of the first schema have no such checksums in the manifest
and no names, and are still supported.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import stat
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from hyperbatch.data import kept
from hyperbatch.data.source import BadSample, EncodedSource, Location, can_be_printed, max_open_files
from hyperbatch.errors import InputError

MANIFEST = "manifest.json"
PLAN = "pack.json"  # describes what a pack holds, or will hold once it is finished
FORMAT = "hyperbatch-shards"
SCHEMA = 2
SPLITS = ("train", "val")
BLOCK_BYTES = 512  # of a tar
INDEX_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # offset of the image's bytes in the tar
        ("length", "<u4"),
        ("label", "<i4"),
        ("width", "<u4"),  # 0 x 0 if the image's header could not be read
        ("height", "<u4"),
        ("crc32", "<u4"),
    ]
)
# The header that numpy.save writes. It is matched here because numpy's reader can raise anything on a damaged header.
_INDEX_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    + re.escape(f"{{'descr': {INDEX_DTYPE.descr!r}, 'fortran_order': False, 'shape': (").encode()
    + rb"(\d{1,18}),\), } *\n",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Shard:
    name: str
    samples: int
    index_crc32: int | None = None  # of the index file; this field and the next are None in sets of the first schema
    names_crc32: int | None = None


@dataclass(frozen=True, kw_only=True)
class Split:
    samples: int
    bytes: int
    classes: tuple[int, ...]  # the numbers of the classes that were packed into this split
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The checked content of manifest.json."""

    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of the file: the fields and a checksum of them."""
        splits = {name: asdict(split) for name, split in self.splits.items()}
        values = {"format": FORMAT, "schema": self.schema, "classes": list(self.classes), "splits": splits}
        return values | {"crc32": _checksum(values)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads the content of the file. Raises ValueError (also KeyError, TypeError, AttributeError) if it is
        invalid."""
        if values["format"] != FORMAT:
            raise ValueError(f"format is {values['format']!r}")
        schema = _count(values["schema"])
        if not 1 <= schema <= SCHEMA:
            raise ValueError(f"schema is {schema}, and this version reads up to {SCHEMA}")
        if schema > 1 and _checksum({k: v for k, v in values.items() if k != "crc32"}) != values["crc32"]:
            raise ValueError("its classes, counts or shards do not match its checksum")
        if schema == 1 and "crc32" in values:
            raise ValueError("a manifest of schema 1 has no checksum")
        classes = tuple(values["classes"])
        if not classes or not all(isinstance(name, str) for name in classes) or len(set(classes)) < len(classes):
            raise ValueError("classes are not a list of different names")
        if not all(map(can_be_printed, classes)):
            raise ValueError("a class has a name that cannot be printed")
        splits = {name: _split(name, split, schema, len(classes)) for name, split in values["splits"].items()}
        if not splits or not set(splits) <= set(SPLITS):
            raise ValueError(f"splits are {list(splits)}, not train and val")
        return cls(classes=classes, splits=splits, schema=schema)


def _split(name: str, values: Mapping[str, Any], schema: int, classes: int) -> Split:
    shards = []
    for entry in values["shards"]:
        checksums = {key: _count(entry[key]) for key in ("index_crc32", "names_crc32")} if schema > 1 else {}
        shards.append(Shard(name=_plain_name(entry["name"]), samples=_count(entry["samples"]), **checksums))
    samples = sum(shard.samples for shard in shards)
    if samples == 0:
        raise ValueError(f"it lists no {name} samples")
    if samples != _count(values["samples"]) or len({shard.name for shard in shards}) < len(shards):
        raise ValueError(f"the shards of {name} do not add up to {values['samples']} samples")
    packed = tuple(map(_count, values["classes"])) if schema > 1 else tuple(range(classes))
    if packed and max(packed) >= classes:
        raise ValueError(f"{name} has a class {max(packed)}, and there are {classes}")
    return Split(samples=samples, bytes=_count(values["bytes"]), classes=packed, shards=tuple(shards))


def _checksum(values: Mapping[str, Any]) -> int:
    """Returns a checksum of the content, which does not depend on the order of keys or on white space."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _plain_name(name: Any) -> str:
    """Checks a shard's name. A manifest is not trusted, and a shard must be in the set's own folder."""
    if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".tar") or "\0" in name:
        raise ValueError(f"it names a shard {name!r} outside its folder")
    return name


class ShardSource(EncodedSource):
    """One split of a packed set. Every read is checked against the index's checksum.

    has_shards=False: the folder may hold the index alone (`remote.source`).
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest, *, has_shards: bool = True) -> None:
        self._shards = manifest.splits[split].shards
        self._paths = [folder / shard.name for shard in self._shards]
        self._names = [str(path) for path in self._paths]
        self.index = _joined_index(folder, self._shards, has_shards)
        self._ends = np.cumsum([shard.samples for shard in self._shards])
        labels = self.index["label"].astype(np.int64)
        if labels.min() < 0 or labels.max() >= len(manifest.classes):
            raise InputError(
                f"{folder}: a {split} index has labels outside its {len(manifest.classes)} classes; pack the set again"
            )
        super().__init__(split, manifest.classes, labels)
        # Shards are opened when they are first read. Otherwise thousands of ranks would open every shard at the same
        # moment, and a rank whose reading processes open the shards would not use its own descriptors.
        self._open: dict[int, int] = {}  # shard -> descriptor
        self._most_open, self._opening = max_open_files(), threading.Lock()
        denied = next((path for path in self._paths if not os.access(path, os.R_OK)), None) if has_shards else None
        if denied is not None:
            raise InputError(f"{denied} cannot be read: {os.strerror(errno.EACCES)}; check its permissions")

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open", {}).values():
            os.close(descriptor)

    def shard_of(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))

    def read(self, index: int) -> bytes:
        return bytes(self.read_buffer(index))

    def read_buffer(self, index: int) -> bytearray:
        shard = self.shard_of(index)
        offset, length, _, _, _, checksum = self.index[index].item()
        try:
            if (descriptor := self._descriptor(shard)) is not None:
                data = _pread(descriptor, length, offset)
            else:
                with open(self._paths[shard], "rb") as file:
                    data = _pread(file.fileno(), length, offset)
        except OSError as error:
            raise BadSample(f"{self.describe(index)}: {error.strerror}") from error
        if len(data) != length or zlib.crc32(data) != checksum:
            raise BadSample(f"{self.describe(index)}: the bytes do not match the index's checksum")
        return data

    def _descriptor(self, shard: int) -> int | None:
        """Returns the descriptor of a shard, which stays open, or None if too many other shards are open."""
        if shard not in self._open and len(self._open) < self._most_open:
            with self._opening:
                if shard not in self._open and len(self._open) < self._most_open:
                    self._open[shard] = os.open(self._paths[shard], os.O_RDONLY)
        return self._open.get(shard)

    def locations(self, ids: list[int]) -> list[Location] | None:
        rows = self.index[ids]
        shards = np.searchsorted(self._ends, ids, side="right").tolist()
        columns = (rows[name].tolist() for name in ("offset", "length", "crc32"))
        return [
            Location(self._names[shard], *row) for shard, row in zip(shards, zip(*columns, strict=True), strict=True)
        ]

    def describe(self, index: int) -> str:
        shard = self.shard_of(index)
        row = index - (int(self._ends[shard - 1]) if shard else 0)
        names = _known_names(self._paths[shard], self._shards[shard])
        packed_from = f" (packed from {os.fsdecode(names[row])})" if names else ""
        return f"{self._paths[shard]}[{row}]{packed_from}"

    def sample_names(self) -> np.ndarray:
        """The lengths and checksums of the samples, so that a set's identity does not depend on where it was packed
        from."""
        names = np.empty(len(self), [("length", "<u4"), ("crc32", "<u4")])
        names["length"], names["crc32"] = self.index["length"], self.index["crc32"]
        return names

    def sizes_bytes(self) -> np.ndarray:
        return self.index["length"].astype(np.int64)


def _pread(descriptor: int, length: int, offset: int) -> bytearray:
    if not hasattr(os, "preadv"):  # macOS
        return bytearray(os.pread(descriptor, length, offset))
    data = bytearray(length)
    del data[os.preadv(descriptor, [data], offset) :]
    return data


def read_manifest(folder: Path) -> Manifest:
    """Returns the checked content of manifest.json. Raises InputError if the folder holds no complete packed set."""
    path = folder / MANIFEST
    try:
        return parse_manifest(_content(path), path)
    except FileNotFoundError as error:
        raise InputError(incomplete(folder)) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> InputError:
    hint = "check its permissions" if isinstance(error, PermissionError) else "pack the set again"
    name = error.filename if isinstance(error.filename, str) else path  # it may be a file descriptor
    return InputError(f"{name} cannot be read: {error.strerror or error}; {hint}")


def holds_plan(folder: Path) -> bool:
    """Whether a pack was started in the folder. Raises InputError if its pack.json cannot be read."""
    path = folder / PLAN
    if not path.is_file():
        return False
    try:
        return is_plan(_content(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check its permissions") from error


def is_plan(content: bytes) -> bool:
    """Whether a pack.json or manifest.json was written by hyperbatch. Other programs use these names, too."""
    return FORMAT.encode() in content


def holds_packed(folder: Path) -> bool:
    """Whether the folder holds a packed set, which may be damaged or not complete."""
    path = folder / MANIFEST
    try:
        if path.exists() and is_plan(_content(path)):
            return True
    except OSError as error:
        raise _unreadable(path, error) from error
    return holds_plan(folder) or (path.exists() and any(folder.glob("*.index.npy")))


def incomplete(where: object) -> str:
    return (
        f"{where} holds no complete packed set ({MANIFEST} is missing); `hyperbatch data pack SRC DST` packs a set or "
        "finishes one that was interrupted"
    )


def parse_manifest(content: bytes, where: object) -> Manifest:
    try:
        return Manifest.from_dict(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{where} is not a manifest of packed shards: {said}; pack the set again") from error


def index_path(shard: Path) -> Path:
    return shard.with_name(shard.stem + ".index.npy")


def names_path(shard: Path) -> Path:
    return shard.with_name(shard.stem + ".names")


def read_index(
    shard: Path, samples: int | None = None, checksum: int | None = None, *, has_shard: bool = True
) -> np.ndarray:
    """Returns the index of a shard. Raises InputError if it is damaged, or points outside the shard. has_shard: whether
    the shard itself exists, so that its size can be checked."""
    path = index_path(shard)
    try:
        data = _content(path)
        size_bytes = shard.stat().st_size if has_shard else 1 << 62
    except OSError as error:
        raise _unreadable(path, error) from error
    if checksum is not None and zlib.crc32(data) != checksum:
        raise InputError(f"{path} does not match the manifest's checksum, so labels may be wrong; pack the set again")
    header = _INDEX_HEADER.match(data)
    if header is None or int.from_bytes(header[1], "little") != header.end() - 10:
        raise InputError(f"{path} is not a shard index; pack the set again")
    if int(header[2]) * INDEX_DTYPE.itemsize != len(data) - header.end():
        raise InputError(f"{path} is not a shard index: it is cut off or too long; pack the set again")
    index = np.frombuffer(data, INDEX_DTYPE, offset=header.end())
    if samples is not None and len(index) != samples:
        raise InputError(f"{path} has {len(index)} samples, the manifest says {samples}; pack the set again")
    # Compared without adding offset and length, because a malicious offset could make the sum overflow.
    offsets, room = index["offset"], size_bytes - np.minimum(index["offset"], size_bytes)
    if ((offsets > size_bytes) | (index["length"] > room)).any():
        raise InputError(f"{path} points past the end of {shard.name}; pack the set again")
    # Each image starts at a block boundary after its header, and the offsets increase.
    if (offsets % BLOCK_BYTES != 0).any() or (offsets < BLOCK_BYTES).any() or (offsets[1:] <= offsets[:-1]).any():
        raise InputError(f"{path} has rows that are not samples of {shard.name}; pack the set again")
    return index


def _joined_index(folder: Path, shards: tuple[Shard, ...], has_shards: bool) -> np.ndarray:
    """Returns the checked rows of all shards. The processes of a host share the memory of a large set's rows."""

    def parts() -> Iterator[np.ndarray]:
        for shard in shards:
            yield read_index(folder / shard.name, shard.samples, shard.index_crc32, has_shard=has_shards)

    try:
        state = [(shard, _state(index_path(folder / shard.name))) for shard in shards]
        if has_shards:
            state += [(shard, _state(folder / shard.name)) for shard in shards]
    except OSError as error:
        raise _unreadable(folder, error) from error
    key = hashlib.sha256(repr((str(folder.resolve()), state)).encode()).hexdigest()
    return kept.shared_rows(f"index-{key[:16]}", INDEX_DTYPE, sum(shard.samples for shard in shards), parts)


def _state(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def read_names(shard: Path, samples: int, checksum: int | None) -> list[bytes]:
    """Returns the original names of the shard's images. Raises InputError if they cannot be read."""
    path = names_path(shard)
    try:
        data = _content(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    names = data.split(b"\0")
    if (checksum is not None and zlib.crc32(data) != checksum) or len(names) != max(1, samples):
        raise InputError(f"{path} does not match the manifest's checksum; pack the set again")
    return names


@functools.lru_cache(maxsize=16)
def _known_names(path: Path, shard: Shard) -> list[bytes] | None:
    """Returns the original names for use in messages, or None if they are not known."""
    try:
        return None if shard.names_crc32 is None else read_names(path, shard.samples, shard.names_crc32)
    except InputError:
        return None


def _content(path: Path) -> bytes:
    """Reads a regular file. Raises OSError for anything else, such as a pipe, on which reading could block forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        return file.read()
