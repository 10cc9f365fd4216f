"""What a maker of batches is given and what it gives: the plan of one micro-step, and the batch made from it."""

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
    """All that decides a batch. The last `padding` ids only fill the shape. No uniforms: evaluation."""

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
        """Samples that are not padding."""
        return len(self) - self.padding

    def view(self, config: DataConfig, row: int, width: int, height: int, *, whole: bool) -> augment.View:
        """The view of the sample in this row (or of what replaces it), of an image of this size."""
        if self.uniforms is None or self.epochs is None:
            return augment.eval_view(config, width, height, whole=whole)
        uniforms = self.uniforms[row].tolist()
        return augment.train_view(config, width, height, int(self.epochs[row]), uniforms, whole=whole)


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """A plan whose samples and uniforms are given."""

    ids: np.ndarray
    epochs: np.ndarray | None
    uniforms: np.ndarray | None
    size: int
    padding: int


@dataclass(frozen=True, kw_only=True)
class StreamPlan(Plan):
    """Training samples of a part of the stream of `length` samples.

    step_start: where the first step begins, on rank 0. micro_batches: samples of each micro-step of a step that the
    plan holds; none: they are one.
    Drawn here when somebody asks for them; a GPU that holds the set draws them itself and does not ask.
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
