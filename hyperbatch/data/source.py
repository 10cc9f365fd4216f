"""Where samples come from: arrays in memory, or encoded images in folders, tars and shards."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hyperbatch.config import DataConfig


class Source(Protocol):
    """One split. Arrays keep `images`; encoded sources answer `read`."""

    name: str
    classes: tuple[str, ...]
    channels: int
    mean: tuple[float, ...]  # of pixels in [0, 1]
    std: tuple[float, ...]
    labels: np.ndarray  # int64[n]

    def __len__(self) -> int: ...
    def image(self, index: int) -> np.ndarray:
        """uint8[height, width, channels]; raises BadSample when it cannot be decoded."""
        ...


def open_data(config: DataConfig) -> tuple[Source, Source]:
    """(train, validation). InputError for a missing or empty folder, an empty class, or splits with other classes."""
    raise NotImplementedError
