"""The common part of the two batch makers: prefetching, and replacing unreadable samples.

`host.HostMaker` makes batches with the CPU, `gpu.maker.DeviceMaker` with the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.cores import usable_cores
from hyperbatch.data import augment, rand_augment, trivial
from hyperbatch.data.batch import BadSamples, Batch, Batches, Plan
from hyperbatch.data.buffers import copy_to_device
from hyperbatch.data.meter import Meter
from hyperbatch.data.mix import mix_images, mix_labels
from hyperbatch.data.source import BadSample, DataError, EncodedSource, Source

_MAX_REPLACEMENTS = 100  # consecutive unreadable samples after which the run fails
_MAX_TASK_SAMPLES = 16  # small enough to spread a batch over the threads, large enough to be worth a task

T = TypeVar("T")
Finish = Callable[[], tuple[Batch, BadSamples]]  # waits for a batch that was started


@dataclass(eq=False)
class Maker:
    """Turns plans into batches on `device`, on behalf of one of `ranks_per_host` ranks that share the host's cores."""

    source: Source
    config: DataConfig
    _: KW_ONLY
    device: torch.device
    dtype: torch.dtype
    decoder: str
    meter: Meter = field(default_factory=Meter)
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        self.threads = threads_per_rank(self.config, self.ranks_per_host)
        self.std = np.asarray(self.source.std, dtype=np.float64)
        self.scale = 1 / (255 * self.std)
        self.offset = -np.asarray(self.source.mean, dtype=np.float64) / self.std

    def colors(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Returns (gains float64[n], offsets float64[n, c]) of each sample, including its noise and jitter.

        A normalised pixel is grey level * scale * gain + offset.
        """
        offsets = np.broadcast_to(self.offset, (len(plan), len(self.offset)))
        if plan.uniforms is None:
            return np.ones(len(plan)), offsets
        if self.config.color_noise:
            offsets = offsets + augment.color_noise(self.config, plan.uniforms) / self.std
        contrast, brightness = augment.jitter(self.config, plan.uniforms)
        return contrast, offsets * contrast[:, None] + brightness[:, None]

    @property
    def changes_colors(self) -> bool:
        """Whether training views differ in gain or offset."""
        return bool(self.config.color_noise) or augment.has_jitter(self.config)

    def retouches(self, plan: Plan) -> bool:
        """Whether the plan's views are changed by operations on their grey levels."""
        return plan.training and self.config.auto_augment != "none"

    def retouched(self, plan: Plan, levels: Tensor) -> Tensor:
        """Applies to each view, in grey levels uint8[n, h, w, c], the operations that were drawn for it."""
        assert plan.uniforms is not None
        uniforms = plan.uniforms[:, augment.operation_column(self.config) :]
        if self.config.auto_augment == "trivial":
            return trivial.apply(levels, trivial.draw(uniforms))
        for drawn in rand_augment.draw(uniforms, self.config.rand_ops, self.config.rand_magnitude, levels.shape[2]):
            levels = trivial.apply(levels, drawn)
        return levels

    def cut_out(self, plan: Plan, images: Tensor) -> Tensor:
        """Sets a square of each training view to 0, the set's mean colour. images: normalised, [n, c, h, w]."""
        if not self.config.cutout or plan.uniforms is None:
            return images
        corners = copy_to_device(augment.cutout_corners(self.config, plan.uniforms, plan.size), images.device)
        places = torch.arange(plan.size, device=images.device) - corners[:, :, None]  # of columns and lines
        columns, lines = ((places >= 0) & (places < augment.cutout_side(self.config, plan.size))).unbind(1)
        return images.masked_fill_((lines[:, :, None] & columns[:, None, :])[:, None], 0.0)

    def mixed(self, plan: Plan, batch: Batch) -> Batch:
        """Returns the batch with its images and labels mixed according to the plan."""
        if plan.mix is None:
            return batch
        return replace(batch, images=mix_images(batch.images, plan.mix), labels=mix_labels(batch.labels, plan.mix))

    def mask(self, plan: Plan) -> Tensor | None:
        """Returns which samples count in evaluation. It is None in training, where all samples count."""
        if plan.training:
            return None
        mask = torch.ones(len(plan), dtype=torch.bool, device=self.device)
        mask[plan.real :] = False
        return mask

    def prefetch(self, plans: Iterator[Plan], start: Callable[[Plan], Finish]) -> Batches:
        """Yields the batch of each plan, in order. The next `config.prefetch` batches are started before one is
        yielded.
        """
        started: deque[Finish] = deque()
        for plan in plans:
            if isinstance(self.source, EncodedSource):
                self.source.will_read(plan.ids)
            started.append(start(plan))
            if len(started) > self.config.prefetch:
                yield started.popleft()()
        while started:
            yield started.popleft()()


def load_or_replace(
    plan: Plan, index: int, source: Source, load: Callable[[int], T], bad: BadSamples
) -> tuple[int, T | None]:
    """Returns (the sample that is shown, the result of `load` for it). Unreadable samples are added to `bad`.

    In training, the next readable sample replaces an unreadable one. In evaluation, an unreadable sample is not
    replaced: it counts under its own label, and the result is None, which stands for a black image.
    """
    for _ in range(_MAX_REPLACEMENTS):
        try:
            return index, load(index)
        except BadSample as error:
            bad.append((index, str(error)))
            if not plan.training:
                return index, None
            index = (index + 1) % len(source)
    raise DataError(f"{_MAX_REPLACEMENTS} unreadable samples in a row, the last {bad[-1][1]}; repair the data")


def threads_per_rank(config: DataConfig, ranks_per_host: int) -> int:
    """Returns the configured number of threads, or this rank's share of the cores that the process may use."""
    return config.data_threads or max(1, usable_cores() // ranks_per_host)


def samples_per_task(samples: int, threads: int) -> int:
    return max(1, min(_MAX_TASK_SAMPLES, -(-samples // threads)))
