"""Parquet files with an image column, as Hugging Face writes them. pyarrow reads them.

Parquet compresses images in groups of hundreds, so an image cannot be read alone. The images of a split are therefore
unpacked once into a file of the cache folder: their bytes one after the other, then an index, then the index's offset.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from hyperbatch.data import kept
from hyperbatch.data.folders import Content, Listed, check_readable
from hyperbatch.data.layouts.archives import MemberSource, plain_rows
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
from hyperbatch.data.source import can_be_printed
from hyperbatch.errors import InputError

_IMAGES = ("image", "img", "jpg", "png", "picture")
_LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
_BATCH_ROWS = 64
_FORMATS = ((b"\xff\xd8\xff", "jpg"), (b"\x89PNG", "png"), (b"RIFF", "webp"), (b"BM", "bmp"), (b"II*", "tif"))


class ParquetSource(MemberSource):
    """The unpacked images of a split. Messages name their parquet files and not the file in the cache."""

    def __init__(self, listed: Listed, content: Content, index: kept.Arrays, files: list[Path]) -> None:
        rows = plain_rows(index["spans"])
        rows["crc32"] = index["crc32"]
        super().__init__(listed, [content], rows)
        self._files, self._parts = files, index["parts"]

    def describe(self, index: int) -> str:
        part = self._parts[index]
        return f"{self._files[part]} row {index - int(np.searchsorted(self._parts, part))}"


def parquet(folder: Path) -> Found | None:
    files = files_by_split(folder, (".parquet",))
    if not files:
        return None
    val = val_name(files, folder)

    def opened(split: str) -> ParquetSource:
        content, index = _unpacked(check_all_parts(files[split]))
        names = _class_names(files[split][0])
        texts = [text.decode() for text in index["labels"].tolist()]
        if names is not None:
            labels, classes = _by_number(texts, len(names), files[split][0]), names
        else:
            known = _unpacked(files[TRAIN])[1]["labels"] if TRAIN in files and split != TRAIN else index["labels"]
            classes = classes_of([text.decode() for text in np.unique(known).tolist()])
            labels = numbered(texts, classes, f"the {split} set in {folder}")
        # The paths contain the checksums, by which a resumed run identifies the samples.
        kinds = zip(index["crc32"].tolist(), index["formats"].tolist(), strict=True)
        paths = [f"{row:09d}-{crc32:08x}.{kind.decode()}" for row, (crc32, kind) in enumerate(kinds)]
        return ParquetSource(Listed(split, classes, labels, paths), content, index, files[split])

    return Found(
        kind="parquet",
        where=str(folder),
        train=(lambda: opened(TRAIN)) if TRAIN in files else None,
        val=(lambda: opened(val)) if val is not None else None,
        expected=lambda split: (
            f"no parquet file of the {split} set; expected {split}-00000-of-00001.parquet or the like"
        ),
    )


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError("parquet files need pyarrow; run: pip install 'hyperbatch[parquet]'") from error
    return pyarrow.parquet


def _unpacked(files: list[Path]) -> tuple[Content, kept.Arrays]:
    for file in files:
        check_readable(file)
    name = f"parquet-{kept.INDEX_VERSION}-{kept.state_of(files)[:16]}.images"
    path = kept.made_once(name, lambda file: _unpack(files, file))
    if path is None:
        raise InputError(
            f"the images of {files[0].parent} could not be unpacked into {kept.cache_folder()}; set XDG_CACHE_HOME to "
            "a writable folder with enough space"
        )
    content = Content(path, path)
    try:
        (start,) = struct.unpack("<Q", content.read(content.length - 8, 8))
        with np.load(io.BytesIO(content.read(start, content.length - 8 - start)), allow_pickle=False) as index:
            return content, {key: index[key] for key in ("spans", "labels", "crc32", "formats", "parts")}
    except Exception as error:  # the file was damaged after it was written
        raise InputError(f"{path} is damaged: {error}; delete it, and the next run writes it again") from error


def _unpack(files: list[Path], out: IO[bytes]) -> None:
    spans, labels, checksums, formats, parts, place = [], [], [], [], [], 0
    for part, path in enumerate(files):
        for row, (data, value) in enumerate(_rows(path)):
            label = label_text(value)
            if not isinstance(data, bytes) or label is None:
                raise InputError(
                    f"{path} row {row} has no image or no label (a text or a whole number) inside; "
                    "write the file with them"
                )
            out.write(data)
            spans.append((place, len(data)))
            labels.append(label.encode())
            checksums.append(zlib.crc32(data))
            formats.append(next((kind for magic, kind in _FORMATS if data.startswith(magic)), "bin"))
            parts.append(part)
            place += len(data)
    if not spans:
        raise InputError(f"{files[0]} holds no images; fetch it again")
    names = _class_names(files[0])
    if other := next((path for path in files if _class_names(path) != names), None):
        raise InputError(f"{other} names other classes than {files[0]}, or in another order; write them alike")
    index = io.BytesIO()
    np.savez(
        index,
        spans=np.array(spans, dtype=np.int64),
        labels=np.array(labels),
        crc32=np.array(checksums, dtype=np.int64),
        formats=np.array([kind.encode() for kind in formats]),
        parts=np.array(parts, dtype=np.int32),
    )
    out.write(index.getvalue() + struct.pack("<Q", place))


def _rows(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yields (bytes, label) of each row."""
    arrow = _pyarrow()
    try:
        # Few writers add checksums; if there are any, they are checked.
        with arrow.ParquetFile(os.fspath(path), page_checksum_verification=True) as file:
            image, label = _column(path, file, _IMAGES, "image"), _column(path, file, _LABELS, "label")
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[image, label]):
                for data, number in zip(batch.column(image).to_pylist(), batch.column(label).to_pylist(), strict=True):
                    yield data.get("bytes") if isinstance(data, dict) else data, number
    except InputError:
        raise
    except Exception as error:  # pyarrow's own classes, and anything that it raises on damaged files
        raise InputError(f"{path} cannot be read as parquet: {' '.join(str(error).split())}; fetch it again") from error


def _column(path: Path, file: Any, names: tuple[str, ...], what: str) -> str:
    columns = file.schema_arrow.names
    found = next((name for name in names if name in columns), None)
    if found is None:
        raise InputError(f"{path} has no {what} column among {', '.join(columns)}; name one of them {names[0]!r}")
    return found


def _class_names(path: Path) -> tuple[str, ...] | None:
    """Returns the class names that the `datasets` library stores in the file, or None if there are none."""
    with _pyarrow().ParquetFile(os.fspath(path)) as file:
        label = _column(path, file, _LABELS, "label")
        metadata = file.schema_arrow.metadata or {}
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
        classes = tuple(str(name) for name in names)
    except (KeyError, ValueError, TypeError):
        return None
    if len(set(classes)) < len(classes) or not all(map(can_be_printed, classes)):
        raise InputError(f"{path} does not name its classes by different texts; write the file again")
    return classes


def _by_number(texts: list[str], classes: int, path: Path) -> np.ndarray:
    try:
        labels = np.array([int(text) for text in texts], dtype=np.int64)
    except ValueError as error:
        raise InputError(f"{path} names its classes, but a label is not a number: {error}") from error
    if labels.min() < 0 or labels.max() >= classes:
        raise InputError(
            f"{path} names {classes} classes, but has labels {labels.min()} to {labels.max()}; fetch it again"
        )
    return labels
