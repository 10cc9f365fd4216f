"""The embedded data set: 1,797 handwritten digits, grey images of 8x8, with one fixed split.

digits.npz holds the test set of UCI's Optical Recognition of Handwritten Digits, which scikit-learn distributes as
`load_digits` (NOTICE has the terms). A test compares the two; training does not need scikit-learn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hyperbatch.data.source import ArraySource
from hyperbatch.data.stream import permute

_SPLIT_SEED = 0  # part of the data set's definition: changing it changes every recorded accuracy
_TEST_EVERY = 5


def open_digits() -> tuple[ArraySource, ArraySource]:
    """Returns (train, test). Within each class, every fifth sample of a fixed shuffle is a test sample."""
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
    with np.load(Path(__file__).with_suffix(".npz")) as file:
        return file["pixels"], file["labels"].astype(np.int64)
