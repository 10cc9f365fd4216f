"""The input and output of a batch maker: the plan of one micro-step, and the batch made from it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data import augment, stream
from hyperbatch.data.mix import Mix, mixes
from hyperbatch.data.mix import draw as draw_mix


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-step: images [n, c, h, w] channels_last, normalised; labels int64[n], or fp32[n, 3] of mixed images
    (`mix.mix_labels`); mask [n] false on padding, or None."""

    images: Tensor
    labels: Tensor
    mask: Tensor | None = None


class Plan:
    """Everything that determines a batch. The last `padding` ids only fill the shape. A plan without uniforms is one
    for evaluation."""

    ids: np.ndarray
    epochs: np.ndarray | None
    uniforms: np.ndarray | None
    size: int
    padding: int
    mix: Mix | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def training(self) -> bool:
        return self.uniforms is not None

    @property
    def real(self) -> int:
        """The number of samples that are not padding."""
        return len(self) - self.padding

    def view(self, config: DataConfig, row: int, width: int, height: int, *, whole: bool) -> augment.View:
        """Returns the view of the sample in this row (or of the sample that replaces it), whose image has this size."""
        if self.uniforms is None or self.epochs is None:
            return augment.eval_view(config, width, height, whole=whole)
        uniforms = self.uniforms[row].tolist()
        return augment.train_view(config, width, height, int(self.epochs[row]), uniforms, whole=whole)


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """A plan whose samples and uniforms are passed in."""

    ids: np.ndarray
    epochs: np.ndarray | None
    uniforms: np.ndarray | None
    size: int
    padding: int


@dataclass(frozen=True, kw_only=True)
class StreamPlan(Plan):
    """A plan for a part of the training stream of a set of `length` samples.

    step_start: the position in the stream at which the first step begins, on rank 0. micro_batches: the number of
    samples of each micro-step of a step, if the plan holds several; if empty, the plan holds one micro-step.
    The samples and uniforms are computed on first access. A GPU that holds the set computes them itself and does not
    access them here.
    """

    places: stream.Stretches
    length: int
    seed: int
    config: DataConfig
    size: int
    padding: int = 0
    step_start: int = 0
    micro_batches: tuple[int, ...] = ()

    @property
    def training(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.places.count

    @cached_property
    def _samples(self) -> tuple[np.ndarray, np.ndarray]:
        return self.places.samples(self.length, self.seed)

    @property
    def epochs(self) -> np.ndarray:
        return self._samples[0]

    @property
    def ids(self) -> np.ndarray:
        return self._samples[1]

    @cached_property
    def uniforms(self) -> np.ndarray:
        return augment.draw(self.config, self.seed, self.epochs, self.ids)

    @cached_property
    def mix(self) -> Mix | None:
        if not mixes(self.config):
            return None
        return draw_mix(
            self.config,
            self.seed,
            self.length,
            self.places,
            step_start=self.step_start,
            micro_batches=self.micro_batches or (self.places.share,),
            size=self.size,
        )


BadSamples = list[tuple[int, str]]  # unreadable samples: id, and a line that says where and why
Batches = Generator[tuple[Batch, BadSamples], None, None]
