"""Packed shards: tars that WebDataset reads, with an index beside each so that any sample is one read away.

DIR/manifest.json                     classes, counts, the list of shards; written last, so it marks a complete set
DIR/train-000000.tar                  <key>.jpg <key>.cls <key>.jpg <key>.cls ...
DIR/train-000000.index.npy            one INDEX_DTYPE row per image
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hyperbatch.data.source import BadSample, EncodedSource, Location
from hyperbatch.errors import InputError

MANIFEST = "manifest.json"
FORMAT = "hyperbatch-shards"
INDEX_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # of the image's bytes in the tar
        ("length", "<u4"),
        ("label", "<i4"),
        ("width", "<u4"),  # 0 x 0 where the header could not be read
        ("height", "<u4"),
        ("crc32", "<u4"),
    ]
)
_MAX_OPEN = 256  # shards kept open; of a larger set the rest are opened for each read


class ShardSource(EncodedSource):
    """One split of a packed set. Every read is checked against the index's checksum."""

    def __init__(self, folder: Path, split: str, manifest: dict[str, Any]) -> None:
        shards = manifest["splits"][split]["shards"]
        self._paths = [folder / _plain_name(folder, shard["name"]) for shard in shards]
        self._names = [str(path) for path in self._paths]
        indexes = [read_index(path, shard["samples"]) for path, shard in zip(self._paths, shards, strict=True)]
        self.index = np.concatenate(indexes)
        self._ends = np.cumsum([len(index) for index in indexes])
        classes = tuple(manifest["classes"])
        labels = self.index["label"].astype(np.int64)
        if len(labels) == 0:
            raise InputError(f"{folder / MANIFEST} lists no {split} samples; pack the set again")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise InputError(
                f"{folder}: a {split} index has labels outside its {len(classes)} classes; pack the set again"
            )
        super().__init__(split, classes, labels)
        self._open = [os.open(path, os.O_RDONLY) for path in self._paths[:_MAX_OPEN]]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open", ()):
            os.close(descriptor)

    def read(self, index: int) -> bytes:
        return bytes(self.read_buffer(index))

    def read_buffer(self, index: int) -> bytearray:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        offset, length, _, _, _, checksum = self.index[index].item()
        try:
            if shard < len(self._open):
                data = _pread(self._open[shard], length, offset)
            else:
                with open(self._paths[shard], "rb") as file:
                    data = _pread(file.fileno(), length, offset)
        except OSError as error:
            raise BadSample(f"{self.describe(index)}: {error.strerror}") from error
        if len(data) != length or zlib.crc32(data) != checksum:
            raise BadSample(f"{self.describe(index)}: the bytes do not match the index's checksum")
        return data

    def locations(self, ids: list[int]) -> list[Location]:
        rows = self.index[ids]
        shards = np.searchsorted(self._ends, ids, side="right").tolist()
        columns = (rows[name].tolist() for name in ("offset", "length", "crc32"))
        return [
            Location(self._names[shard], *row) for shard, row in zip(shards, zip(*columns, strict=True), strict=True)
        ]

    def describe(self, index: int) -> str:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[shard - 1]) if shard else 0
        return f"{self._paths[shard]}[{index - start}]"

    def sizes_bytes(self) -> np.ndarray:
        return self.index["length"].astype(np.int64)


def _pread(descriptor: int, length: int, offset: int) -> bytearray:
    if not hasattr(os, "preadv"):  # macOS
        return bytearray(os.pread(descriptor, length, offset))
    data = bytearray(length)
    del data[os.preadv(descriptor, [data], offset) :]
    return data


def open_shards(folder: Path) -> tuple[ShardSource, ShardSource]:
    """(train, val) of a packed set."""
    manifest = read_manifest(folder)
    return ShardSource(folder, "train", manifest), ShardSource(folder, "val", manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked content of manifest.json; InputError when the folder holds no complete packed set."""
    path = folder / MANIFEST
    if not path.exists():
        raise InputError(
            f"{folder} holds no complete packed set ({MANIFEST} is missing); run hyperbatch data pack again"
        )
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format is {manifest['format']!r}")
        for split in ("train", "val"):
            for shard in manifest["splits"][split]["shards"]:
                _plain_name(folder, shard["name"])
                int(shard["samples"])
        tuple(manifest["classes"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a manifest of packed shards: {error}; pack the set again") from error
    return manifest


def index_path(shard: Path) -> Path:
    return shard.with_name(shard.stem + ".index.npy")


def read_index(shard: Path, samples: int | None = None) -> np.ndarray:
    """The index of a shard, checked to lie within it. InputError says what does not fit."""
    path = index_path(shard)
    try:
        index = np.load(path, allow_pickle=False)
        size_bytes = shard.stat().st_size
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: {error}; pack the set again") from error
    if index.dtype != INDEX_DTYPE or index.ndim != 1:
        raise InputError(f"{path} is not a shard index; pack the set again")
    if samples is not None and len(index) != samples:
        raise InputError(f"{path} has {len(index)} samples, the manifest says {samples}; pack the set again")
    # Compared without a sum, which a hostile offset could make wrap around.
    room = size_bytes - np.minimum(index["offset"], size_bytes)
    if ((index["offset"] > size_bytes) | (index["length"] > room)).any():
        raise InputError(f"{path} points past the end of {shard.name}; pack the set again")
    return index


def _plain_name(folder: Path, name: str) -> str:
    if name != os.path.basename(name) or not name.endswith(".tar"):
        raise InputError(f"{folder / MANIFEST} names a shard {name!r} outside its folder; pack the set again")
    return name
