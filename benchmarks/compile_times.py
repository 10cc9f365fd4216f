"""The kernels that a cold start of a recipe compiles, and the cost of each: for a Hopper, on a machine without any GPU.

    python -m benchmarks.compile_times resnet50 --batch 408 --sizes 224
    python -m benchmarks.compile_times cifar10 --batch 1536 --sizes 24 32

A step of each image size runs on tensors without memory and requests its kernels, as `engine.warmup` does before a run.
Each kernel is then compiled with an empty cache in a separate process, forked as `kernels.workers` forks its own. The
tool reports seconds of CPU time, because other programs on the machine disturb it least. The last lines are the times
of several processes if each kernel goes, in the order of the requests, to the first idle process.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hyperbatch import get_recipe, kernels
from hyperbatch.engine.learner import Learner, build_learner
from hyperbatch.engine.loop import micro_step
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.step import MicroStep, blank_batch
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.kernels import compile as compiler
from hyperbatch.kernels import conv, workers
from hyperbatch.models import fused, fused_network, fused_units, loss  # noqa: F401  (what `play` changes in them)
from hyperbatch.optim import base, fused_kernels, fused_muon, muon

META, HOPPER, PROCESSORS = torch.device("meta"), GPUTarget("cuda", 90, 32), 132


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """Seconds of CPU time to compile one kernel, and its constants."""

    kernel: str
    triton_s: float
    assembler_s: float
    constants: str

    @property
    def all_s(self) -> float:
        return self.triton_s + self.assembler_s


class PlayedHopper:
    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def play() -> None:
    """Makes the library treat tensors without memory as tensors on an H200 from now on."""
    driver.set_active(PlayedHopper())  # pyright: ignore[reportArgumentType]
    for name, module in list(sys.modules.items()):
        if name.startswith("hyperbatch."):
            for fact, value in (("processors", PROCESSORS), ("overlaps", True)):
                if hasattr(module, fact):
                    setattr(module, fact, lambda value=value: value)
    fused.interpreted = kernels.interpreted = lambda: True  # so that tensors need not be on a GPU
    base.why_not_fused = lambda groups: None
    conv.padded = fused_network.convolution.padded = lambda images: getattr(images, "padded", images)
    muon.product_dtype = fused_muon.product_dtype = lambda h, like: h.product_dtype or torch.bfloat16
    make = fused_kernels.FusedKernels.__init__

    def overlapping(self: Any, *args: Any) -> None:
        make(self, *args)
        self._overlap = True

    fused_kernels.FusedKernels.__init__ = overlapping


def asked(recipe: str, batch: int, sizes: Sequence[int]) -> list[tuple[Any, Any]]:
    """Returns (source, options) of each kernel that a step of each size requests, in order."""
    found: list[tuple[Any, Any]] = []

    class Pool(compiler._Pool):
        def submit(self, compile: Any) -> Future[Any]:
            cells = dict(zip(compile.__code__.co_freevars, (cell.cell_contents for cell in compile.__closure__)))
            found.append((cells["src"], cells["options"]))
            future: Future[Any] = Future()
            future.set_exception(NotImplementedError())
            return future

    config = get_recipe(recipe, precision="fp16", fused="on", device="cpu")
    learner: Learner = build_learner(config, Ranks(), META, classes=config.data.classes, in_channels=3)
    compiler._Pool = Pool
    try:
        with compiler.compiling(), compiler.asking():
            for size in sizes:
                images, labels = blank_batch(learner, batch, size)
                part = MicroStep(batch, 2 * batch, first=True, last=False)
                timer = StepTimer(torch.device("cpu"))
                micro_step(learner, part, images, labels, torch.zeros((), device=META), timer)
                learner.optimizer.step_fused()
                learner.sync.forget()
    except NotImplementedError:  # raised when all are known
        pass
    return found


def compiled(source: Any, options: Any) -> Compiled:
    """Compiles a kernel in a separate process."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            before = seconds()
            triton.compile(source, target=HOPPER, options=dict(options.__dict__))
            own, of_children = (after - start for after, start in zip(seconds(), before))
            os.write(writing, json.dumps([own, of_children]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        own, assembler = json.load(pipe)
    os.wait()
    names = source.fn.arg_names
    constants = {".".join([names[place[0]], *map(str, place[1:])]): value for place, value in source.constants.items()}
    text = " ".join(f"{name}={value}" for name, value in constants.items())
    return Compiled(kernel=source.name, triton_s=own, assembler_s=assembler, constants=text)


def seconds() -> tuple[float, float]:
    """CPU time of this process, and of the processes that it has waited for."""
    return tuple(  # type: ignore[return-value]
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def side_by_side(rows: Sequence[Compiled], processes: int) -> float:
    idle_at = [0.0] * processes
    for row in rows:
        heapq.heappush(idle_at, heapq.heappop(idle_at) + row.all_s)
    return max(idle_at)


def lines(rows: Sequence[Compiled]) -> Iterator[str]:
    yield "   CPU s  of it ptxas  kernel and its constants, longest first"
    for row in sorted(rows, key=lambda row: -row.all_s):
        yield f"{row.all_s:8.2f} {row.assembler_s:12.2f}  {row.kernel}  {row.constants}"
    yield f"{sum(row.all_s for row in rows):8.2f} {sum(row.assembler_s for row in rows):12.2f}  {len(rows)} kernels"
    for processes in (1, 4, 12):
        yield f"{side_by_side(rows, processes):8.2f} s by {processes} processes side by side"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--batch", type=int, required=True, help="samples of a micro-step")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="of images")
    args = parser.parse_args()
    play()
    found = asked(args.recipe, args.batch, args.sizes)
    workers.prepare()
    print(f"{args.recipe}, {args.batch} samples, images of {args.sizes} pixels, fp16; Triton {triton.__version__}")
    print(*lines([compiled(*one) for one in found]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
