"""What a maker of batches is given and what it gives: the plan of one micro-step, and the batch made from it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data import augment


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-step: images [n, c, h, w] channels_last, normalised; labels [n]; mask [n] false on padding, or None."""

    images: Tensor
    labels: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """All that decides a batch. The last `padding` ids only fill the shape. No uniforms: evaluation."""

    ids: np.ndarray
    epochs: np.ndarray | None
    uniforms: np.ndarray | None
    size: int
    padding: int

    @property
    def training(self) -> bool:
        return self.uniforms is not None

    @property
    def real(self) -> int:
        """Samples that are not padding."""
        return len(self.ids) - self.padding

    def view(self, config: DataConfig, row: int, width: int, height: int, *, whole: bool) -> augment.View:
        """The view of the sample in this row (or of what replaces it), of an image of this size."""
        if self.uniforms is None or self.epochs is None:
            return augment.eval_view(config, width, height, whole=whole)
        uniforms = self.uniforms[row].tolist()
        return augment.train_view(config, width, height, int(self.epochs[row]), uniforms, whole=whole)


BadSamples = list[tuple[int, str]]  # unreadable samples: id, and a line that says where and why
Batches = Generator[tuple[Batch, BadSamples], None, None]
