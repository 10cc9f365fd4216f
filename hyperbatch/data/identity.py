"""Identifies the samples of a set, and their order, by a few hashes that are saved with a run.

A resumed run continues at a position of the sample stream, and the stream refers to samples by their number in the set.
With other data, or the same data in another order, some samples would be shown twice in an epoch and others never.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hyperbatch.data.source import ArraySource, EncodedSource, Source, class_difference, spread_ids
from hyperbatch.errors import InputError

_PROBED_IMAGES = 4096  # images of an in-memory set that are hashed; the labels of all samples are
_FORMS = {
    "FolderSource": "folders",
    "TarSource": "tars",
    "MemberSource": "archives",
    "ParquetSource": "parquet files",
    "ShardSource": "packed shards",
    "RemoteShardSource": "packed shards",
}
_HASHED_SAMPLES = 1 << 16  # samples hashed at a time: a set may have many millions
_FNV_START, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3

_known: WeakKeyDictionary[Source, SampleList] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class SampleList:
    """Identifies a split's samples by their classes and names, not by their location: a moved or copied set is
    equal."""

    form: str
    samples: int
    order: str  # hash of all samples in their order
    members: str  # hash of all samples that does not depend on their order
    to_dict = asdict


def sample_list(source: Source) -> SampleList:
    """Returns the sample list of a source. It is computed once for each source."""
    try:
        known = _known.get(source)
    except TypeError:  # a user's own kind of source that cannot be a key
        return _sample_list(source)
    if known is None:
        known = _known[source] = _sample_list(source)
    return known


def _sample_list(source: Source) -> SampleList:
    classes = np.array([str(name).encode("utf-8", "surrogatepass") for name in source.classes])
    class_hashes = _fnv(np.full(len(classes), _FNV_START, dtype=np.uint64), classes)
    names, order, members = _identities(source), hashlib.sha256(), 0
    for start in range(0, len(source), _HASHED_SAMPLES):
        part = slice(start, start + _HASHED_SAMPLES)
        labels = source.labels[part]
        samples = _fnv(np.full(len(labels), _FNV_START, dtype=np.uint64), names[part])
        samples = _fnv(samples, class_hashes[labels])
        order.update(samples.astype("<u8").tobytes())
        members += int(samples.sum(dtype=np.uint64))
    form = type(source).__name__
    return SampleList(
        form=_FORMS.get(form, form),
        samples=len(source),
        order=order.hexdigest(),
        members=f"{members % (1 << 64):016x}",
    )


def _identities(source: Source) -> np.ndarray:
    """Returns an array of length n: the names of files, or checksums of images. It is zero where neither is known."""
    if isinstance(source, EncodedSource):
        return source.sample_names()
    checksums = np.zeros(len(source), dtype=np.uint32)
    if isinstance(source, ArraySource):
        ids = spread_ids(source, _PROBED_IMAGES)
        checksums[ids] = [zlib.crc32(source.image(i).tobytes()) for i in ids]
    return checksums


def _fnv(hashes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Continues the FNV-1a hash of each row from `hashes`. Zero bytes are skipped: they pad names to the longest
    one."""
    rows = np.ascontiguousarray(rows)
    for column in rows.view(np.uint8).reshape(len(rows), -1).T:
        hashes = np.where(column != 0, (hashes ^ column) * np.uint64(_FNV_PRIME), hashes)
    return hashes


def check_same_data(
    saved: Mapping[str, Mapping[str, Any]] | None,
    *,
    classes: Sequence[str],
    samples: int,
    train: Source,
    val: Source,
) -> None:
    """Raises InputError, which says how the sets differ from those of the resumed run.

    saved: the saved sample lists of "train" and "val", or None for a run of a version that did not save them yet.
    classes, samples: those of the saved training set.
    """
    differences = []
    if list(classes) != list(train.classes):
        told = class_difference(classes, train.classes, ("then", "now"))
        differences.append(f"{len(classes)} classes then and {len(train.classes)} now ({told})")
    if samples != len(train):
        differences.append(f"train had {samples} samples and now has {len(train)}")
    if saved and not differences:
        for split, source in (("train", train), ("val", val)):
            before = SampleList(**{field.name: saved[split][field.name] for field in fields(SampleList)})
            text = _difference(before, sample_list(source))
            differences += [f"{split} {text}"] if text else []
    if differences:
        raise InputError(
            f"--resume: the data set differs from that of the saved run: {'; '.join(differences)}; "
            "use --data with the original data set, or start a new run with another --out"
        )


def _difference(before: SampleList, now: SampleList) -> str:
    if before.order == now.order:
        return ""
    if before.samples != now.samples:
        return f"had {before.samples} samples and now has {now.samples}"
    if before.members == now.members:
        return "has the same samples in another order"
    if before.form != now.form:
        return f"was read from {before.form} and is now read from {now.form}, whose samples have another order or name"
    return "has the same number of samples, but other samples"
