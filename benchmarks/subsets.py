"""Parts of data sets, for inexpensive experiments: `dataset = "benchmarks.subsets:cifar10_tenth"` in a plan."""

from __future__ import annotations

import numpy as np

from hyperbatch.config import DataConfig
from hyperbatch.data.cifar import CIFAR10, open_cifar
from hyperbatch.data.source import ArraySource, data_path


def cifar10_tenth(config: DataConfig) -> tuple[ArraySource, ArraySource]:
    """Every tenth training image (5,000) and every fifth test image (2,000) of CIFAR-10 in --data."""
    train, test = open_cifar(CIFAR10, data_path(config))
    return _every(train, 10), _every(test, 5)


def _every(source: ArraySource, step: int) -> ArraySource:
    images, labels = np.ascontiguousarray(source.images[::step]), source.labels[::step]
    return ArraySource(source.name, images, labels, classes=source.classes, mean=source.mean, std=source.std)
