"""Loads batches to the device ahead of the step that needs them.

    steps -> plans (ids, uniforms, size) ──┬─> host.HostMaker         threads decode and cut, the device normalises
                                           └─> gpu.maker.DeviceMaker  processes read, the GPU decodes and cuts

A plan alone determines a batch's content, and batches are returned in the order of their plans, so threads affect only
the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch

from hyperbatch.config import DataConfig
from hyperbatch.data import augment, stream
from hyperbatch.data.batch import BadSamples, Batch, BatchPlan, StreamPlan
from hyperbatch.data.cache import DeviceCache, cache_of
from hyperbatch.data.decoders import resolve_decoders
from hyperbatch.data.gpu.maker import DeviceMaker
from hyperbatch.data.host import HostMaker
from hyperbatch.data.meter import LoaderReport, Meter
from hyperbatch.data.source import ArraySource, DataError, EncodedSource, Source
from hyperbatch.kernels import has_triton
from hyperbatch.schedule import Step, Stride

_PLAIN_PIXELS = 1 << 24  # pixels in a batch of `plain`: 16,384 images of 32 px, or 334 of 224 px


@dataclass(eq=False)
class TrainLoader:
    """This rank's batches of the sample stream. Use it as a context manager, or call `close`.

    ranks_per_host: the number of ranks that share this host's cores and its memory for cached images.
    """

    source: Source
    config: DataConfig
    _: KW_ONLY
    seed: int
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        self._meter = Meter()
        self._maker = _make_maker(
            self.source, self.config, self.device, self.dtype, self.ranks_per_host, self._meter, exact=False
        )
        if isinstance(self._maker, DeviceMaker):
            sizes = {self.config.image_size, *(phase.image_size for phase in self.config.size_phases)}
            self._maker.warm_up([self._plan(stream.Stretches.single(0, 1), size) for size in sorted(sizes)])
        self._bad: dict[int, str] = {}
        self._running: list[Generator[Batch, None, None]] = []

    def batches(self, steps: Iterable[Step] | Iterable[Stride], *, passed_over: int = 0) -> Iterator[Batch]:
        """Yields one Batch per micro-step of each step, prefetched in order. A stride of several steps gets one Batch.

        passed_over: the number of samples by which the stream is ahead of the steps' positions.
        """
        running = self._batches(steps, passed_over)
        self._running.append(running)
        return running

    def _batches(self, steps: Iterable[Step] | Iterable[Stride], passed_over: int) -> Generator[Batch, None, None]:
        with contextlib.closing(self._maker.run(self._plans(steps, passed_over))) as made:
            while True:
                with self._meter.waiting():
                    item = next(made, None)
                if item is None:
                    return
                batch, bad = item
                self._note(bad)
                yield batch

    def _plans(self, steps: Iterable[Step] | Iterable[Stride], passed_over: int) -> Iterator[StreamPlan]:
        for step in steps:
            stride = (step,) if isinstance(step, Step) else step
            size, phase = augment.size_at(self.config, stride[0].epoch), stride[0].phase
            position = stride[0].position + passed_over
            start = stream.rank_share(position, phase.share_per_rank, self.world_size, self.rank)
            share, parts = phase.share_per_rank, phase.micro_batches
            if len(stride) > 1:
                places = stream.Stretches(start, len(stride) * share, share, phase.global_batch)
                yield self._plan(places, size, step_start=position, micro_batches=parts)
                continue
            for count in parts:
                yield self._plan(stream.Stretches.single(start, count), size, step_start=position)
                start += count

    def rehearse(self, strides: Iterable[Stride]) -> None:
        """Makes the batches of these strides and discards them, because the first batch of a shape takes longer. It has
        an effect only if a GPU makes the batches alone. Call it while no iterator over batches is in use."""
        if isinstance(self._maker, DeviceMaker):
            self._maker.rehearse(list(self._plans(strides, 0)))

    def _plan(self, places: stream.Stretches, size: int, **step: Any) -> StreamPlan:
        return StreamPlan(places=places, length=len(self.source), seed=self.seed, config=self.config, size=size, **step)

    def plain(self, samples: int) -> Iterator[Batch]:
        """Yields the first samples of the training set, in the order of the set and without augmentation: the views of
        evaluation, at the image size at which training starts. Consume it before you request the next batch of
        `batches`."""
        samples = min(samples, len(self.source))
        size, count = plain_shape(self.config, samples)
        plans = (
            BatchPlan(ids=np.arange(i, min(i + count, samples)), epochs=None, uniforms=None, size=size, padding=0)
            for i in range(0, samples, count)
        )
        with contextlib.closing(self._maker.run(plans)) as made:
            for batch, bad in made:
                self._note(bad)
                yield batch

    def _note(self, bad: BadSamples) -> None:
        self._bad.update(bad)
        if len(self._bad) > self.config.max_bad_samples:
            raise DataError(
                f"{len(self._bad)} unreadable training samples on rank {self.rank}, the last {bad[-1][1]}; "
                "repair the data or raise --max-bad-samples"
            )

    def close(self) -> None:
        """Closes all iterators over batches and stops their threads."""
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
        return self._meter.wait_s

    def report(self) -> LoaderReport:
        return self._meter.report()

    @property
    def decoder(self) -> str | None:
        """The decoder of the set's files, or None for a set without files."""
        return self._maker.decoder if isinstance(self.source, EncodedSource) else None

    @property
    def cpu_decode_share(self) -> float:
        """The share of the files that the CPU decodes alongside the GPU."""
        return (self.config.cpu_decode_share or 0.0) if self.decoder == "nvjpeg" else 0.0

    @property
    def bad_samples(self) -> list[str]:
        """One line per sample that could not be read and was replaced."""
        return list(self._bad.values())


def plain_shape(config: DataConfig, samples: int) -> tuple[int, int]:
    """Returns (image side, number of images) of the largest batch that `TrainLoader.plain` makes for this number of
    samples."""
    size = augment.size_at(config, 0.0)
    return size, min(samples, max(1, _PLAIN_PIXELS // size**2))


def eval_batches(
    source: Source,
    config: DataConfig,
    *,
    batch_per_rank: int,
    rank: int,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    ranks_per_host: int = 1,
    bad_samples: list[str] | None = None,
) -> Iterator[Batch]:
    """Yields every sample exactly once over all ranks. Each rank gets the same number of batches, of the same shape.

    An unreadable sample becomes a black image with its own label, so that the number of samples never changes, and it
    adds a line to `bad_samples`.
    """
    maker = _make_maker(source, config, device, dtype, ranks_per_host, Meter(), exact=True)
    plans = _eval_plans(len(source), batch_per_rank, rank, world_size, config.eval_size)
    with contextlib.closing(maker.run(plans)) as made:
        for batch, bad in made:
            if bad_samples is not None:
                bad_samples.extend(line for _, line in bad)
            yield batch


def _eval_plans(samples: int, batch_per_rank: int, rank: int, world_size: int, size: int) -> Iterator[BatchPlan]:
    for start in range(0, samples, batch_per_rank * world_size):
        first = start + rank * batch_per_rank
        ids = np.arange(first, first + batch_per_rank)
        padding = int(np.count_nonzero(ids >= samples))
        yield BatchPlan(ids=np.minimum(ids, samples - 1), epochs=None, uniforms=None, size=size, padding=padding)


def _make_maker(
    source: Source,
    config: DataConfig,
    device: torch.device,
    dtype: torch.dtype,
    ranks_per_host: int,
    meter: Meter,
    *,
    exact: bool,
) -> HostMaker | DeviceMaker:
    """Returns a maker on the device if it can run the fused kernel, and otherwise one on the CPU.

    exact: for evaluation. The CPU decodes, because nvJPEG interpolates colours less well than the CPU's decoders. There
    is no cache, unless the whole set is an array in memory.
    """
    augment.check_options(config, source.channels, whole=isinstance(source, ArraySource))
    decoder = cpu_decoder = "pillow"
    if isinstance(source, EncodedSource):  # other sets need no decoder, and looking for decoders takes seconds
        decoder, cpu_decoder = resolve_decoders(config.decoder, device)
    cache = None
    if not exact or (device.type == "cuda" and isinstance(source, ArraySource)):
        cache = cache_of(source, config, device, ranks_per_host)
    shared: dict[str, Any] = {"device": device, "dtype": dtype, "meter": meter, "ranks_per_host": ranks_per_host}
    if device.type != "cuda" or not has_triton():
        assert not isinstance(cache, DeviceCache)
        return HostMaker(source, config, decoder=cpu_decoder, cache=cache, **shared)
    decoder = cpu_decoder if exact else decoder
    return DeviceMaker(source, config, decoder=decoder, cpu_decoder=cpu_decoder, cache=cache, **shared)
