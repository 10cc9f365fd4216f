"""What a layout answers when it recognises a folder or a file, and the names that splits go by."""

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
TEST = "test"  # stands in where there is no validation set

Open = Callable[[], ArraySource | EncodedSource]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A data set that was recognised by its names alone. What is missing is told when it is asked for."""

    kind: str  # for `data info`
    where: str
    train: Open | None
    val: Open | None
    expected: Callable[[str], str]  # of a split that is missing: "no val/ folder; expected DIR/val/CLASS/IMAGE.jpg"

    def open(self, split: str) -> ArraySource | EncodedSource:
        opened = self.train if split == TRAIN else self.val
        if opened is None:
            raise InputError(f"{self.where} has {self.expected(split)}")
        return opened()


def val_name(names: Collection[str], where: object) -> str | None:
    """Which of the names is the validation set; None: none of them."""
    found = [name for name in VAL_NAMES if name in names]
    if len(found) > 1:
        raise InputError(f"{where} has {' and '.join(found)}; keep one of them as the validation set")
    return found[0] if found else TEST if TEST in names else None


def split_of(name: str) -> str | None:
    """The split that a file's name speaks of: imagenet1k-validation-07.tar; None: none, or more than one."""
    words = {word for word in re.split("[^a-z]+", name.lower()) if word in (TRAIN, *VAL_NAMES, TEST)}
    return words.pop() if len(words) == 1 else None


def files_by_split(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """Split name -> files in order: those named after a split in DIR or DIR/data, or those in DIR/SPLIT."""
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
    """InputError unless every file of those that are numbered train-00000-of-00002 is there."""
    parts: dict[tuple[str, str], dict[int, str]] = {}
    for path in files:
        if named := re.match(r"(.*[^0-9])?([0-9]+)-of-([0-9]+)(?![0-9])", path.name):
            parts.setdefault((named[1] or "", named[3]), {})[int(named[2])] = named[2]
    for (before, total), numbers in parts.items():
        # Some count from 0 and some from 1.
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
    """A label that stands in a file, as text: texts and whole numbers are labels. pandas turns whole numbers into
    floats. None: it is no label, as are control characters, which a lost write leaves."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip() if isinstance(value, (str, int)) else ""
    return text if text and can_be_printed(text) and not re.search(r"[\x00-\x1f\x7f]", text) else None


def classes_of(labels: Collection[str]) -> tuple[str, ...]:
    """The distinct labels in order: as numbers where all of them are whole numbers, as names otherwise."""
    distinct = set(labels)
    if all(re.fullmatch("[0-9]{1,9}", label) for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))


def labels_of(pairs: Iterable[tuple[str, str]], where: object) -> dict[str, str]:
    """Image -> label, of a table. InputError where it gives one image two labels."""
    labels: dict[str, str] = {}
    for image, label in pairs:
        if labels.setdefault(image, label) != label:
            raise InputError(f"{where} gives {image} the labels {labels[image]!r} and {label!r}; keep one of them")
    return labels


def numbered(labels: list[str], classes: tuple[str, ...], where: object) -> np.ndarray:
    """int64[n]: the place of each label among the classes."""
    places = {name: number for number, name in enumerate(classes)}
    try:
        return np.array([places[label] for label in labels], dtype=np.int64)
    except KeyError as error:
        raise InputError(
            f"{where} has a label {error} that the training set does not have; correct or add it"
        ) from error
