"""WebDataset shards that others wrote: *train*.tar and *val*.tar with KEY.jpg and KEY.cls, or a label in KEY.json.

Each shard is walked once; where its images lie and what they are labelled is kept beside it, or in the cache folder.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hyperbatch.data import kept
from hyperbatch.data.folders import Listed, is_image
from hyperbatch.data.layouts.archives import Content, MemberSource, Window, plain_rows, tar_members, whole
from hyperbatch.data.layouts.found import TRAIN, Found, classes_of, files_by_split, label_text, numbered, val_name
from hyperbatch.errors import InputError

_PEEKED_MEMBERS = 16
_LABEL_BYTES = 1 << 20  # more is no label
_JSON_LABELS = ("label", "cls", "class")


def webdataset(folder: Path) -> Found | None:
    shards = files_by_split(folder, (".tar",))
    val = val_name(shards, folder)
    if not any(_is_webdataset(shards[split][0]) for split in (TRAIN, val) if split in shards):
        return None

    def opened(split: str) -> MemberSource:
        indexes = [_index(path) for path in shards[split]]
        texts = _texts(indexes)
        known = indexes if split == TRAIN or TRAIN not in shards else [_index(path) for path in shards[TRAIN]]
        classes = classes_of(_texts(known))
        paths = [os.fsdecode(name) for index in indexes for name in index["names"].tolist()]
        rows = [plain_rows(index["spans"], file) for file, index in enumerate(indexes)]
        listed = Listed(split, classes, numbered(texts, classes, f"the {split} set in {folder}"), paths)
        return MemberSource(listed, [Content(path, path) for path in shards[split]], np.concatenate(rows))

    return Found(
        kind="WebDataset shards",
        where=str(folder),
        train=(lambda: opened(TRAIN)) if TRAIN in shards else None,
        val=(lambda: opened(val)) if val is not None else None,
        expected=lambda split: f"no shards of the {split} set; expected {split}-000000.tar or the like",
    )


def _is_webdataset(path: Path) -> bool:
    """A label among the first members."""
    try:
        members = itertools.islice(tar_members(whole(Content(path, path)), str(path)), _PEEKED_MEMBERS)
        return any(name.endswith((".cls", ".json")) for name, _, _ in members)
    except (InputError, OSError):
        return False  # whoever reads all of it says what is wrong


def _texts(indexes: list[kept.Arrays]) -> list[str]:
    return [text.decode() for index in indexes for text in index["labels"].tolist()]


def _index(path: Path) -> kept.Arrays:
    def walk() -> kept.Arrays:
        content = Content(path, path)
        samples = list(_samples(path, content, whole(content)))
        if not samples:
            raise InputError(f"{path} holds no images; remove it or fetch it again")
        names, spans, labels = zip(*samples, strict=True)
        return {"names": np.array(names), "spans": np.array(spans, dtype=np.int64), "labels": np.array(labels)}

    return kept.indexed(path, walk)


def _samples(path: Path, content: Content, window: Window) -> Iterator[tuple[bytes, tuple[int, int], bytes]]:
    """(name, (offset, length), label): members that follow each other and have one key are one sample. Its image is
    KEY.jpg, before KEY.mask.png and the like."""
    # macOS puts a hidden member before each of its own.
    shown = (member for member in tar_members(window, str(path)) if not os.path.basename(member[0]).startswith("."))
    for key, members in itertools.groupby(shown, lambda member: _key(member[0])):
        parts = {name[len(key) + 1 :].lower(): (name, offset, length) for name, offset, length in members}
        suffixes = [suffix for suffix, part in parts.items() if is_image(os.path.basename(part[0]))]
        if not suffixes:
            continue
        image = parts[min(suffixes, key=lambda suffix: suffix.count("."))]
        label = _label(content, parts)
        if label is None:
            raise InputError(f"{path}: sample {key!r} has no .cls, and no label in its .json; label it or remove it")
        yield os.fsencode(image[0]), image[1:], label


def _key(name: str) -> str:
    """Up to the first dot of the file's name, as WebDataset cuts it."""
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
