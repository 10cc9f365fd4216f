"""CIFAR-10 from a local folder: as npy or npy.xz arrays, in the binary form, or as the original pickles.

Decoding xz takes 7 s of processor time, and turning the other forms' planes into pixels 1 s. The arrays are therefore
kept in the user's cache folder, and the next run maps them into memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hyperbatch.data.source import ArraySource, DataCounts
from hyperbatch.errors import InputError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
_RECORD_BYTES = 1 + 3 * 32 * 32

_WORTH_KEEPING_BYTES = 16 << 20

Split = tuple[np.ndarray, np.ndarray]  # uint8[n, 32, 32, 3], labels[n]


def open_cifar10(folder: Path) -> tuple[ArraySource, ArraySource]:
    """(train, test) from whichever form the folder holds."""
    read, train, test = _find(folder)
    kept = _kept_arrays(_files(train, test))
    splits = _load(kept)
    if splits is None:
        # Threads, because xz decoding (7 s for the whole set on one core) releases the interpreter lock.
        with ThreadPoolExecutor(min(len(train) + len(test), os.cpu_count() or 1)) as pool:
            parts = list(pool.map(read, [*train, *test]))
        splits = [_joined(chosen) for chosen in (parts[: len(train)], parts[len(train) :])]
        _keep(kept, splits)
    sources = [
        ArraySource(f"cifar10 {name}", images, labels, classes=CLASSES, mean=MEAN, std=STD)
        for name, (images, labels) in zip(("train", "test"), splits, strict=True)
    ]
    return sources[0], sources[1]


def count_cifar10(folder: Path) -> DataCounts:
    """The counts of the full set; checks that the files are there, decodes none of them."""
    _find(folder)
    return DataCounts(train_samples=50_000, eval_samples=10_000, classes=len(CLASSES))


def _joined(parts: list[Split]) -> Split:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images, labels


# --- what is kept of an earlier run


def _files(train: Sequence[Any], test: Sequence[Any]) -> list[Path]:
    """Every file that is read: items are paths, or tuples that hold some."""
    items = [item if isinstance(item, tuple) else (item,) for item in (*train, *test)]
    return sorted({part for item in items for part in item if isinstance(part, Path)})


def _kept_arrays(files: list[Path]) -> Path:
    """The folder that holds, or will hold, what was made of these files as they are now."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "hyperbatch" / f"cifar10-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}"


def _load(folder: Path) -> list[Split] | None:
    """Mapped, and writable only because torch warns of arrays that are not: nothing reaches the files."""
    try:
        return [
            _checked(
                folder / f"{name}_images.npy",
                np.load(folder / f"{name}_images.npy", mmap_mode="c", allow_pickle=False),
                np.load(folder / f"{name}_labels.npy", allow_pickle=False),
            )
            for name in ("train", "test")
        ]
    except (OSError, ValueError, EOFError, InputError):  # not there, or not whole: made anew
        return None


def _keep(folder: Path, splits: list[Split]) -> None:
    """Written beside and renamed, so that whoever finds the folder finds all of it. If it cannot be written, nothing is
    kept, and the next run decodes again."""
    if sum(images.nbytes for images, _ in splits) < _WORTH_KEEPING_BYTES or not folder.is_absolute():  # no home
        return
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            for name, (images, labels) in zip(("train", "test"), splits, strict=True):
                np.save(beside / f"{name}_images.npy", images)
                np.save(beside / f"{name}_labels.npy", labels)
            if _load(folder) is None:  # another rank may have been quicker
                shutil.rmtree(folder, ignore_errors=True)
                beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


# --- the forms


def _find(folder: Path) -> tuple[Callable[[Any], Split], Sequence[Any], Sequence[Any]]:
    """(reader, what it reads for train, for test): the first complete form in the folder or its usual subfolders."""
    for place in (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"):
        arrays = [_array_file(place, f"train_images_{i}") for i in range(1, 6)]
        if all(arrays) and (test := _array_file(place, "test_images")):
            labels = place / "train_labels.npy", place / "test_labels.npy"
            for path in labels:
                if not path.exists():
                    raise InputError(f"{path} is missing beside the CIFAR-10 images; copy it there")
            train = [(path, labels[0], i, 5) for i, path in enumerate(arrays)]
            return _read_arrays, train, [(test, labels[1], 0, 1)]
        for suffix, read in ((".bin", _read_binary), ("", _read_pickle)):
            batches = [place / f"data_batch_{i}{suffix}" for i in range(1, 6)] + [place / f"test_batch{suffix}"]
            if all(path.is_file() for path in batches):
                return read, batches[:5], batches[5:]
    raise InputError(
        f"{folder} does not hold CIFAR-10; expected train_images_1..5.npy[.xz] with labels, "
        "data_batch_1..5.bin and test_batch.bin, or data_batch_1..5 and test_batch"
    )


def _array_file(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / f"{stem}.npy", folder / f"{stem}.npy.xz") if p.is_file()), None)


def _read_arrays(item: tuple[Path, Path, int, int]) -> Split:
    path, labels_path, part, parts = item
    try:
        with lzma.open(path) if path.suffix == ".xz" else open(path, "rb") as file:
            images = np.load(file, allow_pickle=False)
        labels = np.load(labels_path, allow_pickle=False).reshape(parts, -1)[part]
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"{path} cannot be read: {error}; fetch the file again") from error
    return _checked(path, images, labels)


def _read_binary(path: Path) -> Split:
    records = np.fromfile(path, dtype=np.uint8)
    if records.size == 0 or records.size % _RECORD_BYTES:
        raise InputError(f"{path} is not a whole number of {_RECORD_BYTES}-byte records; fetch the file again")
    records = records.reshape(-1, _RECORD_BYTES)
    return _checked(path, _channels_last(records[:, 1:]), records[:, 0])


def _read_pickle(path: Path) -> Split:
    try:
        with open(path, "rb") as file:
            content = _ArrayUnpickler(file, encoding="bytes").load()
        return _checked(path, _channels_last(content[b"data"]), np.asarray(content[b"labels"]))
    except InputError:
        raise
    except Exception as error:  # a hostile or broken pickle can fail in any way
        raise InputError(f"{path} is not a CIFAR-10 pickle: {error}; fetch the file again") from error


def _channels_last(flat: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _checked(path: Path, images: np.ndarray, labels: np.ndarray) -> Split:
    if images.shape[1:] != (32, 32, 3) or images.dtype != np.uint8 or labels.shape != (len(images),):
        raise InputError(f"{path} holds {images.dtype}{images.shape} images and {labels.shape} labels, not CIFAR-10")
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, texts and numpy arrays; a pickle that names anything else is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]  # numpy's own, wherever this version keeps it
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes into old pickles
            import codecs

            return codecs.encode
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")
