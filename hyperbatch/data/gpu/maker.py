"""The batch maker on the GPU: takes drafts, cuts the views of their images, and hands over the batches."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbatch.data import augment
from hyperbatch.data.batch import BadSamples, Batch, Batches, Plan, StreamPlan
from hyperbatch.data.buffers import copy_to_device
from hyperbatch.data.cache import DeviceCache, PixelCache
from hyperbatch.data.decode import choose_decoder
from hyperbatch.data.gpu import nvjpeg
from hyperbatch.data.gpu.drafts import Decode, Draft, Drafter
from hyperbatch.data.gpu.reader_pool import can_serve, worth_processes
from hyperbatch.data.gpu.reading import ProcessReaders, Promise, SampleReader, ThreadReaders
from hyperbatch.data.gpu.render import view_table
from hyperbatch.data.gpu.resident import ResidentSet
from hyperbatch.data.maker import Finish, Maker
from hyperbatch.data.source import ArraySource

# Threads that only read. More of them compete for Python's lock (measured on 16 cores: 4 read twice as much as 16).
_READING_THREADS = 4
_READING_PROCESSES = 8
_DECODING_CORES = 0.75  # fraction of a rank's cores for processes that decode JPEGs; the step needs some cores, too

_Cut = list[tuple[torch.cuda.Event | None, Draft]]  # the last batch's draft, and the event after its images were read

_idle_streams: dict[tuple[torch.device, str], list[torch.cuda.Stream]] = {}


def _lent_stream(maker: object, device: torch.device, purpose: str) -> torch.cuda.Stream | None:
    """Returns a stream, which is reused once the maker is gone. Streams are reused because torch keeps memory for each
    stream, and each evaluation has its own maker.

    The stream has a high priority, because its kernels are short and the step after next waits for them. On a CPU it is
    None, and the same code runs in Triton's interpreter, for tests.
    """
    if device.type != "cuda":
        return None
    idle = _idle_streams.setdefault((device, purpose), [])
    stream = idle.pop() if idle else torch.cuda.Stream(device, priority=-1)
    weakref.finalize(maker, idle.append, stream).atexit = False
    return stream


@dataclass(eq=False)
class DeviceMaker(Maker):
    """Makes batches ahead of the step. `decoder` is "nvjpeg" or a CPU decoder.

    processes: whether processes read instead of threads. None means that they do if the set is large enough.
    """

    _: KW_ONLY
    cpu_decoder: str
    cache: PixelCache | DeviceCache | None = None
    processes: bool | None = None
    decode: Decode = nvjpeg.decode_files

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes is None:
            self.processes = worth_processes(self.source)
        self._host_cache = self.cache if isinstance(self.cache, PixelCache) else None
        self._device_cache = self.cache if isinstance(self.cache, DeviceCache) else None
        self._stream = _lent_stream(self, self.device, "views")
        self._last_ready: torch.cuda.Event | None = None  # recorded after the last batch
        with self._on_stream():
            self._scale = copy_to_device(self.scale.astype(np.float32), self.device)
            self._black = torch.zeros(self.source.channels, dtype=torch.uint8, device=self.device)
            self._resident = self._resident_set()
        self._drafter = Drafter(
            source=self.source,
            device=self.device,
            stream=_lent_stream(self, self.device, "drafts"),
            decode=self.decode,
            cpu_decoder=self.cpu_decoder,
            host_cache=self._host_cache,
            device_cache=self._device_cache,
            black=self._black,
            meter=self.meter,
        )
        self._warm_up: Future[object] | None = None

    def run(self, plans: Iterator[Plan]) -> Batches:
        """Yields (batch, its unreadable samples as (id, line)) for each plan, in order."""
        readers = self._readers()
        device_thread = ThreadPoolExecutor(1, thread_name_prefix="hyperbatch-data-device")
        cut: _Cut = []
        if self._warm_up is not None:
            self._warm_up.result()

        def start(plan: Plan) -> Finish:
            if self.needs_no_host(plan):
                queued = self._make_resident(plan)  # in this thread: waking another one would take as long
                return lambda: self._hand_over(*queued)
            read = readers.submit(plan, self._drafter.unread(plan))
            made = device_thread.submit(self._make, plan, read, cut)
            return lambda: self._hand_over(*made.result())

        try:
            yield from self.prefetch(plans, start)
        finally:
            device_thread.shutdown(wait=True, cancel_futures=True)
            self._let_go(cut)
            if self._last_ready is not None:
                self._last_ready.synchronize()  # the caller may now free the set, which the last batch is made from
            readers.close()

    def needs_no_host(self, plan: Plan) -> bool:
        """Whether the plan's samples are in device memory and a few launches cut their views."""
        return self._resident is not None and self._resident.can_make(plan)

    def warm_up(self, plans: Sequence[Plan]) -> None:
        """Starts a thread that makes the plans that need no host and discards the batches, so that their kernels are
        compiled while the run is set up. The first batch waits for it."""
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
        """Makes the batches of each plan that needs no host, as many as are prefetched at once, and discards them, so
        that the memory and the kernels for their shapes are ready."""
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
        """Records an event after the batch that was queued last."""
        if self._stream is None:
            return None
        ready = self._last_ready = torch.cuda.Event()
        ready.record(self._stream)
        return ready

    def _readers(self) -> ThreadReaders | ProcessReaders:
        on_gpu = self.decoder == "nvjpeg"
        cpu_share = (self.config.cpu_decode_share or 0.0) if on_gpu else 0.0
        only_read = on_gpu and not cpu_share
        processes = (
            self.processes
            and self._host_cache is None
            and self.config.decoder != "torchvision"  # processes do not load torch, so they cannot use it
            and can_serve(self.source)
        )
        reader = SampleReader(
            source=self.source,
            on_gpu=on_gpu,
            cpu_share=cpu_share,
            # 16 processes with Pillow decode more than 16 threads with torchvision. The pixels of the CPU's share must
            # not depend on whether threads or processes decode them.
            decoder=choose_decoder("auto") if processes or cpu_share else self.cpu_decoder,
            pin=self._stream is not None,
            meter=self.meter,
            # Copies of cached images run without Python's lock, so every core helps.
            threads=min(self.threads, _READING_THREADS) if only_read and self._host_cache is None else self.threads,
            host_cache=self._host_cache,
            device_cache=self._device_cache,
        )
        if not processes:
            return ThreadReaders(reader)
        workers = min(self.threads, _READING_PROCESSES) if on_gpu else self.threads
        if cpu_share:
            workers = max(workers, int(self.threads * _DECODING_CORES))
        return ProcessReaders(reader, workers, slots=self.config.prefetch + 2)

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

    def _make(
        self, plan: Plan, promises: list[Promise], cut: _Cut
    ) -> tuple[Batch, BadSamples, torch.cuda.Event | None]:
        draft = self._drafter.make(plan, promises)  # overlaps with cutting the last batch
        start_s = time.perf_counter()
        self._let_go(cut)
        with self._on_stream():
            if self._stream is not None and draft.uploaded is not None:
                self._stream.wait_event(draft.uploaded)
            batch = self._render(draft)
            ready = self._record()
        cut.append((ready, draft))
        self.meter.add("device", time.perf_counter() - start_s)
        return batch, draft.bad, ready

    def _let_go(self, cut: _Cut) -> None:
        """Waits, on the host, until the last batch's images have been read. Then decoders may overwrite them, readers
        may overwrite the memory that they were copied from, and other loaders may read the cached ones."""
        for ready, draft in cut:
            if ready is not None:
                ready.synchronize()
            if self._device_cache is not None:
                for kept in draft.to_keep:
                    self._device_cache.put(*kept)
        cut.clear()

    def _render(self, draft: Draft) -> Batch:
        from hyperbatch.kernels import augment as kernels  # imported here because it loads Triton

        plan, images = draft.plan, draft.images
        whole = isinstance(self.source, ArraySource)
        views = augment.batch_views(self.config, images[:, 1], images[:, 2], plan.epochs, plan.uniforms, whole=whole)
        shape = (len(images), plan.size, plan.size, self.source.channels)
        # The kernel computes in fp32. In an fp64 run, its results are converted to fp64.
        dtype, scale = torch.float32 if self.dtype == torch.float64 else self.dtype, self._scale
        gains, offsets = self.colors(plan)
        retouches = self.retouches(plan)
        if retouches:  # the kernel returns grey levels; it rounds down, so adding 0.5 rounds to the nearest level
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
        """Applies each view's operations to training views in grey levels, and normalises them."""
        gains, offsets = self.colors(plan)
        factors = (gains[:, None] * self.scale, offsets)
        scale, offset = (copy_to_device(part.astype(np.float32), self.device)[:, None, None] for part in factors)
        images = self.retouched(plan, levels).float().mul_(scale).add_(offset)
        return self.cut_out(plan, images.permute(0, 3, 1, 2).to(self.dtype))

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)
