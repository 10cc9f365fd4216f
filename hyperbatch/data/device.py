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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data import augment, nvjpeg
from hyperbatch.data.batch import MAX_REPLACEMENTS, Bad, Batch, Made, Plan, too_many_in_a_row
from hyperbatch.data.cache import DeviceCache, PixelCache
from hyperbatch.data.decode import choose_decoder, decode_full
from hyperbatch.data.host import default_threads, eval_mask
from hyperbatch.data.meter import Meter
from hyperbatch.data.parts import Block, Handle, ProcessReaders, SampleLoader, ThreadReaders
from hyperbatch.data.render import Normaliser, pinned, render_views, view_table
from hyperbatch.data.source import ArraySource, BadSample, EncodedSource, Source
from hyperbatch.data.workers import can_use_processes

Decode = Callable[[list[Tensor], torch.device], list[Tensor]]


# Threads that only read: more of them fight for Python's lock (measured on 16 cores: 4 read twice as much as 16).
_READING_THREADS = 4
_READING_PROCESSES = 8
_WORTH_PROCESSES = 2048  # samples; a smaller set is read before processes have started


class DeviceMaker:
    """Makes batches ahead of the step. `decoder` is "nvjpeg" or one of the CPU's.

    processes: read by processes instead of threads; None: where the set is large enough.
    """

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
        processes: bool | None = None,
        decode: Decode = nvjpeg.decode_batch,
    ) -> None:
        self.source = source
        self.config = config
        self.device = device
        self.dtype = dtype
        self.decoder = decoder
        self.cpu_decoder = cpu_decoder
        self.meter = meter or Meter()
        if processes is None:
            processes = can_use_processes() and len(source) >= _WORTH_PROCESSES
        self.processes = processes
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

    def _readers(self) -> ThreadReaders | ProcessReaders:
        on_gpu = self.decoder == "nvjpeg"
        threads = self.config.data_threads or default_threads()
        processes = (
            self.processes
            and self._host_cache is None
            and self.config.decoder != "torchvision"  # asked for by name, and processes do not load torch
            and isinstance(self.source, EncodedSource)
            and self.source.locations([0]) is not None
        )
        loader = SampleLoader(
            self.source,
            on_gpu=on_gpu,
            # 16 processes of Pillow decode more than 16 threads of torchvision.
            decoder=choose_decoder("auto") if processes else self.cpu_decoder,
            pin=self._cuda,
            meter=self.meter,
            # Copies of kept images run without Python's lock: every core helps.
            threads=min(threads, _READING_THREADS) if on_gpu and self._host_cache is None else threads,
            kept=self._kept,
        )
        if not processes:
            return ThreadReaders(loader)
        workers = min(threads, _READING_PROCESSES) if on_gpu else threads
        return ProcessReaders(loader, workers, slots=self.config.prefetch + 2)

    def _kept(self, index: int) -> np.ndarray | bool:
        if self._device_cache is not None and self._device_cache.table[index, 0]:
            return True
        kept = None if self._host_cache is None else self._host_cache.get(index)
        return False if kept is None else kept

    def run(self, plans: Iterator[Plan]) -> Made:
        """(batch, its unreadable samples as (id, line)) for each plan, in order."""
        readers = self._readers()
        maker = ThreadPoolExecutor(1, thread_name_prefix="hyperbatch-data-device")
        ahead: deque[Future[tuple[Batch, Bad, Any]]] = deque()
        try:
            more = True
            while more or ahead:
                while more and len(ahead) <= self.config.prefetch:  # the first of them is about to leave
                    plan = next(plans, None)
                    more = plan is not None
                    if plan is not None:
                        ahead.append(maker.submit(self._make, plan, readers.submit(plan, self._unread(plan))))
                if ahead:
                    batch, bad, ready = ahead.popleft().result()
                    self._hand_over(batch, ready)
                    yield batch, bad
        finally:
            maker.shutdown(wait=True, cancel_futures=True)
            if self._last is not None:
                self._last.synchronize()  # others may write where the last batch's copies come from
            readers.close()

    def _hand_over(self, batch: Batch, ready: torch.cuda.Event | None) -> None:
        """The step's stream waits for the batch; the host does not."""
        if ready is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ready)
        for tensor in (batch.images, batch.labels, batch.mask):
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is not reused before the step has read it

    def _unread(self, plan: Plan) -> np.ndarray:
        """Rows whose images do not lie in device memory yet."""
        rows = np.arange(plan.real)
        if self._device_cache is None:
            return rows
        return rows[self._device_cache.table[plan.ids[rows], 0] == 0]

    # --- the device thread

    def _make(self, plan: Plan, parts: Sequence[Handle]) -> tuple[Batch, Bad, torch.cuda.Event | None]:
        found = [part.result() for part in parts]
        start_s, decode_s = time.perf_counter(), 0.0
        if self._last is not None:
            # The decoder writes on a stream of its own into memory that the last batch's kernel may still read, and
            # readers will write where its copies came from.
            self._last.synchronize()
        bad = [line for part in found for line in part.bad]
        used, black = plan.ids.copy(), np.arange(len(plan.ids)) >= plan.real
        for part in found:
            for row, index in part.replaced.items():
                used[row] = index
            black[list(part.black)] = True
        # Padding and unreadable images: one black pixel.
        samples = np.tile(np.array([self._black.data_ptr(), 1, 1, 0, 0, 1]), (len(plan.ids), 1))
        with self._on_stream():
            alive: list[Tensor] = []
            if self._device_cache is not None:
                kept = np.flatnonzero((self._device_cache.table[used, 0] != 0) & ~black)
                samples[kept] = self._device_cache.table[used[kept]]
            for part in found:
                for block in part.blocks:
                    self._upload(block, samples, used, alive)
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

    def _upload(self, block: Block, samples: np.ndarray, used: np.ndarray, alive: list[Tensor]) -> None:
        # A copy also where there is nothing to copy to: readers write into the block again.
        pixels = block.pixels.to(self.device, non_blocking=True, copy=True)
        alive.append(pixels)
        base, channels = pixels.data_ptr(), self.source.channels
        for row, (offset, width, height) in block.places.items():
            samples[row] = (base + offset, width, height, channels, width * channels, 1)
            image = pixels[offset : offset + width * height * channels]
            if self._device_cache is not None:
                self._device_cache.put(int(used[row]), samples[row], image)
            elif self._host_cache is not None:
                host = block.pixels[offset : offset + image.numel()].view(height, width, channels)
                self._host_cache.put(int(used[row]), host.numpy().copy())

    def _decode_files(
        self, files: dict[int, Tensor], samples: np.ndarray, used: np.ndarray, alive: list[Tensor], bad: Bad
    ) -> float:
        """Fills the files' rows; returns the seconds the decoder took."""
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
        labels[plan.real :] = 0  # padding repeats the last sample's id
        return Batch(
            images.permute(0, 3, 1, 2).to(self.dtype), pinned(labels, self.device), eval_mask(plan, self.device)
        )

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)
