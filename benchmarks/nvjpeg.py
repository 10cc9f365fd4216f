"""JPEGs per second that the GPU decodes, alone and during a step: with torchvision, and with the loader's own calls.

    python -m benchmarks.nvjpeg OUT.json

A batch of 400 files in pinned memory is decoded repeatedly for a second: by one to three callers of nvJPEG at a time,
with and without a pool for its buffers. The step is a CUDA graph of large products that keeps the GPU busy; `load` is
its time during decoding divided by its time alone. First, every candidate's pixels are compared with torchvision's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hyperbatch.bench import harness
from hyperbatch.bench.data import write_jpegs
from hyperbatch.data.decode import gpu_frame
from hyperbatch.data.gpu import nvjpeg
from hyperbatch.data.gpu.hardware import HardwareDecoder, load_api
from hyperbatch.data.gpu.jpegs import JpegFiles
from hyperbatch.stopwatch import device_s

BATCH = 400
SIZES = ((500, 375), (341, 256))
SECONDS = 1.0
DEVICE = torch.device("cuda:0")


def main(out: str) -> None:
    step = busy_step()
    step_s = device_s(step, device=DEVICE, calls=20)
    rows = []
    for width, height in SIZES:
        files = generated(width, height)
        for name, decode in candidates(files):
            row = {"name": name, "size": f"{width}x{height}", **measured(decode, step, step_s)}
            harness.say(str(row))
            rows.append(row)
    Path(out).write_text(json.dumps(harness.result("nvjpeg", rows), indent=1) + "\n", encoding="utf-8")


def busy_step() -> Callable[[], None]:
    a, b = (torch.randn(4096, 4096, device=DEVICE, dtype=torch.half) for _ in range(2))
    c = torch.mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            torch.mm(a, b, out=c)
            c.relu_()
    return lambda _kept=(a, b, c): graph.replay()  # the graph refers to its tensors only by their addresses


def generated(width: int, height: int) -> JpegFiles:
    with tempfile.TemporaryDirectory() as folder:
        write_jpegs(Path(folder) / "set", BATCH, width, height)
        contents = [path.read_bytes() for path in sorted((Path(folder) / "set" / "train").rglob("*.jpg"))]
    files = {}
    for row, data in enumerate(contents):
        frame = gpu_frame(data)
        assert frame is not None
        files[row] = bytearray(data), frame
    return JpegFiles.collect(files, pin=True)


def candidates(files: JpegFiles) -> Iterator[tuple[str, Callable[[], object]]]:
    contents = files.contents()
    expected = nvjpeg.decode_batch(contents, DEVICE)
    torch.cuda.synchronize()
    yield "torchvision", lambda: nvjpeg.decode_batch(contents, DEVICE)
    api = load_api()
    if api is None:
        return
    for callers in (1, 2, 3):
        for pool in (True, False):
            # `allocate` makes the library take its buffers from a pool.
            used: Any = api if pool else SimpleNamespace(**{**vars(api), "allocate": lambda *_: 0})
            decoder = HardwareDecoder(used, DEVICE, callers=callers)
            decoded = nvjpeg.decode_with(decoder, files, DEVICE)
            torch.cuda.synchronize()
            assert all(torch.equal(decoded.pixels(i), pixels) for i, pixels in enumerate(expected))
            name = f"{callers} caller{'s' * (callers > 1)}, {'pool' if pool else 'no pool'}"
            yield name, lambda decoder=decoder: nvjpeg.decode_with(decoder, files, DEVICE)


def measured(decode: Callable[[], object], step: Callable[[], None], step_s: float) -> dict[str, float]:
    """Returns images per second alone and during the step, and the factor by which the step gets longer."""
    rate(decode, SECONDS / 4)
    alone = rate(decode, SECONDS)
    beside: list[float] = []
    thread = threading.Thread(target=lambda: beside.append(rate(decode, 1.5 * SECONDS)))
    thread.start()
    time.sleep(SECONDS / 4)
    loaded_s = device_s(step, device=DEVICE, calls=max(1, int(SECONDS / step_s)))
    thread.join()
    return {"alone_images_per_s": alone, "beside_images_per_s": beside[0], "load": loaded_s / step_s}


def rate(decode: Callable[[], object], seconds: float) -> float:
    count, start = 0, time.perf_counter()
    with torch.cuda.stream(torch.cuda.Stream(DEVICE, priority=-1)):
        while (elapsed := time.perf_counter() - start) < seconds:
            decode()
            torch.cuda.current_stream().synchronize()
            count += BATCH
    return count / elapsed


if __name__ == "__main__":
    main(*sys.argv[1:])
