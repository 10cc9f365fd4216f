"""Measures where the time of a batch goes on its way to the GPU: the instruments of `benchmarks.loader_times`.

    step's thread      requests | waits for the batch | launches the step, writes the journal ...
    device thread      waits for readers | uploads | decodes | waits until the last batch is cut | cuts | idle
    GPU                copy (uploads), decode (nvJPEG's stream), cut (views' stream): events on these streams

While a `Watch` is entered, methods of one loader are wrapped; nothing else of the loader changes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperbatch.data.gpu import nvjpeg
from hyperbatch.data.gpu.drafts import Decode
from hyperbatch.data.gpu.jpegs import Decoded, JpegFiles
from hyperbatch.data.gpu.maker import DeviceMaker
from hyperbatch.stopwatch import Mark, mark, seconds_between

_MISSING = object()
_CPU_EVERY = 8  # spans of requests between two readings; a batch has two spans


class Watch:
    """Enter it before the loader's first batch, and call `report` when the device has finished."""

    def __init__(self, maker: DeviceMaker) -> None:
        self._maker, self._device = maker, maker.device
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._pairs: dict[str, list[tuple[float, Mark, Mark]]] = defaultdict(list)
        self._cpu: list[tuple[float, float, float]] = []  # (time, CPU seconds of this process, of readers)
        self._wrapped: list[tuple[object, str, object]] = []

    def __enter__(self) -> Watch:
        maker, drafter = self._maker, self._maker._drafter
        self._replace(maker, "run", self._run(maker.run))
        self._replace(maker, "_readers", self._readers(maker._readers))
        self._time(maker, "_make", "make")
        self._time(maker, "_let_go", "let go")
        self._time(maker, "_render", "render", on_device="cut")
        self._time(maker, "_hand_over", "hand over")
        self._time(drafter, "unread", "request")
        self._time(drafter, "make", "draft")
        self._time(drafter, "_upload", "upload", on_device="copy")
        self._time(drafter, "_decode_files", "decode")
        hardware = nvjpeg.hardware_decoder(self._device)
        if hardware is not None:
            self._time(hardware, "takes", "takes")
            for caller in hardware._callers:
                self._time(caller, "decode", "nvjpeg", on_device="decode", stream=caller._stream)
            self._time(hardware._api, "start", "nvjpeg start")
            self._time(hardware._api, "decode", "nvjpeg call")
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, before in reversed(self._wrapped):
            if before is _MISSING:
                vars(owner).pop(name)
            else:
                object.__setattr__(owner, name, before)
        self._wrapped.clear()

    def report(self) -> dict[str, Any]:
        """Returns milliseconds per batch, without the first fifth of them. On a GPU the device must have finished."""
        taken = [start for start, _ in self._spans["hand over"]]
        first = len(taken) // 5
        since_s, until_s, batches = taken[first], taken[-1], len(taken) - 1 - first

        def host(stage: str) -> float:
            spans = self._spans.get(stage, [])
            return 1e3 * sum(end - start for start, end in spans if since_s <= start < until_s) / batches

        def device(stage: str) -> float:
            pairs = self._pairs.get(stage, [])
            return 1e3 * sum(seconds_between(a, b) for at_s, a, b in pairs if since_s <= at_s < until_s) / batches

        period = 1e3 * (until_s - since_s) / batches
        made = [end for _, end in self._spans["make"]]
        return {
            "batches": batches,
            "period_ms": period,
            "step_thread_ms": {
                "requests": host("request"),
                "waits for the batch": host("next") - host("request"),
                "everything else": period - host("next"),
            },
            "device_thread_ms": {
                "waits for readers": host("read"),
                "uploads": host("upload"),
                "decodes": host("decode"),
                "tables of the images": host("draft") - host("read") - host("upload") - host("decode"),
                "waits until the last batch is cut": host("let go"),
                "cuts": host("render"),
                "idle": period - host("make"),
            },
            "of_decodes_ms": {
                "asks which files the units take": host("takes"),
                "nvjpegDecodeBatchedInitialize": host("nvjpeg start"),
                "nvjpegDecodeBatched": host("nvjpeg call"),
                "waits for nvJPEG's stream": host("nvjpeg") - host("nvjpeg start") - host("nvjpeg call"),
                "everything else": host("decode") - host("takes") - host("nvjpeg"),
            },
            "busy_cores": self._busy_cores(since_s, until_s),
            "gpu_ms": {stage: device(stage) for stage in ("copy", "decode", "cut")},
            "batch_waits_for_step_ms": 1e3
            * statistics.mean(asked - end for asked, end in zip(taken[first:], made[first:], strict=False)),
        }

    def _busy_cores(self, since_s: float, until_s: float) -> dict[str, float]:
        """The number of cores that this process and the readers keep busy."""
        seen = [sample for sample in self._cpu if since_s <= sample[0] < until_s]
        if len(seen) < 2:
            return {}
        seconds, own, readers = (last - first for first, last in zip(seen[0], seen[-1], strict=True))
        return {"this process": own / seconds, "readers": readers / seconds}

    def _replace(self, owner: object, name: str, new: object) -> None:
        self._wrapped.append((owner, name, vars(owner).get(name, _MISSING)))
        object.__setattr__(owner, name, new)  # works for a frozen dataclass too

    def _time(
        self,
        owner: object,
        name: str,
        stage: str,
        *,
        on_device: str | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """on_device: the name of its GPU stage. stream: the stream on which it runs, if that is not the current one."""
        call = getattr(owner, name)

        def moment() -> Mark:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                return mark(self._device)

        def timed(*values: Any) -> Any:
            start_s = time.perf_counter()
            begun = moment() if on_device else None
            try:
                return call(*values)
            finally:
                if on_device and begun is not None:
                    self._pairs[on_device].append((start_s, begun, moment()))
                self._spans[stage].append((start_s, time.perf_counter()))

        self._replace(owner, name, timed)

    def _run(self, run: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def watched(plans: Any) -> Iterator[Any]:
            with contextlib.closing(run(plans)) as made:
                while True:
                    start_s = time.perf_counter()
                    item = next(made, None)
                    self._spans["next"].append((start_s, time.perf_counter()))
                    if item is None:
                        return
                    yield item

        return watched

    def _readers(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def timed(promise: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                start_s = time.perf_counter()
                try:
                    return promise()
                finally:
                    self._spans["read"].append((start_s, time.perf_counter()))

            return call

        def watched() -> Any:
            readers = make()
            submit, pools = readers.submit, getattr(readers, "_pools", [])

            def submitted(*values: Any) -> list[Any]:
                start_s = time.perf_counter()
                promises = [timed(promise) for promise in submit(*values)]
                self._spans["request"].append((start_s, time.perf_counter()))
                if len(self._spans["request"]) % _CPU_EVERY == 0:
                    readers_s = sum(cpu_s(process.pid) for pool in pools for process in pool._processes)
                    self._cpu.append((time.perf_counter(), time.process_time(), readers_s))
                return promises

            readers.submit = submitted
            return readers

        return watched


def cpu_s(process: int) -> float:
    """Seconds of CPU time that a process of this machine has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class InParts:
    """A decoder that decodes a batch a few files at a time and records the time of each part.

    A decoder that is slow while a step runs takes equally long for each part. One that waits for the step's end takes
    long for the first part.
    """

    def __init__(self, decode: Decode, files_per_part: int) -> None:
        self._decode, self._files_per_part = decode, files_per_part
        self.batches_s: list[list[float]] = []

    def __call__(self, files: JpegFiles, device: torch.device) -> Decoded:
        parts, seconds = [], []
        for first in range(0, len(files), self._files_per_part):
            start_s = time.perf_counter()
            parts.append(self._decode(files.take(slice(first, first + self._files_per_part)), device))
            seconds.append(time.perf_counter() - start_s)
        self.batches_s.append(seconds)
        return Decoded(
            np.concatenate([part.images for part in parts]), [piece for part in parts for piece in part.memory]
        )

    def median_ms(self) -> list[float]:
        """Medians of the first part, the second, and so on, without the first fifth of the batches."""
        steady = self.batches_s[len(self.batches_s) // 5 :]
        longest = max(map(len, steady), default=0)
        return [1e3 * statistics.median(row[i] for row in steady if len(row) > i) for i in range(longest)]
