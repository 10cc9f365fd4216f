"""Makes batches with CPU threads: images are decoded, cropped and resized on the host and normalised on the device.

This is the reference for `gpu.maker.DeviceMaker`, and it is used on devices without Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data import augment
from hyperbatch.data.batch import BadSamples, Batch, Batches, Plan
from hyperbatch.data.buffers import BatchBuffers
from hyperbatch.data.cache import PixelCache
from hyperbatch.data.decode import decode_full, decode_view, render_array, resized_view
from hyperbatch.data.maker import Finish, Maker, load_or_replace, samples_per_task
from hyperbatch.data.source import ArraySource, EncodedSource, Place

Factors = tuple[np.ndarray, np.ndarray]


@dataclass(eq=False)
class HostMaker(Maker):
    """Fills host batches from plans, on threads if that is faster, and finishes them on the device."""

    _: KW_ONLY
    cache: PixelCache | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._buffers = BatchBuffers(self.config.prefetch + 3)
        self._known_factors: dict[tuple[int, ...], Factors] = {}
        # 16-bit results are computed in fp32.
        self._math_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._scale = torch.from_numpy(self.scale).to(self.device, self._math_dtype)
        self._offset = torch.from_numpy(self.offset).to(self.device, self._math_dtype)

    def run(self, plans: Iterator[Plan]) -> Batches:
        """Yields (batch, its unreadable samples as (id, line)) for each plan, in order."""
        # Gathering from small arrays is faster than handing the work to a thread, unless a GPU waits for it.
        if isinstance(self.source, ArraySource) and self.device.type == "cpu":
            for plan in plans:
                pixels, labels = self._host_buffers(plan)
                bad = self._fill(plan, pixels, labels, 0, len(plan))
                yield self._finish(plan, pixels, labels), bad
            return
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="hyperbatch-data")

        def start(plan: Plan) -> Finish:
            _ = plan.ids, plan.uniforms, plan.mix  # computed once here, and not by every thread that reads them
            pixels, labels = self._host_buffers(plan)
            # A vectorised batch is one task; any other batch is spread over the threads.
            count = len(plan) if self._is_vectorised(plan) else samples_per_task(len(plan), self.threads)
            starts = range(0, len(plan), count)
            tasks = [pool.submit(self._fill, plan, pixels, labels, i, i + count) for i in starts]

            def finish() -> tuple[Batch, BadSamples]:
                bad = [sample for task in tasks for sample in task.result()]
                return self._finish(plan, pixels, labels), bad

            return finish

        try:
            yield from self.prefetch(plans, start)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _host_buffers(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Returns the buffers of a batch: (images, labels). The images are bytes, except in a CPU run whose threads
        normalise the views: then they are floats."""
        # Pinned, so that the copy overlaps with the step. torch's host allocator reuses a block once its copy is done.
        pin = self.device.type == "cuda"
        shape = (len(plan), plan.size, plan.size, self.source.channels)
        labels = torch.empty(len(plan), dtype=torch.int64, pin_memory=pin)
        if pin or self._is_vectorised(plan) or self.retouches(plan):
            return torch.empty(shape, dtype=torch.uint8, pin_memory=pin), labels
        return self._buffers.take(shape, self._math_dtype), labels

    def _is_vectorised(self, plan: Plan) -> bool:
        source = self.source
        return (
            isinstance(source, ArraySource)
            and source.images.shape[1:3] == (plan.size, plan.size)
            and (not plan.training or self.config.augment in ("none", "shift"))
        )

    def _fill(self, plan: Plan, pixels: Tensor, labels: Tensor, start: int, stop: int) -> BadSamples:
        """Writes samples [start, stop) of the batch; returns those that could not be read."""
        if self._is_vectorised(plan):
            assert isinstance(self.source, ArraySource)
            labels.numpy()[:] = self.source.labels[plan.ids]
            write_array_views(pixels.numpy(), self.source.gather(plan.ids), self.config, plan.uniforms)
            return []
        out, out_labels, bad = pixels.numpy(), labels.numpy(), []
        gains, offsets = self.colors(plan)
        black = np.zeros(out.shape[1:], dtype=np.uint8)
        factors = None
        for row in range(start, min(stop, len(plan))):
            label, view = 0, None
            if row < plan.real:
                load = partial(self._view, plan, row)
                shown, view = load_or_replace(plan, int(plan.ids[row]), self.source, load, bad)
                label = self.source.labels[shown]
            out_labels[row], image = label, black if view is None else view
            if out.dtype == np.uint8:
                out[row] = image
                continue
            if self.changes_colors:
                factors = _factors(self.scale * gains[row], offsets[row], out[0, :1])
            elif factors is None:
                factors = self._common_factors(out[0])
            _normalise(out[row], image, *factors)
        return bad

    def _common_factors(self, image: np.ndarray) -> Factors:
        """Returns the factors shared by all images of this shape, one per element, because numpy copies shorter arrays
        for each operation."""
        if image.shape not in self._known_factors:
            self._known_factors[image.shape] = _factors(self.scale, self.offset, image)
        return self._known_factors[image.shape]

    def _view(self, plan: Plan, row: int, index: int) -> np.ndarray:
        """Returns uint8[size, size, c] of sample `index` (the plan's sample or its replacement), with the row's random
        numbers."""
        source, config = self.source, self.config

        def view_of(width: int, height: int) -> augment.View:
            return plan.view(config, row, width, height, whole=isinstance(source, ArraySource))

        if not isinstance(source, EncodedSource):
            pixels = source.image(index)
            return render_array(pixels, view_of(pixels.shape[1], pixels.shape[0]), plan.size)
        if self.cache is None:
            data = self._read(index)
            with self.meter.busy("decode", self.threads):
                where, exact = Place(source, index), not plan.training
                return decode_view(data, where, view_of, plan.size, decoder=self.decoder, exact=exact)
        pixels = self.cache.get(index)
        if pixels is None:
            data = self._read(index)
            with self.meter.busy("decode", self.threads):
                pixels = decode_full(data, Place(source, index), decoder=self.decoder)
            self.cache.put(index, pixels)
        with self.meter.busy("resize", self.threads):
            size = (pixels.shape[1], pixels.shape[0])
            if self.decoder == "pillow":
                return render_array(pixels, view_of(*size), plan.size)
            return resized_view(pixels, view_of(*size), plan.size, full_size=size)

    def _read(self, index: int) -> bytearray:
        assert isinstance(self.source, EncodedSource)
        with self.meter.busy("read", self.threads):
            return self.source.read_buffer(index)

    def _finish(self, plan: Plan, pixels: Tensor, labels: Tensor) -> Batch:
        """Copies the batch to the device and normalises it there, so that bytes are copied and not floats."""
        if pixels.dtype != torch.uint8:
            images = self.cut_out(plan, pixels.permute(0, 3, 1, 2).to(self.dtype))
            return self.mixed(plan, Batch(images, labels, self.mask(plan)))
        pixels = pixels.to(self.device, non_blocking=True)
        if self.retouches(plan):
            pixels = self.retouched(plan, pixels)
        n, height, width, channels = pixels.shape
        # Computed as rows of width x channels, because an inner loop over 3 channels alone would not be vectorised.
        rows = pixels.view(n * height, width * channels).to(self._math_dtype)
        rows.mul_(self._scale.repeat(width)).add_(self._offset.repeat(width))
        images = rows.view(n, height, width, channels).permute(0, 3, 1, 2)
        if plan.training and self.changes_colors:
            gains, offsets = self.colors(plan)
            gain = self._to_device(gains)[:, None, None, None]
            images.mul_(gain).add_(self._to_device(offsets - gains[:, None] * self.offset)[:, :, None, None])
        labels = labels.to(self.device, non_blocking=True)
        images = self.cut_out(plan, images.to(self.dtype))
        return self.mixed(plan, Batch(images, labels, self.mask(plan)))

    def _to_device(self, values: np.ndarray) -> Tensor:
        host = torch.from_numpy(values).to(self._math_dtype)
        if self.device.type == "cuda":
            host = host.pin_memory()  # a copy from pageable memory would block the host
        return host.to(self.device, non_blocking=True)


def _factors(scale: np.ndarray, offset: np.ndarray, lines: np.ndarray) -> Factors:
    """Returns (scales, offsets) for every element of these lines of pixels, because an inner loop over 3 channels would
    not be vectorised."""
    height, width, _ = lines.shape
    scales, offsets = (np.tile(values.astype(lines.dtype), (height, width)) for values in (scale, offset))
    return scales, offsets


def _normalise(out: np.ndarray, image: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    """Normalises one image while it is still in the processor's cache."""
    rows = out.reshape(len(out), -1)
    rows[:] = image.reshape(len(out), -1)
    rows *= scales
    rows += offsets


def write_array_views(out: np.ndarray, pixels: np.ndarray, config: DataConfig, uniforms: np.ndarray | None) -> None:
    """`View.finish` for a whole batch [n, h, w, c]: writes the shifted and mirrored images into `out`. In evaluation,
    the images are copied unchanged."""
    if uniforms is not None and config.augment == "shift" and config.shift_pixels:
        _, height, width, _ = pixels.shape
        border = config.shift_pixels
        mode = "reflect" if config.shift_padding == "reflect" else "constant"
        padded = np.pad(pixels, ((0, 0), (border, border), (border, border), (0, 0)), mode=mode)
        # A loop of slices is faster than index arrays for images of 8x8 and larger.
        for i, (left, top) in enumerate((border - augment.shifts(config, uniforms)).tolist()):
            out[i] = padded[i, top : top + height, left : left + width]
    else:
        out[:] = pixels
    if uniforms is not None and config.flip:
        mirrored = augment.flips(config, uniforms)
        out[mirrored] = out[mirrored, :, ::-1]
