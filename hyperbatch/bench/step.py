"""`hyperbatch bench step`: our training step against torch's, all candidates alive in one process and timed in turns.

for each batch:  build every candidate (first step, memory) -> interleaved rounds -> one profiled step each
--data DIR:      instead a run through the engine, JPEG files to updated weights (bench/step_data.py)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hyperbatch.bench import harness, step_data
from hyperbatch.bench.harness import Candidate
from hyperbatch.bench.step_device import (
    Clocks,
    MemoryPeak,
    copy_bytes_per_s,
    empty_caches,
    release_memory,
    warm_libraries,
)
from hyperbatch.bench.step_kernels import by_family, our_kernels, profiled
from hyperbatch.bench.step_report import format_step
from hyperbatch.bench.step_runs import (
    MAX_AUTOTUNE,
    PEERS,
    Built,
    Spec,
    Task,
    make_task,
    our_specs,
    ours,
    peer_specs,
    torchvision_model,
)
from hyperbatch.bench.traffic import RUNGS, image_bytes, step_bytes
from hyperbatch.errors import InputError, nearest
from hyperbatch.models.build import model_names

SMALL_MODELS = ("resnet8", "resnet20", "resnet20x4", "resnet32", "resnet44", "resnet56")
GPU_BATCHES = (16, 42, 256, 400)  # NVIDIA's at 4,216 GPUs, Fujitsu's at 2,048, the usual one, NVIDIA's at 8
CPU_BATCHES = (32,)
SAMPLE_S = 0.1  # a sample is at least this long, in as many steps as that takes
MOST_CALLS = 30
CPU_NOTE = "measured on a CPU: small model, fp32, no CUDA graph; absolute times mean something on a GPU only"

format_result = format_step  # what the command line prints


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A built candidate and what building it took."""

    spec: Spec
    built: Built
    first_step_s: float
    peak_memory_bytes: int | None


def bench_step(
    model: str | None = None,
    *,
    batch: Sequence[int] | None = None,
    peers: Sequence[str] | None = None,
    max_autotune: bool = False,
    rounds: int | None = None,
    image_size: int | None = None,
    data: str | None = None,
    steps: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Rows of images a second for each batch, on synthetic data; with `data` the engine's, files included.

    On a GPU: ResNet-50, fp16, batches 16, 42, 256 and 400. On a CPU: ResNet-20, fp32, against torch eager alone.
    peers: of eager, graph, masters, compile. data: a folder, or "generated" for JPEGs like ImageNet's.
    """
    target = torch.device("cuda:0" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    gpu = target.type == "cuda"
    model = model or ("resnet50" if gpu else "resnet20")
    if model not in model_names():
        raise InputError(f"bench step: unknown model {model!r}{nearest(model, model_names())}")
    small = model in SMALL_MODELS
    setting = {
        "precision": "fp16" if gpu else "fp32",
        "image_size": image_size or (32 if small else 224),
        "classes": 10 if small else 1000,
    }
    batches = tuple(batch or (GPU_BATCHES if gpu else CPU_BATCHES))
    notes = [] if gpu else [CPU_NOTE]
    if data is not None:
        table = step_data.end_to_end(data, model=model, batches=batches, steps=steps, device=target.type, **setting)
        return harness.result("step", table, model=model, **setting, notes=notes)
    if steps is not None:
        raise InputError("--steps belongs to `bench step --data`; give --rounds here")
    names = check_peers(peers, gpu=gpu) + ([MAX_AUTOTUNE] if max_autotune and gpu else [])
    rounds = rounds or (10 if gpu else 3)

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        warm_libraries(target)
        bandwidth = copy_bytes_per_s(target) if gpu else None
        table, clocks = [], {}
        with empty_caches():
            for size in batches:
                specs = our_specs(model, setting["precision"], target) + peer_specs(names)
                table += timed(model, size, specs, setting, target, rounds, clocks, cold=size == batches[0])
            if gpu:
                table += precisions(model, max(batches), setting, target, rounds, clocks)
    finally:
        torch.backends.cudnn.benchmark = before
    for row in table:
        row["copy_share"] = row["model_bytes_per_s"] / bandwidth if bandwidth and row["model_bytes_per_s"] else None
    return harness.result(
        "step",
        table,
        model=model,
        **setting,
        peer_network="torchvision" if torchvision_model(model) else "hyperbatch",
        copy_bytes_per_s=bandwidth,
        traffic=traffic(model, setting, bandwidth) if gpu else [],
        clocks=clocks,
        notes=notes,
    )


def check_peers(peers: Sequence[str] | None, *, gpu: bool) -> list[str]:
    """Those asked for, or all that run here."""
    if peers is None:
        return list(PEERS) if gpu else ["eager"]
    for name in peers:
        if name not in PEERS:
            raise InputError(f"--peers: unknown peer {name!r}; of {', '.join(PEERS)}")
        if name != "eager" and not gpu:
            raise InputError(f"--peers: {name} needs a GPU; on a CPU only eager runs")
    return list(dict.fromkeys(peers))


def timed(
    model: str,
    batch: int,
    specs: list[Spec],
    setting: dict[str, Any],
    device: torch.device,
    rounds: int,
    clocks: dict[str, Any],
    *,
    cold: bool,
) -> list[dict[str, Any]]:
    """The rows of one batch; adds the clocks of its rounds to `clocks`."""
    task = make_task(model, batch, device=device, **setting)
    ready = [set_up(spec, task) for spec in specs]
    rows = measured(ready, model, batch, setting, device, rounds, clocks, f"batch {batch}")
    for row in rows:
        # A kernel once compiled stays in this process, so only the first batch meets truly empty caches.
        row["first_step_caches"] = "empty" if cold else "filled by the batches before"
    del ready
    if any(spec.name.startswith("torch.compile") for spec in specs):  # loading it takes seconds
        torch.compiler.reset()  # it keeps the graphs, and their memory, of models that are gone
    release_memory(device)
    return rows


def precisions(
    model: str, batch: int, setting: dict[str, Any], device: torch.device, rounds: int, clocks: dict[str, Any]
) -> list[dict[str, Any]]:
    """fp16 against fp32 (convolutions in TF32, as torch does by default) on the plain model, one row each."""
    ready = []
    for precision in ("fp16", "fp32"):
        task = make_task(model, batch, device=device, **{**setting, "precision": precision})
        rung = "unfused" if precision == "fp16" else None
        spec = Spec(name=f"reference path, {precision}", build=partial(ours, fused=False), rung=rung)
        ready.append(set_up(spec, task))
    rows = measured(ready, model, batch, setting, device, rounds, clocks, f"batch {batch}, precisions")
    for row in rows:
        row["ratio_to_fp32"] = row["median"] / rows[1]["median"]
    del ready
    release_memory(device)
    return rows


def set_up(spec: Spec, task: Task) -> Ready:
    """Builds a candidate up to its first finished step."""
    torch.manual_seed(0)
    memory = MemoryPeak(task.device)
    start = time.perf_counter()
    built = spec.build(task)
    built.run()
    if task.device.type == "cuda":
        torch.cuda.synchronize()  # a first step counts when it has finished
    first_step_s = time.perf_counter() - start
    for _ in range(2):  # torch.compile records its graphs in these
        built.run()
    peak = memory.read()
    release_memory(task.device)
    return Ready(spec=spec, built=built, first_step_s=first_step_s, peak_memory_bytes=peak)


def measured(
    ready: list[Ready],
    model: str,
    batch: int,
    setting: dict[str, Any],
    device: torch.device,
    rounds: int,
    clocks: dict[str, Any],
    title: str,
) -> list[dict[str, Any]]:
    """Interleaved rounds over candidates that are all alive, then one profiled step of each."""
    candidates = [Candidate(name=f"{title} / {r.spec.name}", run=r.built.run, peer=r.spec.peer) for r in ready]
    fastest_s = min(harness.device_s(candidate.run) for candidate in candidates)
    measure = partial(harness.device_s, calls=min(MOST_CALLS, math.ceil(SAMPLE_S / fastest_s)))
    watch, scales = Clocks(device), [r.built.loss_scale() for r in ready]
    samples = harness.interleave(candidates, measure, rounds=rounds, warmup=1, before_round=watch.ask)
    if summary := watch.summary():
        clocks[title] = summary
    speeds = {name: [batch / seconds for seconds in values] for name, values in samples.items()}
    rows = harness.rows(candidates, speeds, unit="images/s", higher_is_better=True, model=model, batch=batch)
    for row, candidate, scale in zip(rows, ready, scales, strict=True):
        row["skipped_updates"] = candidate.built.loss_scale() < scale
        row.update(_details(candidate, row["median"], model, batch, setting, device))
    return rows


def _details(
    ready: Ready, images_per_s: float, model: str, batch: int, setting: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    step_s, rung = batch / images_per_s, ready.spec.rung
    sizes = {"image_size": setting["image_size"], "classes": setting["classes"]}
    on_gpu = device.type == "cuda"
    kernels = profiled(ready.built.run) if on_gpu else []
    return {
        "ms_per_step": step_s * 1e3,
        "first_step_s": ready.first_step_s,
        "peak_memory_bytes": ready.peak_memory_bytes,
        "kernels_per_step": sum(kernel.launches for kernel in kernels) or None,
        "kernel_ms": {title: s * 1e3 for title, s in by_family(kernels, our_kernels()).items()},
        "longest_kernels": [
            {"name": kernel.name[:120], "launches": kernel.launches, "ms": kernel.seconds * 1e3}
            for kernel in kernels[:12]
        ],
        "rung": rung,
        "model_bytes_per_s": step_bytes(model, rung, batch, **sizes) / step_s if rung and on_gpu else None,
        "finite": ready.built.is_finite(),
    }


def traffic(model: str, setting: dict[str, Any], bandwidth: float | None) -> list[dict[str, Any]]:
    """What each rung must move per image, and the speed at which the copy bandwidth would be used up."""
    table = []
    for rung in RUNGS:
        parts = image_bytes(model, rung, image_size=setting["image_size"], classes=setting["classes"])
        roof = bandwidth / parts["total"] if bandwidth else None
        table.append({"rung": rung, "bytes_per_image": parts, "roof_images_per_s": roof})
    return table
