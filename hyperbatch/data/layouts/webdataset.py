"""WebDataset shards of other tools: *train*.tar and *val*.tar with KEY.jpg and KEY.cls, or a label in KEY.json.

Each shard is walked once. The places and labels of its images are then kept next to it, or in the cache folder.
"""

from __future__ import annotations

import functools
import itertools
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hyperbatch.data import kept
from hyperbatch.data.folders import Content, Listed, is_image
from hyperbatch.data.layouts.archives import (
    TAR_SUFFIXES,
    MemberSource,
    plain_rows,
    tar_content,
    tar_members,
    whole,
)
from hyperbatch.data.layouts.found import (
    TRAIN,
    Found,
    check_all_parts,
    classes_of,
    files_by_split,
    label_text,
    numbered,
    val_name,
)
from hyperbatch.errors import InputError

_PEEKED_MEMBERS = 16
_LABEL_BYTES = 1 << 20  # a larger member is not a label
_JSON_LABELS = ("label", "cls", "class")


def webdataset(folder: Path) -> Found | None:
    shards = files_by_split(folder, TAR_SUFFIXES)
    val = val_name(shards, folder)
    if not any(_is_webdataset(shards[split][0]) for split in (TRAIN, val) if split in shards):
        return None

    @functools.cache
    def walked(split: str) -> tuple[list[Content], list[kept.Arrays]]:
        contents = [tar_content(path) for path in check_all_parts(shards[split])]
        return contents, [_index(content) for content in contents]

    def opened(split: str) -> MemberSource:
        contents, indexes = walked(split)
        texts = _texts(indexes)
        classes = classes_of(_texts(walked(TRAIN)[1]) if TRAIN in shards else texts)
        paths = [os.fsdecode(name) for index in indexes for name in index["names"].tolist()]
        rows = [plain_rows(index["spans"], file) for file, index in enumerate(indexes)]
        listed = Listed(split, classes, numbered(texts, classes, f"the {split} set in {folder}"), paths)
        return MemberSource(listed, contents, np.concatenate(rows))

    return Found(
        kind="WebDataset shards",
        where=str(folder),
        train=(lambda: opened(TRAIN)) if TRAIN in shards else None,
        val=(lambda: opened(val)) if val is not None else None,
        expected=lambda split: f"no shards of the {split} set; expected {split}-000000.tar or the like",
    )


def _is_webdataset(path: Path) -> bool:
    """Whether there is a label among the first members."""
    try:
        with tarfile.open(path) as tar:
            return any(member.name.endswith((".cls", ".json")) for member in itertools.islice(tar, _PEEKED_MEMBERS))
    # The layout that reads the whole tar will report what is wrong.
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError, lzma.LZMAError, zlib.error):
        return False


def _texts(indexes: list[kept.Arrays]) -> list[str]:
    return [text.decode() for index in indexes for text in index["labels"].tolist()]


def _index(content: Content) -> kept.Arrays:
    def walk() -> kept.Arrays:
        samples = list(_samples(content))
        content.close()  # there may be more shards than the process may open at a time
        if not samples:
            raise InputError(f"{content.path} holds no images; remove it or fetch it again")
        names, spans, labels = zip(*samples, strict=True)
        return {"names": np.array(names), "spans": np.array(spans, dtype=np.int64), "labels": np.array(labels)}

    return kept.indexed(content.path, "labelled images", walk)


def _samples(content: Content) -> Iterator[tuple[bytes, tuple[int, int], bytes]]:
    """Yields (name, (offset, length), label). Consecutive members with the same key are one sample. Its image is the
    one whose extension has the fewest dots: KEY.jpg rather than KEY.mask.png."""
    # macOS puts a hidden member before each member.
    members = tar_members(whole(content), str(content.path))
    shown = (member for member in members if not os.path.basename(member[0]).startswith("."))
    for key, members in itertools.groupby(shown, lambda member: _key(member[0])):
        parts: dict[str, tuple[str, int, int]] = {}
        for member in members:
            suffix = member[0][len(key) + 1 :].lower()
            if parts.setdefault(suffix, member) is not member:
                raise InputError(
                    f"{content.path}: sample {key!r} has more than one .{suffix}, so others may have its key; "
                    "give every sample a key of its own"
                )
        suffixes = [suffix for suffix, part in parts.items() if is_image(os.path.basename(part[0]))]
        if not suffixes and "cls" in parts:
            kinds = ", ".join(suffix for suffix in parts if suffix != "cls") or "nothing else"
            raise InputError(
                f"{content.path}: sample {key!r} has a .cls and no image, only {kinds}; add one or remove it"
            )
        if not suffixes:
            continue
        image = parts[min(suffixes, key=lambda suffix: suffix.count("."))]
        label = _label(content, parts)
        if label is None:
            raise InputError(
                f"{content.path}: sample {key!r} has no .cls, and no label in its .json (a text or a whole number); "
                "label it or remove it"
            )
        yield os.fsencode(image[0]), image[1:], label


def _key(name: str) -> str:
    """Returns the name up to the first dot of the file's name, which is WebDataset's key."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _label(content: Content, parts: dict[str, tuple[str, int, int]]) -> bytes | None:
    for suffix in ("cls", "json"):
        if suffix not in parts or parts[suffix][2] > _LABEL_BYTES:
            continue
        text = content.read(*parts[suffix][1:])
        try:
            if suffix == "json":
                fields = json.loads(text)
                found = label_text(next(fields[name] for name in _JSON_LABELS if name in fields))
            else:
                found = label_text(text.decode())
            if found is not None:
                return found.encode()
        except (ValueError, RecursionError, StopIteration, TypeError):
            continue
    return None
