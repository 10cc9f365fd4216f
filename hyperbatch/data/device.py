"""Batches made on the GPU: files are read by threads, decoded by nvJPEG or the CPU, and cut by one fused kernel.

    reader threads         one device thread, on its own stream                               the step
    read, check       ─>   wait for the last kernel; decode the JPEGs in one call ─┐
    others: decode    ─>   copy pixels from pinned memory                         ─┼─> views, ─> event ─> wait, use
    into pinned memory     kept images: addresses only                            ─┘  1 launch

Python's lock is held for the tables of a batch and some microseconds a file; decoding, reading, checksums and copies
run without it. The reference is `host.HostMaker`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data import augment, nvjpeg
from hyperbatch.data.batch import MAX_REPLACEMENTS, Bad, Batch, Made, Plan
from hyperbatch.data.cache import DeviceCache, PixelCache
from hyperbatch.data.decode import decode_full, gpu_can_decode
from hyperbatch.data.host import MAX_CHUNK, default_threads, eval_mask, too_many_in_a_row
from hyperbatch.data.meter import Meter
from hyperbatch.data.render import Normaliser, pinned, render_views, view_table
from hyperbatch.data.source import ArraySource, BadSample, EncodedSource, Source

Decode = Callable[[list[Tensor], torch.device], list[Tensor]]


@dataclass(slots=True)
class _Part:
    """What the readers found for rows [start, start + len(used)) of a batch."""

    start: int
    used: list[int] = field(default_factory=list)  # the plan's samples, or what replaced them
    files: dict[int, Tensor] = field(default_factory=dict)  # row -> bytes for the GPU's decoder
    places: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # row -> offset in `pixels`, width, height
    pixels: Tensor | None = None  # decoded on the host, one after the other, pinned
    bad: Bad = field(default_factory=list)


class DeviceMaker:
    """Makes batches ahead of the step. `decoder` is "nvjpeg" or one of the CPU's."""

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        decoder: str,
        cpu_decoder: str,
        cache: PixelCache | DeviceCache | None = None,
        meter: Meter | None = None,
        decode: Decode = nvjpeg.decode_batch,
    ) -> None:
        self.source = source
        self.config = config
        self.device = device
        self.dtype = dtype
        self.decoder = decoder
        self.cpu_decoder = cpu_decoder
        self.meter = meter or Meter()
        self.threads = config.data_threads or default_threads()
        self._host_cache = cache if isinstance(cache, PixelCache) else None
        self._device_cache = cache if isinstance(cache, DeviceCache) else None
        self._decode = decode
        self._normaliser = Normaliser(config, source.mean, source.std)
        self._cuda = device.type == "cuda"  # on a CPU the same code runs by Triton's interpreter, for tests
        # Of high priority: its kernels are short, and the step after next waits for them.
        self._stream = torch.cuda.Stream(device, priority=-1) if self._cuda else None
        self._last: torch.cuda.Event | None = None
        with self._on_stream():
            self._scale = pinned(self._normaliser.scale.astype(np.float32), device)
            self._black = torch.zeros(source.channels, dtype=torch.uint8, device=device)

    def run(self, plans: Iterator[Plan]) -> Made:
        """(batch, its unreadable samples as (id, line)) for each plan, in order."""
        readers = ThreadPoolExecutor(self.threads, thread_name_prefix="hyperbatch-data")
        maker = ThreadPoolExecutor(1, thread_name_prefix="hyperbatch-data-device")
        ahead: deque[Future[tuple[Batch, Bad, Any]]] = deque()
        try:
            more = True
            while more or ahead:
                while more and len(ahead) <= self.config.prefetch:  # the first of them is about to leave
                    plan = next(plans, None)
                    more = plan is not None
                    if plan is not None:
                        parts = [readers.submit(self._read, plan, *rows) for rows in self._chunks(plan)]
                        ahead.append(maker.submit(self._make, plan, parts))
                if ahead:
                    batch, bad, ready = ahead.popleft().result()
                    self._hand_over(batch, ready)
                    yield batch, bad
        finally:
            # The maker waits for readers, so it goes first; a cancelled reader ends its wait.
            maker.shutdown(wait=False, cancel_futures=True)
            readers.shutdown(wait=True, cancel_futures=True)
            maker.shutdown(wait=True)

    def _hand_over(self, batch: Batch, ready: torch.cuda.Event | None) -> None:
        """The step's stream waits for the batch; the host does not."""
        if ready is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ready)
        for tensor in (batch.images, batch.labels, batch.mask):
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is not reused before the step has read it

    def _chunks(self, plan: Plan) -> list[tuple[int, int]]:
        if self._device_cache is not None and self._device_cache.table[plan.ids, 0].all():
            return []  # every image lies in device memory
        chunk = min(MAX_CHUNK, -(-plan.real // self.threads))
        return [(start, min(start + chunk, plan.real)) for start in range(0, plan.real, max(chunk, 1))]

    # --- reader threads

    def _read(self, plan: Plan, start: int, stop: int) -> _Part:
        part, images = _Part(start), {}
        for row in range(start, stop):
            index = int(plan.ids[row])
            for _ in range(MAX_REPLACEMENTS):
                try:
                    loaded = self._load(index, exact=not plan.training)
                    break
                except BadSample as error:
                    part.bad.append((index, str(error)))
                    loaded = None
                    if not plan.training:  # evaluation: the sample counts, as a black image
                        break
                    index = (index + 1) % len(self.source)
            else:
                raise too_many_in_a_row(part.bad)
            part.used.append(index)
            if isinstance(loaded, Tensor):
                part.files[row] = loaded
            elif loaded is not None:
                images[row] = loaded
        if images:
            start_s = time.perf_counter()
            part.pixels = torch.empty(
                sum(image.size for image in images.values()), dtype=torch.uint8, pin_memory=self._cuda
            )
            flat, offset = part.pixels.numpy(), 0
            for row, image in images.items():
                flat[offset : offset + image.size] = image.reshape(-1)
                part.places[row] = (offset, image.shape[1], image.shape[0])
                offset += image.size
            self.meter.add("copy", time.perf_counter() - start_s, self.threads)
        return part

    def _load(self, index: int, *, exact: bool) -> Tensor | np.ndarray | None:
        """A file for the GPU's decoder, pixels [h, w, c], or None for an image that lies in device memory."""
        source = self.source
        if self._device_cache is not None and self._device_cache.table[index, 0]:
            return None
        if self._host_cache is not None and (kept := self._host_cache.get(index)) is not None:
            return kept
        if not isinstance(source, EncodedSource):
            return source.image(index)
        start_s = time.perf_counter()
        data = source.read_buffer(index)
        read_s = time.perf_counter()
        self.meter.add("read", read_s - start_s, self.threads)
        if self.decoder == "nvjpeg" and not exact and gpu_can_decode(data):
            return torch.frombuffer(data, dtype=torch.uint8)
        pixels = decode_full(data, source.describe(index), decoder=self.cpu_decoder)
        self.meter.add("decode", time.perf_counter() - read_s, self.threads)
        if self._host_cache is not None and not exact:
            self._host_cache.put(index, pixels)
        return pixels

    # --- the device thread

    def _make(self, plan: Plan, parts: list[Future[_Part]]) -> tuple[Batch, Bad, torch.cuda.Event | None]:
        found = [part.result() for part in parts]
        start_s, decode_s = time.perf_counter(), 0.0
        bad = [line for part in found for line in part.bad]
        used = np.zeros(len(plan.ids), dtype=np.int64)
        used[: plan.real] = [index for part in found for index in part.used] if found else plan.ids[: plan.real]
        # Rows nothing fills are padding and unreadable images: one black pixel.
        samples = np.tile(np.array([self._black.data_ptr(), 1, 1, 0, 0, 1]), (len(plan.ids), 1))
        with self._on_stream():
            alive: list[Tensor] = []
            if self._device_cache is not None:
                kept = np.flatnonzero(self._device_cache.table[used[: plan.real], 0])
                samples[kept] = self._device_cache.table[used[kept]]
            for part in found:
                self._upload(part, samples, used, alive)
            files = {row: file for part in found for row, file in part.files.items()}
            if files:
                decode_s = self._decode_files(files, samples, used, alive, bad)
            batch = self._render(plan, samples, used)
            ready = None
            if self._stream is not None:
                ready = self._last = torch.cuda.Event()
                ready.record(self._stream)
        self.meter.add("device", time.perf_counter() - start_s - decode_s)
        return batch, bad, ready

    def _upload(self, part: _Part, samples: np.ndarray, used: np.ndarray, alive: list[Tensor]) -> None:
        if part.pixels is None:
            return
        pixels = part.pixels.to(self.device, non_blocking=True)
        alive.append(pixels)
        base, channels = pixels.data_ptr(), self.source.channels
        for row, (offset, width, height) in part.places.items():
            samples[row] = (base + offset, width, height, channels, width * channels, 1)
            if self._device_cache is not None:
                image = pixels[offset : offset + width * height * channels]
                self._device_cache.put(int(used[row]), samples[row], image)

    def _decode_files(
        self, files: dict[int, Tensor], samples: np.ndarray, used: np.ndarray, alive: list[Tensor], bad: Bad
    ) -> float:
        """Fills the files' rows; returns the seconds the decoder took."""
        if self._last is not None:
            # The decoder writes on a stream of its own into memory that the last batch's kernel may still read.
            self._last.synchronize()
        start_s = time.perf_counter()
        rows = list(files)
        try:
            decoded = dict(zip(rows, self._decode(list(files.values()), self.device), strict=True))
        except RuntimeError:  # one of them is broken, and nothing says which
            decoded = {row: self._decode_alone(row, file, used, bad) for row, file in files.items()}
        if self._stream is not None:
            # Hardware decoders have been seen to run past the stream they were given: the host waits before it goes on.
            self._stream.synchronize()
        decode_s = time.perf_counter() - start_s
        self.meter.add("gpu_decode", decode_s)
        for row, pixels in decoded.items():
            _, height, width = pixels.shape
            samples[row] = (pixels.data_ptr(), width, height, 1, width, width * height)
            if self._device_cache is not None:
                self._device_cache.put(int(used[row]), samples[row], pixels)
        if self._host_cache is not None and self._host_cache.bytes < self._host_cache.limit_bytes:
            for row, pixels in decoded.items():
                self._host_cache.put(int(used[row]), pixels.permute(1, 2, 0).contiguous().cpu().numpy())
        alive.extend(decoded.values())
        return decode_s

    def _decode_alone(self, row: int, file: Tensor, used: np.ndarray, bad: Bad) -> Tensor:
        """uint8[3, h, w] of a file the GPU's decoder may refuse, or of the sample that replaces it."""
        try:
            return self._decode([file], self.device)[0]
        except RuntimeError:
            pass
        assert isinstance(self.source, EncodedSource)
        index = int(used[row])
        for _ in range(MAX_REPLACEMENTS):
            try:
                pixels = decode_full(self.source.read(index), self.source.describe(index), decoder=self.cpu_decoder)
                used[row] = index
                return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).to(self.device)
            except BadSample as error:
                bad.append((index, str(error)))
                index = (index + 1) % len(self.source)
        raise too_many_in_a_row(bad)

    def _render(self, plan: Plan, samples: np.ndarray, used: np.ndarray) -> Batch:
        whole = isinstance(self.source, ArraySource)
        views = augment.batch_views(self.config, samples[:, 1], samples[:, 2], plan.epochs, plan.uniforms, whole=whole)
        shape = (len(samples), plan.size, plan.size, self.source.channels)
        # The kernel counts in 32 bits; a 64-bit run gets that, widened.
        dtype = torch.float32 if self.dtype == torch.float64 else self.dtype
        images = torch.empty(shape, dtype=dtype, device=self.device)
        render_views(
            images,
            pinned(samples, self.device),
            pinned(view_table(views), self.device),
            self._scale,
            pinned(self._normaliser.offsets(plan).astype(np.float32), self.device),
        )
        labels = self.source.labels[used]
        labels[plan.real :] = 0
        return Batch(
            images.permute(0, 3, 1, 2).to(self.dtype), pinned(labels, self.device), eval_mask(plan, self.device)
        )

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)
