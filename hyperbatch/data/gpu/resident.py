"""Makes the batches of a set of small images that lies in device memory as one array, entirely on the device.

    StreamPlan(positions, seed) ── draw ──> image, shift, mirror, jitter, cutout, label of each sample ── cut ──> batch

A batch takes a few launches and no copy from the host. For the host, 50,000 samples take as long as one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data import augment, stream
from hyperbatch.data.batch import Batch, Plan, StreamPlan
from hyperbatch.data.buffers import copy_to_device
from hyperbatch.data.source import ArraySource


class ResidentSet:
    """Makes batches from images on the device.

    images: the source's images, on the device. scale, offset: float64[c], those of the normalisation.
    All work is queued on the current stream.
    """

    def __init__(
        self,
        source: ArraySource,
        images: Tensor,
        config: DataConfig,
        *,
        dtype: torch.dtype,
        scale: np.ndarray,
        offset: np.ndarray,
    ) -> None:
        self._images = images
        self._config = config
        self._dtype = dtype
        self._math_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._labels = copy_to_device(source.labels, images.device)
        self._scale, self._offset = (
            copy_to_device(part, images.device).to(self._math_dtype) for part in (scale, offset)
        )
        ranges = np.array([config.brightness_jitter, config.contrast_jitter])
        self._jitter = copy_to_device(ranges, images.device)
        _, height, width, channels = images.shape
        row = np.array([images.data_ptr(), width, height, channels, width * channels, 1])
        self._first_image = copy_to_device(row, images.device)
        self._image_step = copy_to_device(np.array([height * width * channels, 0, 0, 0, 0, 0]), images.device)
        self._box = copy_to_device(np.array([0, 0, width, height], dtype=np.float32), images.device)
        self._keys: dict[int, Tensor] = {}  # by seed

    def can_make(self, plan: Plan) -> bool:
        """Whether the plan can be made here. In training, its views must be whole images drawn from the stream; in
        evaluation, they must be images at their own size."""
        if not plan.training:
            return self._has_size(plan)
        # Colour noise needs logarithms and sines, which libraries round differently, so the host draws it.
        whole = self._config.augment in ("none", "shift") and not self._config.color_noise
        return whole and isinstance(plan, StreamPlan)

    def make(self, plan: Plan) -> Batch:
        if not isinstance(plan, StreamPlan):
            return self._eval_batch(plan)
        # The kernel computes in fp32. In an fp64 run, its results are converted to fp64.
        dtype = torch.float32 if self._dtype == torch.float64 else self._dtype
        scale, offset = self._scale.float(), self._offset.float()
        jitter_column = augment.jitter_column(self._config) if augment.has_jitter(self._config) else 0
        cutout = augment.cutout_side(self._config, plan.size)
        out, labels = self._views(plan, dtype, scale, offset, jitter_column, cutout)
        return Batch(out.permute(0, 3, 1, 2).to(self._dtype), labels)

    def levels(self, plan: StreamPlan) -> tuple[Tensor, Tensor]:
        """Returns (training views in grey levels uint8[n, h, w, c], labels)."""
        one = torch.ones_like(self._scale, dtype=torch.float32)
        return self._views(plan, torch.uint8, one, 0.5 * one, 0, 0)  # adding 0.5 rounds to the nearest level

    def _views(
        self, plan: StreamPlan, dtype: torch.dtype, scale: Tensor, offset: Tensor, jitter_column: int, cutout: int
    ) -> tuple[Tensor, Tensor]:
        from hyperbatch.kernels import augment as kernels  # imported here because it loads Triton

        config = self._config
        if plan.seed not in self._keys:
            keys = np.array(stream.keys(plan.seed), dtype=np.uint64).view(np.int64)
            self._keys[plan.seed] = copy_to_device(keys, self._images.device)
        draws = kernels.draw(
            self._labels,
            self._keys[plan.seed],
            self._jitter,
            places=plan.places,
            grid=stream.grid(plan.length),
            images=len(self._images),
            shift=config.shift_pixels if config.augment == "shift" else 0,
            flip=("alternating" if config.flip_alternates else "random") if config.flip else "none",
            jitter_column=jitter_column,
            corner_column=augment.cutout_column(config) if cutout else 0,
            corners=plan.size - cutout + 1 if cutout else 0,
        )
        shape = (len(plan), plan.size, plan.size, self._images.shape[3])
        out = torch.empty(shape, dtype=dtype, device=self._images.device)
        finish = {"reflect": config.shift_padding == "reflect", "cutout": cutout}
        if self._has_size(plan):
            kernels.cut(out, self._images, draws, scale, offset, **finish)
        else:
            contrast, brightness = draws.colors[:, 0], draws.colors[:, 1:]
            offsets = offset * contrast[:, None] + brightness
            tables = self._tables(draws.picks)
            kernels.views(out, *tables, scale, contrast.contiguous(), offsets, draws.corners, **finish)
        return out, draws.labels

    def _tables(self, picks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tables of samples and views for `kernels.augment.views`: whole images, shifted and mirrored."""
        images = self._first_image + picks[:, :1].long() * self._image_step
        return images, torch.cat([self._box.expand(len(picks), 4), picks[:, 1:].float()], dim=1)

    def _has_size(self, plan: Plan) -> bool:
        return tuple(self._images.shape[1:3]) == (plan.size, plan.size)

    def _eval_batch(self, plan: Plan) -> Batch:
        """Makes a batch of evaluation, normalised by torch. This is the same arithmetic as on the host, and no kernel
        has to be compiled before the first evaluation."""
        ids = copy_to_device(plan.ids, self._images.device)
        pixels = self._images[ids % len(self._images)]
        labels = self._labels[ids]
        labels[plan.real :] = 0
        n, height, width, channels = pixels.shape
        rows = pixels.view(n * height, width * channels).to(self._math_dtype)
        rows.mul_(self._scale.repeat(width)).add_(self._offset.repeat(width))
        images = rows.view(n, height, width, channels).permute(0, 3, 1, 2).to(self._dtype)
        return Batch(images, labels)
