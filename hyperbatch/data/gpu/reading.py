"""Reads the rows of a batch for the GPU, with threads of this process or with other processes.

Threads can read any source. Processes can read sources whose samples are in files (`EncodedSource.locations`). Both
return promises: calling a promise waits for its rows.

During a busy step, nvJPEG may be slower than the step while cores are idle. Therefore a share of the JPEGs can be
decoded here (`SampleReader.cpu_pixels`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from hyperbatch.data import stream
from hyperbatch.data.batch import BadSamples, Plan
from hyperbatch.data.cache import DeviceCache, PixelCache
from hyperbatch.data.decode import JpegFrame, decode_full, frame_left_to_gpu, image_size
from hyperbatch.data.gpu.jpegs import JpegFiles, packed
from hyperbatch.data.gpu.reader_pool import ReaderPool, return_pool, take_pool
from hyperbatch.data.gpu.reader_process import BYTES, FAILED, FILE, HEIGHT, KIND, OFFSET, PIXELS, WHAT, WIDTH
from hyperbatch.data.maker import load_or_replace, samples_per_task
from hyperbatch.data.meter import Meter
from hyperbatch.data.source import EncodedSource, Source, estimated_mean

_ROOM = 2  # slots have room for this many times the mean size; the parent reads what does not fit
_ALL_PIXELS = 1 << 62
_CPU_PIXELS = 1 << 20  # the CPU decodes no larger images: its time grows with the pixels, the GPU's much less
_DECODE_DOMAIN = 0x6465636F6465  # separates the choice of the CPU's samples from other draws


@dataclass(frozen=True, slots=True)
class PixelBlock:
    """Images stored one after the other in (pinned) host memory, with their rows in the batch and their offset, width
    and height."""

    pixels: Tensor
    rows: np.ndarray  # int64[n]
    places: np.ndarray  # int64[n, 3]


@dataclass(slots=True)
class ReadRows:
    """What was read for some rows of a batch. A row that is in neither `files` nor `blocks` is already in device
    memory, or it is an unreadable sample of an evaluation, which becomes a black image."""

    files: list[JpegFiles] = field(default_factory=list)  # for the GPU's decoder
    blocks: list[PixelBlock] = field(default_factory=list)  # decoded on the host
    replaced: dict[int, int] = field(default_factory=dict)  # row -> the sample that replaces an unreadable one
    bad: BadSamples = field(default_factory=list)


Promise = Callable[[], ReadRows]


@dataclass(frozen=True, kw_only=True)
class SampleReader:
    """Reads one sample at a time, in this process, and replaces unreadable ones."""

    source: Source
    on_gpu: bool  # whether the GPU decodes JPEGs
    cpu_share: float  # the share of the JPEGs that the CPU decodes nevertheless
    decoder: str
    pin: bool
    meter: Meter
    threads: int
    host_cache: PixelCache | None
    device_cache: DeviceCache | None

    def cpu_pixels(self, ids: np.ndarray) -> np.ndarray:
        """Returns int64[n]: for each sample, the size in pixels up to which the CPU decodes its JPEG.

        Decoders differ by grey levels. The result depends on the sample alone, so that its pixels do not depend on the
        batch, the number of ranks, or on whether a thread or a process reads it.
        """
        if not self.on_gpu or not self.cpu_share:
            return np.full(len(ids), 0 if self.on_gpu else _ALL_PIXELS)
        chosen = stream.uniforms(0, np.zeros_like(ids), ids, 1, domain=_DECODE_DOMAIN)[:, 0] < self.cpu_share
        return np.where(chosen, _CPU_PIXELS, 0)

    def mean_bytes(self) -> float | None:
        """Returns the mean size of what is handed on for a sample, a file or its pixels, or None if none can be
        read."""
        source = self.source
        assert isinstance(source, EncodedSource)
        shares = {_CPU_PIXELS: self.cpu_share, 0: 1 - self.cpu_share} if self.on_gpu else {_ALL_PIXELS: 1.0}

        def handed_on(index: int) -> float:
            data = source.read(index)
            decoded = 3 * math.prod(image_size(data, source.describe(index)))
            return sum(
                share * (len(data) if frame_left_to_gpu(data, cpu_pixels) else decoded)
                for cpu_pixels, share in shares.items()
            )

        return estimated_mean(source, handed_on)

    def read_rows(self, plan: Plan, rows: list[int]) -> ReadRows:
        read, files, images = ReadRows(), {}, {}
        for row in rows:
            wanted = int(plan.ids[row])
            shown, loaded = load_or_replace(plan, wanted, self.source, self._load, read.bad)
            if shown != wanted:
                read.replaced[row] = shown
            if isinstance(loaded, tuple):
                files[row] = loaded
            elif loaded is not None:
                images[row] = loaded
        if files or images:
            with self.meter.busy("copy", self.threads):
                read.files += [JpegFiles.collect(files, pin=self.pin)] if files else []
                read.blocks += [self._collect(images)] if images else []
        return read

    def _load(self, index: int) -> tuple[bytearray, JpegFrame] | np.ndarray | None:
        """Returns a file for the GPU's decoder, pixels [h, w, c], or None for an image that is in device memory."""
        if self.device_cache is not None and self.device_cache.table[index, 0]:
            return None
        if self.host_cache is not None and (pixels := self.host_cache.get(index)) is not None:
            return pixels
        if not isinstance(self.source, EncodedSource):
            return self.source.image(index)
        with self.meter.busy("read", self.threads):
            data = self.source.read_buffer(index)
        cpu_pixels = int(self.cpu_pixels(np.array([index]))[0])
        if (frame := frame_left_to_gpu(data, cpu_pixels)) is not None:
            return data, frame
        with self.meter.busy("decode", self.threads):
            return decode_full(data, self.source.describe(index), decoder=self.decoder)

    def _collect(self, images: dict[int, np.ndarray]) -> PixelBlock:
        memory, offsets = packed([image.reshape(-1) for image in images.values()], pin=self.pin)
        sizes = [(image.shape[1], image.shape[0]) for image in images.values()]
        return PixelBlock(memory, np.array(list(images)), np.column_stack([offsets, sizes]))


class ThreadReaders:
    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self._threads = ThreadPoolExecutor(reader.threads, thread_name_prefix="hyperbatch-data")

    def submit(self, plan: Plan, rows: np.ndarray) -> list[Promise]:
        count = samples_per_task(len(rows), self._reader.threads)
        tasks = [rows[start : start + count].tolist() for start in range(0, len(rows), count)]
        return [self._threads.submit(self._reader.read_rows, plan, task).result for task in tasks]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


class ProcessReaders:
    """Sends one request per worker and batch. slots: the number of batches that may be in use at the same time."""

    def __init__(self, reader: SampleReader, workers: int, *, slots: int) -> None:
        self._reader = reader
        self._slots = slots
        self._workers = workers
        self._pools: list[ReaderPool] = []
        self._samples_per_worker = 0
        self._batch = 0

    def submit(self, plan: Plan, rows: np.ndarray) -> list[Promise]:
        samples_per_worker = -(-plan.real // self._workers)
        if samples_per_worker > self._samples_per_worker:
            self._open(samples_per_worker)
        pool, slot = self._pools[-1], self._batch % self._slots
        self._batch += 1
        source, promises = self._reader.source, []
        assert isinstance(source, EncodedSource)
        cpu_pixels = self._reader.cpu_pixels(plan.ids)
        # Files to decode take a worker far longer than others, so every worker gets the same number of them.
        to_decode = cpu_pixels[rows] > 0
        kinds = [np.array_split(rows[kind], self._workers) for kind in (to_decode, ~to_decode)]
        for worker, parts in enumerate(zip(*kinds, strict=True)):
            if len(share := np.concatenate(parts)):
                wanted = source.locations(plan.ids[share].tolist())
                assert wanted is not None
                pool.request(worker, slot, self._reader.decoder, wanted, cpu_pixels[share].tolist())
                promises.append(partial(self._receive, pool, worker, plan, share.tolist()))
        return promises

    def _open(self, samples_per_worker: int) -> None:
        """Opens a pool with larger slots, for a first or a larger batch. Older pools stay open, because unfinished
        batches use their memory."""
        self._samples_per_worker = samples_per_worker
        slot_bytes = max(1 << 20, int(_ROOM * samples_per_worker * (self._reader.mean_bytes() or 1 << 20)))
        self._pools.append(take_pool(self._workers, self._slots, slot_bytes, pin=self._reader.pin))

    def _receive(self, pool: ReaderPool, worker: int, plan: Plan, rows: list[int]) -> ReadRows:
        with self._reader.meter.busy("read"):
            found, row_of = pool.reply(worker), np.array(rows)
        read = self._reader.read_rows(plan, row_of[found[:, WHAT] == FAILED].tolist())
        if (files := found[:, WHAT] == FILE).any():
            table = found[files][:, [OFFSET, BYTES, WIDTH, HEIGHT, KIND]]
            read.files.append(JpegFiles.of(pool.slab, row_of[files], table))
        if (pixels := found[:, WHAT] == PIXELS).any():
            places = found[pixels][:, [OFFSET, WIDTH, HEIGHT]]
            start, stop = int(places[:, 0].min()), int((places[:, 0] + 3 * places[:, 1] * places[:, 2]).max())
            places[:, 0] -= start
            read.blocks.append(PixelBlock(pool.slab[start:stop], row_of[pixels], places))
        return read

    def close(self) -> None:
        for pool in self._pools:
            return_pool(pool)
        self._pools.clear()
