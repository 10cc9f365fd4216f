"""The result of a layout that recognises a folder or a file, and the names of splits."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperbatch.data.source import ArraySource, EncodedSource, can_be_printed
from hyperbatch.errors import InputError

TRAIN = "train"
VAL_NAMES = ("val", "valid", "validation")
TEST = "test"  # used as the validation set if there is no other

Open = Callable[[], ArraySource | EncodedSource]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A data set that was recognised by its names alone. A missing split is reported when it is opened."""

    kind: str  # what `data info` shows
    where: str
    train: Open | None
    val: Open | None
    expected: Callable[[str], str]  # message for a missing split: "no val/ folder; expected DIR/val/CLASS/IMAGE.jpg"

    def open(self, split: str) -> ArraySource | EncodedSource:
        opened = self.train if split == TRAIN else self.val
        if opened is None:
            raise InputError(f"{self.where} has {self.expected(split)}")
        return opened()


def val_name(names: Collection[str], where: object) -> str | None:
    """Returns which of the names is the validation set, or None."""
    found = [name for name in VAL_NAMES if name in names]
    if len(found) > 1:
        raise InputError(f"{where} has {' and '.join(found)}; keep one of them as the validation set")
    return found[0] if found else TEST if TEST in names else None


def split_of(name: str) -> str | None:
    """Returns the split that a file's name contains, such as imagenet1k-validation-07.tar, or None if it contains none
    or several."""
    words = {word for word in re.split("[^a-z]+", name.lower()) if word in (TRAIN, *VAL_NAMES, TEST)}
    return words.pop() if len(words) == 1 else None


def files_by_split(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """Returns split name -> sorted files: those named after a split in DIR or DIR/data, otherwise those in
    DIR/SPLIT."""
    found: dict[str, list[Path]] = {}
    for place in (folder, folder / "data"):
        for path in _files(place, suffixes):
            split = split_of(path.name)
            if split is not None:
                found.setdefault(split, []).append(path)
        if found:
            return found
    for split in (TRAIN, *VAL_NAMES, TEST):
        if files := _files(folder / split, suffixes):
            found[split] = files
    return found


def check_all_parts(files: list[Path]) -> list[Path]:
    """Raises InputError if a part is missing from files that are numbered like train-00000-of-00002."""
    parts: dict[tuple[str, str], dict[int, str]] = {}
    for path in files:
        if named := re.match(r"(.*[^0-9])?([0-9]+)-of-([0-9]+)(?![0-9])", path.name):
            parts.setdefault((named[1] or "", named[3]), {})[int(named[2])] = named[2]
    for (before, total), numbers in parts.items():
        # Some sets number their files from 0, and some from 1.
        first = min(1, *numbers) if int(total) in numbers else 0
        for number in range(first, first + int(total)):
            if number not in numbers:
                digits = len(next(iter(numbers.values())))
                raise InputError(
                    f"{files[0].parent} lacks {before}{number:0{digits}d}-of-{total}; fetch it, or rename the others "
                    "to do without it"
                )
    return files


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    try:
        return sorted(
            path
            for path in folder.iterdir()
            if path.name.endswith(suffixes) and not path.name.startswith(".") and path.is_file()
        )
    except OSError:
        return []


def label_text(value: Any) -> str | None:
    """Returns a label from a file as text. Texts and whole numbers are labels, and so are whole floats, because pandas
    converts whole numbers to floats. Returns None for anything else, such as the control characters that an incomplete
    write leaves."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip() if isinstance(value, (str, int)) else ""
    return text if text and can_be_printed(text) and not re.search(r"[\x00-\x1f\x7f]", text) else None


def classes_of(labels: Collection[str]) -> tuple[str, ...]:
    """Returns the distinct labels, sorted as numbers if all of them are whole numbers, and as names otherwise."""
    distinct = set(labels)
    if all(re.fullmatch("[0-9]{1,9}", label) for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))


def labels_of(pairs: Iterable[tuple[str, str]], where: object) -> dict[str, str]:
    """Returns image -> label from the rows of a table. Raises InputError if an image has two labels."""
    labels: dict[str, str] = {}
    for image, label in pairs:
        if labels.setdefault(image, label) != label:
            raise InputError(f"{where} gives {image} the labels {labels[image]!r} and {label!r}; keep one of them")
    return labels


def numbered(labels: list[str], classes: tuple[str, ...], where: object) -> np.ndarray:
    """Returns int64[n]: the number of each label's class."""
    places = {name: number for number, name in enumerate(classes)}
    try:
        return np.array([places[label] for label in labels], dtype=np.int64)
    except KeyError as error:
        raise InputError(
            f"{where} has a label {error} that the training set does not have; correct or add it"
        ) from error
