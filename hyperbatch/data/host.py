"""Batches made by CPU threads: decoded, cut and resized on the host, normalised on the device.

The reference for `device.DeviceMaker`, and the way for devices without Triton.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data import augment
from hyperbatch.data.batch import MAX_REPLACEMENTS, Bad, Batch, Made, Plan, too_many_in_a_row
from hyperbatch.data.buffers import BatchBuffers
from hyperbatch.data.cache import PixelCache
from hyperbatch.data.decode import decode_full, decode_view, render_array, resized_view
from hyperbatch.data.meter import Meter
from hyperbatch.data.render import Normaliser
from hyperbatch.data.source import ArraySource, BadSample, EncodedSource, Source

MAX_CHUNK = 16  # samples a thread takes at a time: small enough to share a batch, large enough to be worth a task


class HostMaker:
    """Fills host batches from plans, on threads where that pays, and finishes them on the device."""

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        decoder: str,
        cache: PixelCache | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.source = source
        self.config = config
        self.device = device
        self.dtype = dtype
        self.decoder = decoder
        self.cache = cache
        self.meter = meter or Meter()
        self.threads = config.data_threads or default_threads()
        self._buffers = BatchBuffers(config.prefetch + 3)
        self._normaliser = Normaliser(config, source.mean, source.std)
        # 16-bit results are computed in 32.
        self._math_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._scale = torch.from_numpy(self._normaliser.scale).to(device, self._math_dtype)
        self._offset = torch.from_numpy(self._normaliser.offset).to(device, self._math_dtype)

    def run(self, plans: Iterator[Plan]) -> Made:
        """(batch, its unreadable samples as (id, line)) for each plan, in order."""
        # Gathering from small arrays is quicker than handing the work to a thread, unless a GPU waits meanwhile.
        if isinstance(self.source, ArraySource) and self.device.type == "cpu":
            return self._inline(plans)
        return self._threaded(plans)

    def _inline(self, plans: Iterator[Plan]) -> Made:
        for plan in plans:
            pixels, labels = self._host_buffers(plan)
            bad = self._fill(plan, pixels, labels, 0, len(plan.ids))
            yield self._finish(plan, pixels, labels), bad

    def _threaded(self, plans: Iterator[Plan]) -> Made:
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="hyperbatch-data")
        ahead: deque[tuple[Plan, Tensor, Tensor, list[Future[Bad]]]] = deque()
        try:
            more = True
            while more or ahead:
                while more and len(ahead) <= self.config.prefetch:  # the first of them is about to leave
                    plan = next(plans, None)
                    more = plan is not None
                    if plan is not None:
                        pixels, labels = self._host_buffers(plan)
                        chunk = self._chunk(plan)
                        starts = range(0, len(plan.ids), chunk)
                        parts = [pool.submit(self._fill, plan, pixels, labels, i, i + chunk) for i in starts]
                        ahead.append((plan, pixels, labels, parts))
                if ahead:
                    plan, pixels, labels, parts = ahead.popleft()
                    bad = [line for part in parts for line in part.result()]
                    yield self._finish(plan, pixels, labels), bad
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _chunk(self, plan: Plan) -> int:
        """Samples per task: a vectorised batch is one task, else the batch is spread over the threads."""
        if self._is_vectorised(plan):
            return len(plan.ids)
        return min(MAX_CHUNK, -(-len(plan.ids) // self.threads))

    def _host_buffers(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Bytes; or, where threads cut the views of a CPU run, the normalised images themselves."""
        # Pinned so that the copy runs beside the step; torch's host allocator reuses a block once its copy is done.
        pin = self.device.type == "cuda"
        shape = (len(plan.ids), plan.size, plan.size, self.source.channels)
        labels = torch.empty(len(plan.ids), dtype=torch.int64, pin_memory=pin)
        if pin or self._is_vectorised(plan):
            return torch.empty(shape, dtype=torch.uint8, pin_memory=pin), labels
        return self._buffers.take(shape, self._math_dtype), labels

    def _is_vectorised(self, plan: Plan) -> bool:
        source = self.source
        return (
            isinstance(source, ArraySource)
            and source.images.shape[1:3] == (plan.size, plan.size)
            and (not plan.training or self.config.augment in ("none", "shift"))
        )

    def _fill(self, plan: Plan, pixels: Tensor, labels: Tensor, start: int, stop: int) -> Bad:
        """Writes samples [start, stop) of the batch; returns those that could not be read."""
        if self._is_vectorised(plan):
            assert isinstance(self.source, ArraySource)
            labels.numpy()[:] = self.source.labels[plan.ids]
            write_array_views(pixels.numpy(), self.source.gather(plan.ids), self.config, plan.uniforms)
            return []
        out, out_labels, bad = pixels.numpy(), labels.numpy(), []
        offsets = self._normaliser.offsets(plan)
        black = np.zeros(out.shape[1:], dtype=np.uint8)
        for i in range(max(start, plan.real), min(stop, len(plan.ids))):
            out_labels[i] = 0
            self._put(out[i], black, offsets[i])
        for i in range(start, min(stop, plan.real)):
            index = int(plan.ids[i])
            for _ in range(MAX_REPLACEMENTS):
                out_labels[i] = self.source.labels[index]
                try:
                    self._put(out[i], self._view(plan, i, index), offsets[i])
                    break
                except BadSample as error:
                    bad.append((index, str(error)))
                    self._put(out[i], black, offsets[i])
                    if not plan.training:  # evaluation: the sample counts, as a black image
                        break
                    index = (index + 1) % len(self.source)
            else:
                raise too_many_in_a_row(bad)
        return bad

    def _put(self, out: np.ndarray, view: np.ndarray, offset: np.ndarray) -> None:
        """Bytes as they are; floats normalised, while they are still in the cache."""
        if out.dtype == np.uint8:
            out[:] = view
            return
        # As rows of width x channels: an inner loop over 3 channels alone would not be vectorised.
        height, width, _ = out.shape
        rows = out.reshape(height, -1)
        rows[:] = view.reshape(height, -1)
        rows *= np.tile(self._normaliser.scale.astype(out.dtype), width)
        rows += np.tile(offset.astype(out.dtype), width)

    def _view(self, plan: Plan, row: int, index: int) -> np.ndarray:
        """uint8[size, size, c] of sample `index` (the plan's, or what replaces it) with the row's randomness."""
        source, config = self.source, self.config

        def view_of(width: int, height: int) -> augment.View:
            return plan.view(config, row, width, height, whole=isinstance(source, ArraySource))

        if not isinstance(source, EncodedSource):
            pixels = source.image(index)
            return render_array(pixels, view_of(pixels.shape[1], pixels.shape[0]), plan.size)
        if self.cache is None:
            data = self._read(index)
            start_s = time.perf_counter()
            where, exact = source.describe(index), not plan.training
            view = decode_view(data, where, view_of, plan.size, decoder=self.decoder, exact=exact)
            self.meter.add("decode", time.perf_counter() - start_s, self.threads)
            return view
        pixels = self.cache.get(index)
        if pixels is None:
            data = self._read(index)
            start_s = time.perf_counter()
            pixels = decode_full(data, source.describe(index), decoder=self.decoder)
            self.meter.add("decode", time.perf_counter() - start_s, self.threads)
            self.cache.put(index, pixels)
        start_s = time.perf_counter()
        size = (pixels.shape[1], pixels.shape[0])
        if self.decoder == "pillow":
            view = render_array(pixels, view_of(*size), plan.size)
        else:
            view = resized_view(pixels, view_of(*size), plan.size, full_size=size)
        self.meter.add("resize", time.perf_counter() - start_s, self.threads)
        return view

    def _read(self, index: int) -> bytearray:
        assert isinstance(self.source, EncodedSource)
        start_s = time.perf_counter()
        data = self.source.read_buffer(index)
        self.meter.add("read", time.perf_counter() - start_s, self.threads)
        return data

    def _finish(self, plan: Plan, pixels: Tensor, labels: Tensor) -> Batch:
        """Copies to the device and normalises there: bytes travel, not floats."""
        if pixels.dtype != torch.uint8:
            return Batch(pixels.permute(0, 3, 1, 2).to(self.dtype), labels, eval_mask(plan, self.device))
        n, height, width, channels = pixels.shape
        # As rows of width x channels: an inner loop over 3 channels alone would not be vectorised.
        rows = pixels.to(self.device, non_blocking=True).view(n * height, width * channels).to(self._math_dtype)
        rows.mul_(self._scale.repeat(width)).add_(self._offset.repeat(width))
        images = rows.view(n, height, width, channels).permute(0, 3, 1, 2)
        if plan.training and self.config.color_noise:
            noise = torch.from_numpy(self._normaliser.offsets(plan) - self._normaliser.offset).to(self._math_dtype)
            if self.device.type == "cuda":
                noise = noise.pin_memory()  # a copy from pageable memory would hold up the host
            images += noise.to(self.device, non_blocking=True)[:, :, None, None]
        labels = labels.to(self.device, non_blocking=True)
        return Batch(images.to(self.dtype), labels, eval_mask(plan, self.device))


def eval_mask(plan: Plan, device: torch.device) -> Tensor | None:
    """Which samples count; None in training, where all do."""
    if plan.training:
        return None
    mask = torch.ones(len(plan.ids), dtype=torch.bool, device=device)
    mask[plan.real :] = False
    return mask


def write_array_views(out: np.ndarray, pixels: np.ndarray, config: DataConfig, uniforms: np.ndarray | None) -> None:
    """`View.finish` for a whole batch [n, h, w, c]: shifted and mirrored into `out`; in evaluation as it is."""
    if uniforms is not None and config.augment == "shift" and config.shift_pixels:
        n, height, width, channels = pixels.shape
        border = config.shift_pixels
        padded = np.zeros((n, height + 2 * border, width + 2 * border, channels), dtype=np.uint8)
        padded[:, border : border + height, border : border + width] = pixels
        # A loop of slices: quicker than index arrays for images from 8x8 up.
        for i, (left, top) in enumerate((border - augment.shifts(config, uniforms)).tolist()):
            out[i] = padded[i, top : top + height, left : left + width]
    else:
        out[:] = pixels
    if uniforms is not None and config.flip:
        mirrored = augment.flips(config, uniforms)
        out[mirrored] = out[mirrored, :, ::-1]


def default_threads() -> int:
    """The cores this process may use, shared with the other ranks of the host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
