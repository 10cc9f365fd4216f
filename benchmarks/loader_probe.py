"""Which work can be queued behind a step in its stream without delaying nvJPEG: a part of `benchmarks.loader_times`.

    step's stream     load ......................... | what is queued behind it
    nvJPEG's stream   files of a batch: copy, decoding and kernel for each

While a step runs, the host queues the learning rates of the next step and fetches the losses of this one. If nvJPEG's
copies had to wait behind such a copy, decoding a batch would take as long as the rest of the step, whatever the files.
Streams share a limited number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), so several streams are tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.nvjpeg import busy_step
from hyperbatch.data.decode import gpu_frame
from hyperbatch.data.gpu import nvjpeg
from hyperbatch.data.gpu.jpegs import JpegFiles
from hyperbatch.data.source import EncodedSource
from hyperbatch.stopwatch import mark, seconds_between, wait, wall_s

LOADS = 3  # replays of the busy step: 50 ms on an H200, where decoding 400 files takes 30 ms at the same time
STREAMS = {"high": 6, "normal": 3}  # tried in addition to the decoder's own
TRIES = 2


def queued_behind(device: torch.device) -> dict[str, Callable[[], object]]:
    """The kinds of work that may be queued, by name."""
    there, other = (torch.zeros(16, device=device) for _ in range(2))
    here = torch.zeros(16, pin_memory=device.type == "cuda")
    alone: dict[str, Callable[[], object]] = {
        "an event": lambda: mark(device),
        "a kernel": lambda: there.add_(1),
        "a copy to the device": lambda: there.copy_(here, non_blocking=True),
        "a copy from the device": lambda: here.copy_(there, non_blocking=True),
        "a copy on the device": lambda: other.copy_(there),
    }
    return {"nothing": lambda: None, **alone, "all of these": lambda: [queue() for queue in alone.values()]}


def decoded_beside(
    decode: Callable[[], object], load: Callable[[], object], queued: Callable[[], object], device: torch.device
) -> tuple[float, float]:
    """Returns (seconds of decoding, seconds of the load) if both start together."""
    wait(device)
    start = mark(device)
    load()
    end = mark(device)
    queued()
    decode_s = wall_without_waiting(decode)
    wait(device)
    return decode_s, seconds_between(start, end)


def wall_without_waiting(run: Callable[[], object]) -> float:
    """Times a call that returns when its own work is done, while the device is busy with other work."""
    return wall_s(run, device=torch.device("cpu"))


def files_of(source: EncodedSource, count: int) -> JpegFiles:
    files = {}
    for row in range(min(count, len(source))):
        data = source.read_buffer(row)
        frame = gpu_frame(data)
        assert frame is not None
        files[row] = data, frame
    return JpegFiles.collect(files, pin=torch.cuda.is_available())


def probe(source: EncodedSource, count: int, device: torch.device) -> dict[str, Any]:
    """Runs the probe on a GPU with decoding units. Without them there is nothing to measure."""
    hardware = nvjpeg.hardware_decoder(device)
    if hardware is None:
        return {"left_out": "no decoding units"}
    files, replay = files_of(source, count), busy_step()

    def decode() -> object:
        return hardware.decode(files)

    def load() -> None:
        for _ in range(LOADS):
            replay()

    caller = hardware._callers[0]
    own = caller._stream
    streams = [own, *(torch.cuda.Stream(device, priority=-1) for _ in range(STREAMS["high"]))]
    streams += [torch.cuda.Stream(device) for _ in range(STREAMS["normal"])]
    for _ in range(3):
        decode()
    alone_s = min(wall_s(decode, device=device) for _ in range(3))
    decoded_beside(decode, load, lambda: None, device)
    rows = []
    try:
        for name, queued in queued_behind(device).items():
            queued()  # loads whatever the first call loads
            found = []
            for stream in streams:
                caller._stream = stream
                found.append([decoded_beside(decode, load, queued, device) for _ in range(TRIES)])
            rows.append(row_of(name, found))
    finally:
        caller._stream = own
    return {"files": len(files), "alone_ms": 1e3 * alone_s, "rows": rows}


def row_of(name: str, found: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """Returns the row of one kind of queued work.

    found: for each stream, (seconds of decoding, seconds of the load) of each try. A stream counts as held up if
    decoding never ended before the load.
    """
    return {
        "queued": name,
        "decode_ms": [1e3 * min(decode_s for decode_s, _ in tries) for tries in found],
        "load_ms": 1e3 * statistics.median(load_s for tries in found for _, load_s in tries),
        "held_up": sum(all(decode_s >= load_s for decode_s, load_s in tries) for tries in found),
        "streams": len(found),
    }
