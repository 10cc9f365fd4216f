"""CIFAR-10 from a local folder: as npy or npy.xz arrays, in the binary form, or as the original pickles."""

from __future__ import annotations

import lzma
import os
import pickle
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

Split = tuple[np.ndarray, np.ndarray]  # uint8[n, 32, 32, 3], labels[n]


def open_cifar10(folder: Path) -> tuple[ArraySource, ArraySource]:
    """(train, test) from whichever form the folder holds."""
    read, train, test = _find(folder)
    # Threads, because xz decoding (15 s for the whole set on one core) releases the interpreter lock.
    with ThreadPoolExecutor(min(len(train) + len(test), os.cpu_count() or 1)) as pool:
        parts = list(pool.map(read, [*train, *test]))
    sources = []
    for name, chosen in (("train", parts[: len(train)]), ("test", parts[len(train) :])):
        images, labels = (np.concatenate(arrays) for arrays in zip(*chosen, strict=True))
        sources.append(ArraySource(f"cifar10 {name}", images, labels, classes=CLASSES, mean=MEAN, std=STD))
    return sources[0], sources[1]


def count_cifar10(folder: Path) -> DataCounts:
    """The counts of the full set; checks that the files are there, decodes none of them."""
    _find(folder)
    return DataCounts(train_samples=50_000, eval_samples=10_000, classes=len(CLASSES))


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
