"""`hyperbatch bench step`: our training step against torch's, with all candidates in one process, timed in turns.

for each batch:  build every candidate (first step, memory) -> interleaved rounds -> one profiled step each
--data DIR:      a run through the engine instead, from JPEG files to updated weights (bench/step_data.py)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from hyperbatch.bench import harness, step_data
from hyperbatch.bench.harness import Candidate
from hyperbatch.bench.step_device import Clocks, release_memory, warm_libraries
from hyperbatch.bench.step_kernels import by_family, our_kernels, profiled
from hyperbatch.bench.step_report import format_step
from hyperbatch.bench.step_runs import (
    MAX_AUTOTUNE,
    PEERS,
    Ready,
    Setting,
    Spec,
    our_specs,
    ours,
    peer_specs,
    set_up,
    torchvision_model,
)
from hyperbatch.engine.kernel_choice import cudnn_trials
from hyperbatch.errors import InputError, nearest
from hyperbatch.models.build import model_names
from hyperbatch.plan.inventory import usual_data
from hyperbatch.stopwatch import device_s
from hyperbatch.vocabulary import is_foreign

GPU_BATCHES = (16, 42, 256, 400)  # from NVIDIA at 4,216 GPUs, Fujitsu at 2,048, the usual one, NVIDIA at 8
FOREIGN_BATCHES = (256,)  # for timm's and custom models
CPU_BATCHES = (32,)
SAMPLE_S = 0.1  # a sample takes at least this long, and as many steps as needed
MOST_CALLS = 30
CPU_NOTE = "measured on a CPU: small model, fp32, no CUDA graph; only times on a GPU are meaningful"

format_result = format_step  # formats what the command line prints


def bench_step(
    model: str | None = None,
    *,
    batch: Sequence[int] | None = None,
    peers: Sequence[str] | None = None,
    max_autotune: bool = False,
    precision: str | None = None,
    rounds: int | None = None,
    image_size: int | None = None,
    data: str | None = None,
    steps: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Returns rows of images per second for each batch, on synthetic data; with `data`, of the engine including files.

    On a GPU: ResNet-50, fp16, batches 16, 42, 256 and 400. On a CPU: ResNet-20, fp32, compared only with torch eager.
    model: a built-in one, or `timm/NAME` or `package.module:callable`, at batch 256. precision: fp16 or bf16, on a GPU.
    peers: a selection of eager, graph, masters (built-in models only) and compile; None means all. data: a folder, or
    "generated" for JPEGs like ImageNet's.
    """
    target = harness.pick_device(device)
    gpu = target.type == "cuda"
    model = model or ("resnet50" if gpu else "resnet20")
    foreign = is_foreign(model)
    if model not in model_names() and not foreign:
        raise InputError(f"bench step: unknown model {model!r}{nearest(model, model_names())}")
    usual_size, classes = usual_data(model)
    setting = Setting(
        model=model,
        precision=check_precision(precision, gpu=gpu),
        image_size=image_size or usual_size,
        classes=classes,
        device=target,
    )
    about: dict[str, Any] = {**asdict(setting), "device": harness.device_name(), "notes": [] if gpu else [CPU_NOTE]}
    usual_batches = FOREIGN_BATCHES if foreign else GPU_BATCHES
    batches = tuple(batch or (usual_batches if gpu else CPU_BATCHES))
    if data is not None:
        if peers is not None or rounds is not None or max_autotune:
            raise InputError("--data trains once and has no rounds; combine it only with --steps, --batch and --model")
        return harness.result("step", step_data.end_to_end(data, setting, batches, steps), **about)
    if steps is not None:
        raise InputError("--steps needs --data; without --data use --rounds")
    usual_peers = [name for name in PEERS if not (foreign and name == "masters")] if gpu else PEERS[:1]
    names = check_peers([*(usual_peers if peers is None else peers)], max_autotune, gpu=gpu, foreign=foreign)

    table, clocks = [], {}
    with cudnn_trials(True):  # for all candidates
        warm_libraries(target)
        for size in batches:
            pairs = [(spec, setting) for spec in our_specs(setting) + peer_specs(names)]
            rows, clocks[f"batch {size}"] = timed(pairs, size, rounds or (10 if gpu else 3), f"batch {size}")
            table += rows
        if gpu and not foreign:
            title = f"batch {max(batches)}, precisions"
            rows, clocks[title] = timed(reference_path(setting), max(batches), rounds or 10, title)
            table += [row | {"ratio_to_fp32": row["median"] / rows[-1]["median"]} for row in rows]
    return harness.result(
        "step",
        table,
        **about,
        peer_network=model if foreign else "torchvision" if torchvision_model(model) else "hyperbatch",
        clocks=clocks,
    )


def check_precision(name: str | None, *, gpu: bool) -> str:
    """Checks the precision and returns the one of all candidates."""
    if name is not None and not gpu:
        raise InputError(f"--precision {name} needs a GPU; on a CPU the step runs in fp32")
    if name not in (None, "fp16", "bf16"):
        raise InputError(f"--precision {name}: bench step compares fp16 or bf16")
    return name or ("fp16" if gpu else "fp32")


def check_peers(names: list[str], max_autotune: bool, *, gpu: bool, foreign: bool = False) -> list[str]:
    for name in names:
        if name not in PEERS:
            raise InputError(f"--peers: unknown peer {name!r}; use some of {', '.join(PEERS)}, or none")
        if name == "masters" and foreign:
            raise InputError("--peers: masters supports only built-in models; leave it out")
    names = list(dict.fromkeys([*names, *([MAX_AUTOTUNE] if max_autotune else [])]))
    for name in names:
        if name != "eager" and not gpu:
            raise InputError(f"bench step: {name} needs a GPU; on a CPU only eager runs")
    return names


def reference_path(setting: Setting) -> list[tuple[Spec, Setting]]:
    """The plain model in fp16, and in fp32 with convolutions in TF32, which is torch's default."""
    build = partial(ours, fused=False)
    fp16 = Spec(name="reference path, fp16", build=build)
    fp32 = Spec(name="reference path, fp32", build=build)
    return [(fp16, replace(setting, precision="fp16")), (fp32, replace(setting, precision="fp32"))]


def timed(
    candidates: list[tuple[Spec, Setting]], batch: int, rounds: int, title: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measures one batch and returns (rows, clocks). The memory of the candidates is free when it returns."""
    device = candidates[0][1].device
    if device.type == "cuda":
        # cuDNN's trials take time and memory once per process. This set-up runs them before any candidate is measured.
        for setting in {setting.precision: setting for _, setting in candidates}.values():
            set_up(Spec(name="trials", build=partial(ours, fused=False)), setting, batch)
    ready = []
    for spec, setting in candidates:
        ready.append(set_up(spec, setting, batch))
        harness.say(f"{title}, {spec.name}: set up in {ready[-1].set_up_s:.1f} s")
    runs = [Candidate(name=f"{title} / {r.spec.name}", run=r.built.run, peer=r.spec.peer) for r in ready]
    fastest_s = min(device_s(candidate.run, device=device) for candidate in runs)
    measure = partial(device_s, device=device, calls=min(MOST_CALLS, math.ceil(SAMPLE_S / fastest_s)))
    harness.say(f"{title}: {rounds} round{'' if rounds == 1 else 's'}, fastest step {fastest_s * 1e3:.1f} ms")
    clocks, scales = Clocks(device), [r.built.loss_scale() for r in ready]
    samples = harness.interleave(runs, measure, rounds=rounds, warmup=1, before_round=clocks.ask)
    readings = clocks.summary()
    speeds = {name: [batch / seconds for seconds in values] for name, values in samples.items()}
    rows = harness.rows(runs, speeds, unit="images/s", higher_is_better=True, batch=batch)
    # One expression, because a loop variable would keep the last candidate alive.
    rows = [
        row | {"skipped_updates": r.built.loss_scale() < scale} | details(r, setting, batch, row["median"])
        for row, (_, setting), r, scale in zip(rows, candidates, ready, scales, strict=True)
    ]
    harness.say(f"{title}: timed and profiled")
    del ready, runs
    if any("compile" in spec.name for spec, _ in candidates):  # importing the compiler takes seconds
        torch.compiler.reset()  # the compiler keeps graphs and memory of deleted models
    release_memory(device)
    return rows, readings


def details(ready: Ready, setting: Setting, batch: int, images_per_s: float) -> dict[str, Any]:
    """The fields of a row other than its speed. Profiles one more step."""
    kernels = profiled(ready.built.run) if setting.device.type == "cuda" else []
    return {
        "model": setting.model,
        "precision": setting.precision,
        "ms_per_step": 1e3 * batch / images_per_s,
        "set_up_s": ready.set_up_s,
        "compiled": ready.built.compiled,
        "peak_memory_bytes": ready.peak_memory_bytes,
        "kernels_per_step": sum(kernel.launches for kernel in kernels) or None,
        "kernel_ms": {title: s * 1e3 for title, s in by_family(kernels, our_kernels()).items()},
        "longest_kernels": [
            {"name": kernel.name[:120], "launches": kernel.launches, "ms": kernel.seconds * 1e3}
            for kernel in kernels[:12]
        ],
        "finite": ready.built.is_finite(),
    }
