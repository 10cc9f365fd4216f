"""The GPU's maker of batches: one thread that takes what was read, has it decoded and cut, and hands over the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbatch.data import augment
from hyperbatch.data.batch import BadSamples, Batch, Batches, Plan, StreamPlan
from hyperbatch.data.buffers import copy_to_device
from hyperbatch.data.cache import DeviceCache, PixelCache
from hyperbatch.data.decode import choose_decoder, decode_full
from hyperbatch.data.gpu import nvjpeg
from hyperbatch.data.gpu.jpegs import Decoded, JpegFiles
from hyperbatch.data.gpu.reader_pool import can_use_processes
from hyperbatch.data.gpu.reading import PixelBlock, ProcessReaders, Promise, SampleReader, ThreadReaders
from hyperbatch.data.gpu.render import view_table
from hyperbatch.data.gpu.resident import ResidentSet
from hyperbatch.data.maker import Finish, Maker, load_or_replace
from hyperbatch.data.source import ArraySource, EncodedSource

Decode = Callable[[JpegFiles, torch.device], Decoded]

# Threads that only read: more of them fight for Python's lock (measured on 16 cores: 4 read twice as much as 16).
_READING_THREADS = 4
_READING_PROCESSES = 8
_WORTH_PROCESSES = 2048  # samples; a smaller set is read before processes have started


_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def _lent_stream(maker: object, device: torch.device) -> torch.cuda.Stream:
    """A stream until the maker is gone: torch keeps memory for each stream, and each evaluation has a maker."""
    idle = _idle_streams.setdefault(device, [])
    stream = idle.pop() if idle else torch.cuda.Stream(device, priority=-1)
    weakref.finalize(maker, idle.append, stream).atexit = False
    return stream


@dataclass(slots=True)
class _Draft:
    """A batch that is being made: which sample each row shows, and where the pixels of it lie on the device."""

    plan: Plan
    shown: np.ndarray  # int64[n]: the plan's ids, but for replaced samples
    images: np.ndarray  # int64[n, 6]: the kernel's table of addresses, sizes and strides
    alive: list[Tensor] = field(default_factory=list)  # where the addresses point; held until the kernel is queued
    bad: BadSamples = field(default_factory=list)


@dataclass(eq=False)
class DeviceMaker(Maker):
    """Makes batches ahead of the step. `decoder` is "nvjpeg" or one of the CPU's.

    processes: read by processes instead of threads; None: where the set is large enough.
    """

    _: KW_ONLY
    cpu_decoder: str
    cache: PixelCache | DeviceCache | None = None
    processes: bool | None = None
    decode: Decode = nvjpeg.decode_files

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes is None:
            self.processes = can_use_processes() and len(self.source) >= _WORTH_PROCESSES
        self._host_cache = self.cache if isinstance(self.cache, PixelCache) else None
        self._device_cache = self.cache if isinstance(self.cache, DeviceCache) else None
        # Of high priority: its kernels are short, and the step after next waits for them. On a CPU there is none, and
        # the same code runs by Triton's interpreter, for tests.
        self._stream = _lent_stream(self, self.device) if self.device.type == "cuda" else None
        self._last_ready: torch.cuda.Event | None = None  # of the batch that was made last
        with self._on_stream():
            self._scale = copy_to_device(self.scale.astype(np.float32), self.device)
            self._black = torch.zeros(self.source.channels, dtype=torch.uint8, device=self.device)
            self._resident = self._resident_set()
        self._warm_up: Future[object] | None = None

    def run(self, plans: Iterator[Plan]) -> Batches:
        """(batch, its unreadable samples as (id, line)) for each plan, in order."""
        readers = self._readers()
        device_thread = ThreadPoolExecutor(1, thread_name_prefix="hyperbatch-data-device")
        if self._warm_up is not None:
            self._warm_up.result()

        def start(plan: Plan) -> Finish:
            if self.needs_no_host(plan):
                queued = self._make_resident(plan)  # by this thread: it takes no longer than to wake another
                return lambda: self._hand_over(*queued)
            made = device_thread.submit(self._make, plan, readers.submit(plan, self._unread(plan)))
            return lambda: self._hand_over(*made.result())

        try:
            yield from self.prefetch(plans, start)
        finally:
            device_thread.shutdown(wait=True, cancel_futures=True)
            if self._last_ready is not None:
                self._last_ready.synchronize()  # others may write where the last batch's copies come from
            readers.close()

    def needs_no_host(self, plan: Plan) -> bool:
        """Whether the plan's samples lie in device memory and their views are cut by a few launches."""
        return self._resident is not None and self._resident.can_make(plan)

    def warm_up(self, plans: Sequence[Plan]) -> None:
        """A thread makes those plans that need no host and throws the batches away: their kernels are compiled while
        the run is set up. The first batch waits for it."""
        resident, plans = self._resident, [plan for plan in plans if self.needs_no_host(plan)]
        if resident is None or not plans:
            return

        def make() -> None:
            with self._on_stream():
                for plan in plans:
                    self._resident_batch(resident, plan)

        thread = ThreadPoolExecutor(1, thread_name_prefix="hyperbatch-data-warm-up")
        self._warm_up = thread.submit(make)
        thread.shutdown(wait=False)

    def rehearse(self, plans: Sequence[Plan]) -> None:
        """Makes as many batches of each plan that needs no host as lie ready at once, and throws them away: memory and
        kernels of their shapes are there afterwards."""
        if self._resident is None:
            return
        if self._warm_up is not None:
            self._warm_up.result()
        with self._on_stream():
            for plan in filter(self.needs_no_host, plans):
                _ = [self._resident_batch(self._resident, plan) for _ in range(self.config.prefetch + 1)]

    def _resident_set(self) -> ResidentSet | None:
        if self._device_cache is None or self._device_cache.whole is None:
            return None
        assert isinstance(self.source, ArraySource)
        return ResidentSet(
            self.source,
            self._device_cache.whole,
            self.config,
            dtype=self.dtype,
            scale=self.scale,
            offset=self.offset,
        )

    def _make_resident(self, plan: Plan) -> tuple[Batch, BadSamples, torch.cuda.Event | None]:
        assert self._resident is not None
        start_s = time.perf_counter()
        with self._on_stream():
            batch = self._resident_batch(self._resident, plan)
            ready = self._record()
        self.meter.add("device", time.perf_counter() - start_s)
        return batch, [], ready

    def _resident_batch(self, resident: ResidentSet, plan: Plan) -> Batch:
        if isinstance(plan, StreamPlan) and self.retouches(plan):
            levels, labels = resident.levels(plan)
            return self.mixed(plan, Batch(self._retouched(plan, levels), labels))
        return self.mixed(plan, dataclasses.replace(resident.make(plan), mask=self.mask(plan)))

    def _record(self) -> torch.cuda.Event | None:
        """Of the batch that was queued last."""
        if self._stream is None:
            return None
        ready = self._last_ready = torch.cuda.Event()
        ready.record(self._stream)
        return ready

    def _readers(self) -> ThreadReaders | ProcessReaders:
        on_gpu = self.decoder == "nvjpeg"
        processes = (
            self.processes
            and self._host_cache is None
            and self.config.decoder != "torchvision"  # asked for by name, and processes do not load torch
            and isinstance(self.source, EncodedSource)
            and self.source.locations([0]) is not None
        )
        reader = SampleReader(
            source=self.source,
            on_gpu=on_gpu,
            # 16 processes of Pillow decode more than 16 threads of torchvision.
            decoder=choose_decoder("auto") if processes else self.cpu_decoder,
            pin=self._stream is not None,
            meter=self.meter,
            # Copies of kept images run without Python's lock: every core helps.
            threads=min(self.threads, _READING_THREADS) if on_gpu and self._host_cache is None else self.threads,
            host_cache=self._host_cache,
            device_cache=self._device_cache,
        )
        if not processes:
            return ThreadReaders(reader)
        workers = min(self.threads, _READING_PROCESSES) if on_gpu else self.threads
        return ProcessReaders(reader, workers, slots=self.config.prefetch + 2)

    def _unread(self, plan: Plan) -> np.ndarray:
        """Rows whose images do not lie in device memory yet."""
        if self._device_cache is None:
            return np.arange(plan.real)
        return np.flatnonzero(self._device_cache.table[plan.ids[: plan.real], 0] == 0)

    def _hand_over(self, batch: Batch, bad: BadSamples, ready: torch.cuda.Event | None) -> tuple[Batch, BadSamples]:
        """The step's stream waits for the batch; the host does not."""
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for tensor in (batch.images, batch.labels, batch.mask):
                if tensor is not None:
                    tensor.record_stream(stream)  # its memory is not reused before the step has read it
        return batch, bad

    # --- the device thread

    def _make(self, plan: Plan, promises: list[Promise]) -> tuple[Batch, BadSamples, torch.cuda.Event | None]:
        read = [promise() for promise in promises]
        start_s, decode_s = time.perf_counter(), 0.0
        if self._last_ready is not None:
            # The decoder writes on a stream of its own into memory that the last batch's kernel may still read, and
            # readers will write where its copies came from.
            self._last_ready.synchronize()
        # Padding and unreadable images: one black pixel.
        black = np.array([self._black.data_ptr(), 1, 1, 0, 0, 1])
        draft = _Draft(plan, plan.ids.copy(), np.tile(black, (len(plan), 1)))
        for rows in read:
            draft.bad += rows.bad
            for row, index in rows.replaced.items():
                draft.shown[row] = index
        with self._on_stream():
            if self._device_cache is not None:
                table = self._device_cache.table[draft.shown[: plan.real]]
                draft.images[: plan.real] = np.where(table[:, :1] > 0, table, draft.images[: plan.real])
            for rows in read:
                for block in rows.blocks:
                    self._upload(draft, block)
            if files := [part for rows in read for part in rows.files]:
                decode_s = self._decode_files(draft, JpegFiles.join(files))
            batch = self._render(draft)
            ready = self._record()
        self.meter.add("device", time.perf_counter() - start_s - decode_s)
        return batch, draft.bad, ready

    def _upload(self, draft: _Draft, block: PixelBlock) -> None:
        # A copy also where there is nothing to copy to: readers write into the block again.
        pixels = block.pixels.to(self.device, non_blocking=True, copy=True)
        draft.alive.append(pixels)
        channels, (offsets, width, height) = self.source.channels, block.places.T
        # In the order of the kernel's table: address, size, strides.
        columns = pixels.data_ptr() + offsets, width, height, channels, width * channels, 1
        draft.images[block.rows] = np.column_stack(np.broadcast_arrays(*columns))
        if self._device_cache is None and self._host_cache is None:
            return
        for row, (offset, width, height) in zip(block.rows.tolist(), block.places.tolist(), strict=True):
            index, span = int(draft.shown[row]), slice(offset, offset + width * height * channels)
            if self._device_cache is not None:
                self._device_cache.put(index, draft.images[row], pixels[span])
            elif self._host_cache is not None:
                self._host_cache.put(index, block.pixels[span].view(height, width, channels).numpy().copy())

    def _decode_files(self, draft: _Draft, files: JpegFiles) -> float:
        """Fills the files' rows; returns the seconds the decoder took."""
        start_s = time.perf_counter()
        try:
            decoded = self.decode(files, self.device)
        except RuntimeError:  # one of them is broken, and nothing says which
            files, decoded = self._decode_each(draft, files)
        if self._stream is not None:
            # Hardware decoders have been seen to run past the stream they were given: the host waits before it goes on.
            self._stream.synchronize()
        decode_s = time.perf_counter() - start_s
        self.meter.add("gpu_decode", decode_s)
        draft.images[files.rows] = decoded.images
        draft.alive += decoded.memory
        if self._device_cache is not None or self._host_cache is not None:
            for i, index in enumerate(draft.shown[files.rows].tolist()):
                self._keep(index, decoded.pixels(i))
        return decode_s

    def _keep(self, index: int, pixels: Tensor) -> None:
        """Decoded images lie together in memory that goes with the batch: the cache gets a copy."""
        if self._device_cache is not None and self._device_cache.has_room(index, pixels.nbytes):
            decoded = Decoded.of([pixels.clone()])
            self._device_cache.put(index, decoded.images[0], decoded.memory[0])
        elif self._host_cache is not None and self._host_cache.bytes < self._host_cache.limit_bytes:
            self._host_cache.put(index, pixels.permute(1, 2, 0).contiguous().cpu().numpy())

    def _decode_each(self, draft: _Draft, files: JpegFiles) -> tuple[JpegFiles, Decoded]:
        """(the files that can be shown, their pixels), one at a time."""
        shown, pixels = [], []
        for i in range(len(files)):
            found = self._decode_alone(draft, files.take([i]))
            if found is not None:
                shown.append(i)
                pixels.append(found)
        return files.take(shown), Decoded.of(pixels)

    def _decode_alone(self, draft: _Draft, file: JpegFiles) -> Tensor | None:
        """uint8[3, h, w] of a file the GPU's decoder may refuse, or of the sample that replaces it."""
        with contextlib.suppress(RuntimeError):
            return self.decode(file, self.device).pixels(0)
        source, row = self.source, int(file.rows[0])
        assert isinstance(source, EncodedSource)

        def on_cpu(index: int) -> Tensor:
            pixels = decode_full(source.read(index), source.describe(index), decoder=self.cpu_decoder)
            return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).to(self.device)

        draft.shown[row], pixels = load_or_replace(draft.plan, int(draft.shown[row]), source, on_cpu, draft.bad)
        return pixels

    def _render(self, draft: _Draft) -> Batch:
        from hyperbatch.kernels import augment as kernels  # here, because it loads Triton

        plan, images = draft.plan, draft.images
        whole = isinstance(self.source, ArraySource)
        views = augment.batch_views(self.config, images[:, 1], images[:, 2], plan.epochs, plan.uniforms, whole=whole)
        shape = (len(images), plan.size, plan.size, self.source.channels)
        # The kernel counts in 32 bits; a 64-bit run gets that, widened.
        dtype, scale = torch.float32 if self.dtype == torch.float64 else self.dtype, self._scale
        gains, offsets = self.colors(plan)
        retouches = self.retouches(plan)
        if retouches:  # grey levels, rounded down after a half is added
            dtype, scale = torch.uint8, torch.ones_like(scale)
            gains, offsets = np.ones_like(gains), np.full_like(offsets, 0.5)
        corners, cutout = None, 0
        if self.config.cutout and plan.uniforms is not None and not retouches:
            corners = augment.cutout_corners(self.config, plan.uniforms, plan.size).astype(np.int32)
            corners, cutout = copy_to_device(corners, self.device), augment.cutout_side(self.config, plan.size)
        out = torch.empty(shape, dtype=dtype, device=self.device)
        kernels.views(
            out,
            copy_to_device(images, self.device),
            copy_to_device(view_table(views), self.device),
            scale,
            *(copy_to_device(part.astype(np.float32), self.device) for part in (gains, offsets)),
            corners=corners,
            reflect=self.config.shift_padding == "reflect",
            cutout=cutout,
        )
        pixels = self._retouched(plan, out) if retouches else out.permute(0, 3, 1, 2).to(self.dtype)
        labels = self.source.labels[draft.shown]
        labels[plan.real :] = 0  # padding repeats the last sample's id
        return self.mixed(plan, Batch(pixels, copy_to_device(labels, self.device), self.mask(plan)))

    def _retouched(self, plan: Plan, levels: Tensor) -> Tensor:
        """Normalised images from training views in grey levels, each changed by its operation."""
        gains, offsets = self.colors(plan)
        factors = (gains[:, None] * self.scale, offsets)
        scale, offset = (copy_to_device(part.astype(np.float32), self.device)[:, None, None] for part in factors)
        images = self.retouched(plan, levels).float().mul_(scale).add_(offset)
        return self.cut_out(plan, images.permute(0, 3, 1, 2).to(self.dtype))

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)
