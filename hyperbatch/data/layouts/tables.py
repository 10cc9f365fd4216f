"""Tables of image paths and labels, as csv, tsv or jsonl: one table with a `split` column, or one for each split.

Paths are relative to the table's folder. Columns are found by their names; a csv with two columns needs no names.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hyperbatch.data.folders import FolderSource, FolderTree, Listed, decoded, is_image
from hyperbatch.data.layouts.found import (
    TEST,
    TRAIN,
    VAL_NAMES,
    Found,
    classes_of,
    files_by_split,
    label_text,
    labels_of,
    numbered,
    split_of,
    val_name,
)
from hyperbatch.data.source import can_be_printed
from hyperbatch.errors import InputError

SUFFIXES = (".csv", ".tsv", ".jsonl")
_PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img")
_LABELS = ("label", "class", "class_name", "category", "target")
_SPLIT = "split"
_LINE_CHARACTERS = 1 << 20  # the most that are read of a first line; it may be a whole file


class _Row(NamedTuple):
    line: int
    path: str
    label: str
    split: str | None


def tables(folder: Path) -> Found | None:
    """Recognises train.csv and val.csv, or train/metadata.csv and val/metadata.csv."""
    files = files_by_split(folder, SUFFIXES)
    return _by_split(folder, files) if files else None


def only_table(folder: Path) -> Found | None:
    """Recognises a single table. Opening one without a split column reports that."""
    path = _only_file(folder)
    return None if path is None else _with_splits(path)


def split_table(folder: Path) -> Found | None:
    """Recognises a single table whose first line has a path, a label and a split. Other tables, such as a list of class
    names, may lie next to a data set."""
    path = _only_file(folder)
    try:
        if path is None or _columns(path, _first_names(path))[2] is None:
            return None
    except (OSError, ValueError, RecursionError, csv.Error):
        return None
    return _with_splits(path)


def _only_file(folder: Path) -> Path | None:
    files = [name for name in FolderTree(folder).files() if name.endswith(SUFFIXES)]
    return folder / files[0] if len(files) == 1 else None


def _first_names(path: Path) -> list[str]:
    """Returns the names of the columns in the table's first line."""
    with open(path, encoding="utf-8-sig") as file:
        line = file.readline(_LINE_CHARACTERS)
    if path.suffix != ".jsonl":
        return _lowered(next(csv.reader([line], delimiter=_separator(path, line)), []))
    fields = json.loads(line)
    return _lowered(fields) if isinstance(fields, dict) else []


def table_file(path: Path) -> Found | None:
    """Recognises the path of such a table."""
    if not path.name.endswith(SUFFIXES):
        return None
    if split_of(path.name) is None:
        return _with_splits(path)
    return _by_split(path.parent, files_by_split(path.parent, (path.suffix,)))


def _by_split(folder: Path, files: dict[str, list[Path]]) -> Found:
    val = val_name(files, folder)
    for split in (TRAIN, val):
        if split is not None and len(files.get(split, ())) > 1:
            named = " and ".join(path.name for path in files[split])
            raise InputError(f"{folder} has several tables of the {split} set: {named}; keep one of them")
    rows = functools.cache(lambda split: _rows(files[split][0]))

    def missing(split: str) -> str:
        return f"no table of the {split} set; write {split}.csv with columns path and label"

    return _found(folder, lambda split: (files[split][0], rows(split)), TRAIN in files, val, missing)


def _with_splits(path: Path) -> Found:
    rows = _rows(path)
    splits = {row.split for row in rows if row.split is not None}
    if not splits:
        raise InputError(
            f"{path} has no {_SPLIT!r} column that says train or val; add it, or write train.csv and val.csv"
        )
    for row in rows:
        if row.split not in (TRAIN, *VAL_NAMES, TEST):
            said = f"a split {row.split!r}" if row.split else "no split"
            raise InputError(f"{path} line {row.line} has {said}; write train, val or test")

    def of_split(split: str) -> tuple[Path, list[_Row]]:
        return path, [row for row in rows if row.split == split]

    def missing(split: str) -> str:
        return f"no row whose {_SPLIT!r} is {split}, only {' and '.join(sorted(splits))}; call some of them {split}"

    return _found(path, of_split, TRAIN in splits, val_name(splits, path), missing)


def _found(where: Path, rows_of: Any, has_train: bool, val: str | None, missing: Callable[[str], str]) -> Found:
    def opened(split: str) -> FolderSource:
        path, rows = rows_of(split)
        labels = [row.label for row in (rows_of(TRAIN)[1] if has_train else rows)]
        classes = classes_of(labels)
        first = path.parent / rows[0].path
        if not os.path.isfile(first):
            raise InputError(f"{path} names {rows[0].path}, but {first} is not a file; paths are relative to the table")
        listed = Listed(
            split, classes, numbered([row.label for row in rows], classes, path), [row.path for row in rows]
        )
        return FolderSource(path.parent, listed)

    return Found(
        kind="table",
        where=str(where),
        train=(lambda: opened(TRAIN)) if has_train else None,
        val=(lambda: opened(val)) if val is not None else None,
        expected=missing,
    )


def _rows(path: Path) -> list[_Row]:
    try:
        text = decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    rows = _json_rows(path, text) if path.suffix == ".jsonl" else _csv_rows(path, text)
    if not rows:
        raise InputError(f"{path} names no images; give each a line with its path and label")
    labels_of(((row.path, row.label) for row in rows), path)
    return rows


def _csv_rows(path: Path, text: str) -> list[_Row]:
    # strict: otherwise, a quotation mark that is not closed takes the rows up to the next one for one field.
    reader = csv.reader(io.StringIO(text), delimiter=_separator(path, text.partition("\n")[0]), strict=True)
    try:
        # Excel writes empty rows for rows that were cleared.
        lines = [(reader.line_num, line) for line in reader if any(map(str.strip, line))]
    except csv.Error as error:
        raise InputError(f"{path} is not a table: {error} in line {reader.line_num}; write it again") from error
    if not lines:
        return []
    first, header = lines[0][1], _lowered(lines[0][1])
    is_named = len(header) != 2 or not is_image(os.path.basename(first[0]))
    columns = _columns(path, header) if is_named else (0, 1, None)
    rows = []
    for number, line in lines[is_named:]:
        if len(line) != len(header):
            raise InputError(f"{path} line {number} has {len(line)} fields, not {len(header)}; correct it")
        if is_named and _lowered(line) == header:
            raise InputError(f"{path} line {number} repeats the names of the columns; remove it")
        if "\n" in line[columns[0]]:
            raise InputError(f"{path} line {number} ends a path with a line break in it; correct its quotation marks")
        rows.append(_row(path, number, *(None if place is None else line[place] for place in columns)))
    return rows


def _json_rows(path: Path, text: str) -> list[_Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines also splits at characters allowed in JSON
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number} is not JSON: {error}; correct it") from error
        if not isinstance(fields, dict):
            raise InputError(f"{path} line {number} is not a JSON object; write one with path and label")
        places = _columns(path, _lowered(fields))
        values = list(fields.values())
        rows.append(_row(path, number, *(None if place is None else values[place] for place in places)))
    return rows


def _separator(path: Path, line: str) -> str:
    """Returns what separates the columns. Excel uses semicolons in countries with decimal commas."""
    return "\t" if path.suffix == ".tsv" else next((sign for sign in ",;\t" if sign in line), ",")


def _lowered(names: Iterable[str]) -> list[str]:
    return [name.strip().lower() for name in names]


def _columns(path: Path, header: list[str]) -> tuple[int, int, int | None]:
    """Returns the columns of the path, the label and the split."""
    places = []
    for what, names in (("path", _PATHS), ("label", _LABELS)):
        found = [place for place, name in enumerate(header) if name in names]
        if len(found) != 1:
            problem = "no" if not found else "more than one"
            raise InputError(f"{path} has {problem} {what} column; name exactly one of its columns {what!r}")
        places.append(found[0])
    return places[0], places[1], header.index(_SPLIT) if _SPLIT in header else None


def _row(path: Path, number: int, file: Any, label: Any, split: Any) -> _Row:
    text = label_text(label)
    if not isinstance(file, str) or not file.strip() or text is None:
        raise InputError(
            f"{path} line {number} has no path or no label (a text or a whole number); correct or remove it"
        )
    if "\0" in file or not can_be_printed(file):
        raise InputError(f"{path} line {number} has a path that no file can have; correct or remove it")
    return _Row(number, file.strip(), text, split.strip().lower() if isinstance(split, str) else None)
