"""The embedded data set: scikit-learn's handwritten digits, 1,797 grey images of 8x8, with one fixed split."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from hyperbatch.data.source import ArraySource
from hyperbatch.data.stream import permute
from hyperbatch.errors import InputError

_SPLIT_SEED = 0  # part of the data set's definition: changing it changes every recorded accuracy
_TEST_EVERY = 5


def open_digits() -> tuple[ArraySource, ArraySource]:
    """(train, test): within each class, every fifth sample of a fixed shuffle is test."""
    pixels, labels = _read()
    shuffled = permute(np.arange(len(labels)), len(labels), _SPLIT_SEED, np.zeros(len(labels), dtype=np.int64))
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_test[shuffled[labels[shuffled] == label][::_TEST_EVERY]] = True
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # stored as 0..16
    classes = tuple(str(digit) for digit in range(10))
    train = ArraySource("digits train", images[~is_test], labels[~is_test], classes=classes)
    test = ArraySource("digits test", images[is_test], labels[is_test], classes=classes, mean=train.mean, std=train.std)
    return train, test


def _read() -> tuple[np.ndarray, np.ndarray]:
    # scikit-learn's own file, without importing scikit-learn: that takes two seconds in every process.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("the digits data set needs scikit-learn; run: pip install scikit-learn")
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.exists():
        with gzip.open(path, "rt") as file:
            table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.asarray(pixels), np.asarray(labels, dtype=np.int64)
