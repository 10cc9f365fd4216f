"""Parts of a batch on their way to the GPU: read by threads of this process, or by processes of their own.

Threads serve any source; processes serve those whose samples lie in files (`EncodedSource.locations`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hyperbatch.data.batch import MAX_REPLACEMENTS, Bad, Plan, too_many_in_a_row
from hyperbatch.data.decode import decode_full, gpu_can_decode
from hyperbatch.data.meter import Meter
from hyperbatch.data.reader import FILE, PIXELS, Location
from hyperbatch.data.source import BadSample, EncodedSource, Source
from hyperbatch.data.workers import ReaderPool, give_back, take_pool

_MAX_CHUNK = 16  # samples a thread takes at a time
_PROBED_SAMPLES = 32  # of which the size of a slot is guessed
_ROOM = 2  # times the mean size; a part that does not fit is finished by the parent


@dataclass(frozen=True, slots=True)
class Block:
    """Images one after the other in (pinned) host memory, and row -> offset, width, height."""

    pixels: Tensor
    places: dict[int, tuple[int, int, int]]


@dataclass(slots=True)
class Part:
    """What was found for some rows of a batch."""

    files: dict[int, Tensor] = field(default_factory=dict)  # row -> bytes for the GPU's decoder
    blocks: list[Block] = field(default_factory=list)  # decoded on the host
    replaced: dict[int, int] = field(default_factory=dict)  # row -> the sample that stands in for an unreadable one
    black: set[int] = field(default_factory=set)  # rows of unreadable samples in evaluation
    bad: Bad = field(default_factory=list)


class Handle(Protocol):
    def result(self) -> Part: ...


class SampleLoader:
    """Reads one sample at a time, in this process; finds what replaces an unreadable one."""

    def __init__(
        self,
        source: Source,
        *,
        on_gpu: bool,
        decoder: str,
        pin: bool,
        meter: Meter,
        threads: int,
        kept: Callable[[int], np.ndarray | bool],
    ) -> None:
        self.source = source
        self.on_gpu = on_gpu  # JPEGs are left to the GPU's decoder
        self.decoder = decoder
        self.pin = pin
        self.meter = meter
        self.threads = threads
        self.kept = kept  # pixels of a sample in host memory; True: it lies in device memory; False: neither

    def part(self, plan: Plan, rows: list[int]) -> Part:
        part, images = Part(), {}
        for row in rows:
            first = index = int(plan.ids[row])
            for _ in range(MAX_REPLACEMENTS):
                try:
                    loaded = self._load(index)
                    break
                except BadSample as error:
                    part.bad.append((index, str(error)))
                    loaded = None
                    if not plan.training:  # evaluation: the sample counts, as a black image
                        part.black.add(row)
                        break
                    index = (index + 1) % len(self.source)
            else:
                raise too_many_in_a_row(part.bad)
            if index != first:
                part.replaced[row] = index
            if isinstance(loaded, Tensor):
                part.files[row] = loaded
            elif loaded is not None:
                images[row] = loaded
        if images:
            with self.meter.busy("copy", self.threads):
                part.blocks.append(self._collect(images))
        return part

    def _load(self, index: int) -> Tensor | np.ndarray | None:
        """A file for the GPU's decoder, pixels [h, w, c], or None for an image that lies in device memory."""
        kept = self.kept(index)
        if kept is not False:
            return None if kept is True else kept  # pyright: ignore[reportReturnType]
        if not isinstance(self.source, EncodedSource):
            return self.source.image(index)
        start_s = time.perf_counter()
        data = self.source.read_buffer(index)
        read_s = time.perf_counter()
        self.meter.add("read", read_s - start_s, self.threads)
        if self.on_gpu and gpu_can_decode(data):
            return torch.frombuffer(data, dtype=torch.uint8)
        pixels = decode_full(data, self.source.describe(index), decoder=self.decoder)
        self.meter.add("decode", time.perf_counter() - read_s, self.threads)
        return pixels

    def _collect(self, images: dict[int, np.ndarray]) -> Block:
        total = sum(image.size for image in images.values())
        block = Block(torch.empty(total, dtype=torch.uint8, pin_memory=self.pin), {})
        flat, offset = block.pixels.numpy(), 0
        for row, image in images.items():
            flat[offset : offset + image.size] = image.reshape(-1)
            block.places[row] = (offset, image.shape[1], image.shape[0])
            offset += image.size
        return block


class ThreadReaders:
    def __init__(self, loader: SampleLoader) -> None:
        self._loader = loader
        self._pool = ThreadPoolExecutor(loader.threads, thread_name_prefix="hyperbatch-data")

    def submit(self, plan: Plan, rows: np.ndarray) -> list[Future[Part]]:
        chunk = min(_MAX_CHUNK, -(-len(rows) // self._loader.threads)) or 1
        chunks = [rows[start : start + chunk].tolist() for start in range(0, len(rows), chunk)]
        return [self._pool.submit(self._loader.part, plan, chunk) for chunk in chunks]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class ProcessReaders:
    """One request a worker and batch. `slots`: as many batches as may lie between a request and its last use."""

    def __init__(self, loader: SampleLoader, workers: int, *, slots: int) -> None:
        self._loader = loader
        self._slots = slots
        self._workers = workers
        self._pools: list[ReaderPool] = []
        self._chunk = 0
        self._batch = 0

    def submit(self, plan: Plan, rows: np.ndarray) -> list[Handle]:
        chunk = -(-plan.real // self._workers)
        if chunk > self._chunk:
            self._open(chunk)
        pool = self._pools[-1]
        slot, handles = self._batch % self._slots, []
        self._batch += 1
        source = self._loader.source
        assert isinstance(source, EncodedSource)
        for worker, part in enumerate(np.array_split(rows, self._workers)):
            if len(part):
                wanted = source.locations(plan.ids[part].tolist())
                assert wanted is not None
                pool.request(
                    worker, slot, self._loader.decoder, self._loader.on_gpu, [Location(*place) for place in wanted]
                )
                handles.append(_Reply(pool, self._loader, worker, plan, part.tolist()))
        return handles

    def _open(self, chunk: int) -> None:
        """Larger slots, for a first or a larger batch. Older ones stay, since batches under way lie in them."""
        self._chunk = chunk
        size = mean_bytes(self._loader.source, files=self._loader.on_gpu)
        slot_bytes = max(1 << 20, int(_ROOM * chunk * size))
        self._pools.append(take_pool(self._workers, self._slots, slot_bytes, pin=self._loader.pin))

    def close(self) -> None:
        for pool in self._pools:
            give_back(pool)
        self._pools.clear()


class _Reply:
    def __init__(self, pool: ReaderPool, loader: SampleLoader, worker: int, plan: Plan, rows: list[int]) -> None:
        self._pool, self._loader, self._worker, self._plan, self._rows = pool, loader, worker, plan, rows

    def result(self) -> Part:
        with self._loader.meter.busy("read"):
            found = dict(zip(self._rows, self._pool.reply(self._worker), strict=True))
        failed = [row for row, got in found.items() if got.kind not in (FILE, PIXELS)]
        part = self._loader.part(self._plan, failed) if failed else Part()
        slab = self._pool.slab
        for row, got in found.items():
            if got.kind == FILE:
                part.files[row] = slab[got.offset : got.offset + got.a]
        pixels = [(row, got) for row, got in found.items() if got.kind == PIXELS]
        if pixels:
            start, last = pixels[0][1].offset, pixels[-1][1]
            places = {row: (got.offset - start, got.a, got.b) for row, got in pixels}
            part.blocks.append(Block(slab[start : last.offset + 3 * last.a * last.b], places))
        return part


def mean_bytes(source: Source, *, files: bool) -> float:
    """Of a sample, guessed from some: its file's, or its pixels'."""
    sizes = []
    for index in np.unique(np.linspace(0, len(source) - 1, _PROBED_SAMPLES).astype(int)).tolist():
        try:
            encoded = files and isinstance(source, EncodedSource)
            sizes.append(len(source.read(index)) if encoded else source.image(index).nbytes)  # pyright: ignore
        except BadSample:
            continue
    return float(np.mean(sizes)) if sizes else 1 << 20
