"""Batches on the device, ahead of the step that needs them.

    steps -> plans (ids, uniforms, size) -> host bytes, filled by threads -> device, normalised, channels_last

A plan alone decides a batch's content, and batches leave in the order of their plans, so threads change nothing but
the time it takes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data import augment, stream
from hyperbatch.data.decode import choose_decoder, decode_view, render_array
from hyperbatch.data.source import ArraySource, BadSample, DataError, EncodedSource, Source
from hyperbatch.schedule import Step

_AHEAD_BATCHES = 3  # being filled while one is consumed
_MAX_CHUNK = 16  # samples a thread takes at a time: small enough to share a batch, large enough to be worth a task
_MAX_REPLACEMENTS = 100  # bad samples in a row before the set is given up


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-step: images [n, c, h, w] channels_last, normalised; labels [n]; mask [n] false on padding, or None."""

    images: Tensor
    labels: Tensor
    mask: Tensor | None = None


Bad = list[tuple[int, str]]  # unreadable samples: id, and a line that says where and why
Made = Generator[tuple[Batch, Bad], None, None]


class TrainLoader:
    """This rank's batches of the sample stream. Use as a context manager, or call `close`."""

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._source = source
        self._config = config
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._maker = _BatchMaker(source, config, device=device, dtype=dtype)
        self._bad: dict[int, str] = {}
        self._wait_s = 0.0
        self._running: list[Generator[Batch, None, None]] = []

    def batches(self, steps: Iterable[Step]) -> Iterator[Batch]:
        """One Batch per micro-step of each step, prefetched in order."""
        running = self._batches(steps)
        self._running.append(running)
        return running

    def _batches(self, steps: Iterable[Step]) -> Generator[Batch, None, None]:
        made = self._maker.run(self._plans(steps))
        try:
            while True:
                start_s = time.perf_counter()
                item = next(made, None)
                self._wait_s += time.perf_counter() - start_s
                if item is None:
                    return
                batch, bad = item
                self._note(bad)
                yield batch
        finally:
            made.close()

    def _plans(self, steps: Iterable[Step]) -> Iterator[_Plan]:
        columns = augment.uniforms_needed(self._config)
        for step in steps:
            phase = step.phase
            size = augment.size_at(self._config, step.epoch)
            for micro_step in range(phase.accumulation):
                start = stream.rank_share(
                    step.position, phase.batch_per_rank, phase.accumulation, self._world_size, self._rank, micro_step
                )
                epochs, ids = stream.stretch(start, phase.batch_per_rank, len(self._source), self._seed)
                uniforms = stream.uniforms(self._seed, epochs, ids, columns)
                yield _Plan(ids=ids, epochs=epochs, uniforms=uniforms, size=size, padding=0)

    def _note(self, bad: Bad) -> None:
        self._bad.update(bad)
        if len(self._bad) > self._config.max_bad_samples:
            raise DataError(
                f"{len(self._bad)} unreadable training samples on rank {self._rank}, the last {bad[-1][1]}; "
                "repair the data or raise --max-bad-samples"
            )

    def close(self) -> None:
        """Ends every iterator over batches and its threads."""
        for running in self._running:
            running.close()
        self._running.clear()

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def wait_s(self) -> float:
        """Seconds the consumer has spent waiting for a batch so far."""
        return self._wait_s

    @property
    def bad_samples(self) -> list[str]:
        """One line per sample that could not be read and was replaced."""
        return list(self._bad.values())


def eval_batches(
    source: Source,
    config: DataConfig,
    *,
    batch_per_rank: int,
    rank: int,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    bad_samples: list[str] | None = None,
) -> Iterator[Batch]:
    """Every sample exactly once over all ranks; the same number of equally shaped batches on each.

    An unreadable sample is shown as a black image under its own label, so the count of samples never changes, and
    adds a line to `bad_samples`.
    """
    maker = _BatchMaker(source, config, device=device, dtype=dtype)
    made = maker.run(_eval_plans(len(source), batch_per_rank, rank, world_size, config.eval_size))
    try:
        for batch, bad in made:
            if bad_samples is not None:
                bad_samples.extend(line for _, line in bad)
            yield batch
    finally:
        made.close()


def _eval_plans(samples: int, batch_per_rank: int, rank: int, world_size: int, size: int) -> Iterator[_Plan]:
    for start in range(0, samples, batch_per_rank * world_size):
        first = start + rank * batch_per_rank
        ids = np.arange(first, first + batch_per_rank)
        padding = int(np.count_nonzero(ids >= samples))
        yield _Plan(ids=np.minimum(ids, samples - 1), epochs=None, uniforms=None, size=size, padding=padding)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """All that decides a batch. The last `padding` ids only fill the shape. No uniforms: evaluation."""

    ids: np.ndarray
    epochs: np.ndarray | None
    uniforms: np.ndarray | None
    size: int
    padding: int


class _BatchMaker:
    """Fills host batches from plans, on threads where that pays, and finishes them on the device."""

    def __init__(self, source: Source, config: DataConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        augment.check_options(config, source.channels)
        self.source = source
        self.config = config
        self.device = device
        self.dtype = dtype
        self.decoder = choose_decoder(config.decoder)
        # Pixels / 255, minus mean, over std, as one multiply and one add; 16-bit results are computed in 32.
        self._math_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        std = torch.tensor(source.std, dtype=torch.float64)
        mean = torch.tensor(source.mean, dtype=torch.float64)
        self._std = std
        self._scale = (1 / (255 * std)).to(device, self._math_dtype)
        self._offset = (-mean / std).to(device, self._math_dtype)

    def run(self, plans: Iterator[_Plan]) -> Made:
        """(batch, its unreadable samples as (id, line)) for each plan, in order."""
        # Gathering from small arrays is quicker than handing the work to a thread, unless a GPU waits meanwhile.
        if isinstance(self.source, ArraySource) and self.device.type == "cpu":
            return self._inline(plans)
        return self._threaded(plans)

    def _inline(self, plans: Iterator[_Plan]) -> Made:
        for plan in plans:
            pixels, labels = self._host_buffers(plan)
            bad = self._fill(plan, pixels, labels, 0, len(plan.ids))
            yield self._finish(plan, pixels, labels), bad

    def _threaded(self, plans: Iterator[_Plan]) -> Made:
        threads = self.config.data_threads or _default_threads()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="hyperbatch-data")
        ahead: deque[tuple[_Plan, Tensor, Tensor, list[Future[Bad]]]] = deque()
        try:
            more = True
            while more or ahead:
                while more and len(ahead) <= _AHEAD_BATCHES:  # the first of them is about to leave
                    plan = next(plans, None)
                    more = plan is not None
                    if plan is not None:
                        pixels, labels = self._host_buffers(plan)
                        chunk = self._chunk(plan, threads)
                        starts = range(0, len(plan.ids), chunk)
                        parts = [pool.submit(self._fill, plan, pixels, labels, i, i + chunk) for i in starts]
                        ahead.append((plan, pixels, labels, parts))
                if ahead:
                    plan, pixels, labels, parts = ahead.popleft()
                    bad = [line for part in parts for line in part.result()]
                    yield self._finish(plan, pixels, labels), bad
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _chunk(self, plan: _Plan, threads: int) -> int:
        """Samples per task: a vectorised batch is one task, else the batch is spread over the threads."""
        if self._is_vectorised(plan):
            return len(plan.ids)
        return min(_MAX_CHUNK, -(-len(plan.ids) // threads))

    def _host_buffers(self, plan: _Plan) -> tuple[Tensor, Tensor]:
        # Pinned so that the copy runs beside the step; torch's host allocator reuses a block once its copy is done.
        pin = self.device.type == "cuda"
        shape = (len(plan.ids), plan.size, plan.size, self.source.channels)
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
        return pixels, torch.empty(len(plan.ids), dtype=torch.int64, pin_memory=pin)

    def _is_vectorised(self, plan: _Plan) -> bool:
        source = self.source
        return (
            isinstance(source, ArraySource)
            and source.images.shape[1:3] == (plan.size, plan.size)
            and (plan.uniforms is None or self.config.augment in ("none", "shift"))
        )

    def _fill(self, plan: _Plan, pixels: Tensor, labels: Tensor, start: int, stop: int) -> Bad:
        """Writes samples [start, stop) of the batch; returns those that could not be read."""
        if self._is_vectorised(plan):
            assert isinstance(self.source, ArraySource)
            labels.numpy()[:] = self.source.labels[plan.ids]
            write_array_views(pixels.numpy(), self.source.gather(plan.ids), self.config, plan.uniforms)
            return []
        out, out_labels, bad = pixels.numpy(), labels.numpy(), []
        real = len(plan.ids) - plan.padding
        out[real:], out_labels[real:] = 0, 0
        for i in range(start, min(stop, real)):
            index = int(plan.ids[i])
            for _ in range(_MAX_REPLACEMENTS):
                out_labels[i] = self.source.labels[index]
                try:
                    out[i] = self._view(plan, i, index)
                    break
                except BadSample as error:
                    bad.append((index, str(error)))
                    out[i] = 0
                    if plan.uniforms is None:  # evaluation: the sample counts, as a black image
                        break
                    index = (index + 1) % len(self.source)
            else:
                raise DataError(
                    f"{_MAX_REPLACEMENTS} unreadable samples in a row, the last {bad[-1][1]}; repair the data"
                )
        return bad

    def _view(self, plan: _Plan, row: int, index: int) -> np.ndarray:
        """uint8[size, size, c] of sample `index` (the plan's, or what replaces it) with the row's randomness."""
        source, config = self.source, self.config

        def view_of(width: int, height: int) -> augment.View:
            whole = isinstance(source, ArraySource)
            if plan.uniforms is None or plan.epochs is None:
                return augment.eval_view(config, width, height, whole=whole)
            epoch = int(plan.epochs[row])
            return augment.train_view(config, width, height, epoch, plan.uniforms[row].tolist(), whole=whole)

        if isinstance(source, EncodedSource):
            exact = plan.uniforms is None
            where = source.describe(index)
            return decode_view(source.read(index), where, view_of, plan.size, decoder=self.decoder, exact=exact)
        pixels = source.image(index)
        return render_array(pixels, view_of(pixels.shape[1], pixels.shape[0]), plan.size)

    def _finish(self, plan: _Plan, pixels: Tensor, labels: Tensor) -> Batch:
        """Copies to the device and normalises there: bytes travel, not floats."""
        n, height, width, channels = pixels.shape
        # As rows of width x channels: an inner loop over 3 channels alone would not be vectorised.
        rows = pixels.to(self.device, non_blocking=True).view(n * height, width * channels).to(self._math_dtype)
        rows.mul_(self._scale.repeat(width)).add_(self._offset.repeat(width))
        images = rows.view(n, height, width, channels).permute(0, 3, 1, 2)
        if plan.uniforms is not None and self.config.color_noise:
            noise = (torch.from_numpy(augment.color_noise(self.config, plan.uniforms)) / self._std).to(self._math_dtype)
            if self.device.type == "cuda":
                noise = noise.pin_memory()  # a copy from pageable memory would hold up the host
            images += noise.to(self.device, non_blocking=True)[:, :, None, None]
        mask = None
        if plan.uniforms is None:
            mask = torch.ones(len(plan.ids), dtype=torch.bool, device=self.device)
            mask[len(plan.ids) - plan.padding :] = False
        return Batch(images.to(self.dtype), labels.to(self.device, non_blocking=True), mask)


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


def _default_threads() -> int:
    """The cores this process may use, shared with the other ranks of the host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
