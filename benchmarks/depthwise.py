"""Depthwise convolutions of ConvNeXt-T, by our kernels and by torch: python -m benchmarks.depthwise [--json]

Measures forward, input gradient (alone, and with that of the block's shortcut added) and weight gradient of each of its
shapes, in CUDA graphs, in interleaved rounds, and for comparison a copy that reads and writes as many bytes as the
forward does. `step_ms` adds up the times of all 18 layers in a training step: with torch, with the fastest for each
shape, and if all were copies. Settings (columns of a thread x warps of a program) other than the kernels' own can be
measured too:

    python -m benchmarks.depthwise --dtypes fp16 --settings 4x1,4x2,4x4,7x2,7x4,2x4 --gradient-settings 4x1,4x2,4x4,2x4
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyperbatch.bench.harness import Candidate, interleave, result, rows, say
from hyperbatch.bench.step_runs import captured
from hyperbatch.engine.kernel_choice import cudnn_trials
from hyperbatch.kernels import workers
from hyperbatch.kernels.compile import compiling
from hyperbatch.record import strict_json
from hyperbatch.stopwatch import device_s
from hyperbatch.tables import text_table

SIDE = 7
STAGES = ((96, 56, 3), (192, 28, 3), (384, 14, 9), (768, 7, 3))  # channels, pixels of a side, layers
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PASSES = ("forward", "input gradient", "input gradient + shortcut", "weight gradient")
IN_A_STEP = ("forward", "input gradient + shortcut", "weight gradient")
CALLS = 4  # calls in a graph


@dataclass(frozen=True, slots=True)
class Layer:
    x: Tensor
    dz: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, batch: int, channels: int, pixels: int, dtype: torch.dtype) -> Layer:
        def images() -> Tensor:
            values = torch.randn((batch, pixels, pixels, channels), dtype=dtype, device="cuda")
            return values.permute(0, 3, 1, 2)

        weight = torch.randn((channels, 1, SIDE, SIDE), dtype=dtype, device="cuda") / SIDE
        return cls(images(), images(), weight, torch.zeros(channels, device="cuda"))


def by_torch(layer: Layer, which: str) -> Callable[[], Any]:
    padding, groups = (SIDE // 2,) * 2, len(layer.weight)
    if which == "forward":
        bias = layer.bias.to(layer.x.dtype)
        return partial(torch.conv2d, layer.x, layer.weight, bias, padding=padding, groups=groups)
    wanted = (False, True, True) if which == "weight gradient" else (True, False, False)
    geometry = ((1, 1), padding, (1, 1), False, (0, 0), groups, wanted)
    run = partial(torch.ops.aten.convolution_backward, layer.dz, layer.x, layer.weight, [groups], *geometry)
    return (lambda: run()[0] + layer.x) if which == "input gradient + shortcut" else run


def by_kernels(layer: Layer, which: str, setting: tuple[int, int]) -> Callable[[], Any]:
    from hyperbatch.kernels import depthwise

    chosen = depthwise.Setting(*setting)
    if which == "forward":
        return partial(depthwise.convolve, layer.x, layer.weight, layer.bias, chosen)
    if which != "weight gradient":
        added = layer.x if which == "input gradient + shortcut" else None
        return partial(depthwise.convolve, layer.dz, layer.weight, None, chosen, flip=True, added=added)
    return partial(depthwise.weight_gradient, layer.dz, layer.x, layer.weight, chosen)


def measure(
    batch: int,
    dtypes: Sequence[str],
    settings: Sequence[tuple[int, int]],
    gradient_settings: Sequence[tuple[int, int]],
    rounds: int,
) -> dict[str, Any]:
    def ours(layer: Layer, which: str) -> dict[str, Callable[[], Any]]:
        tried = gradient_settings if which == "weight gradient" else settings
        return {f"kernel {q}x{warps}": by_kernels(layer, which, (q, warps)) for q, warps in tried}

    say("compiling kernels")
    with compiling():
        for dtype in dtypes:
            for channels, _, _ in STAGES:
                small = Layer.of(1, channels, 1, DTYPES[dtype])
                for which in PASSES:
                    for run in ours(small, which).values():
                        run()
    table, steps = [], []
    for dtype in dtypes:
        sums: dict[str, float] = {"torch": 0.0, "fastest": 0.0, "copy": 0.0}
        for channels, pixels, layers in STAGES:
            say(f"{dtype}, {channels} channels of {pixels} x {pixels} pixels")
            layer = Layer.of(batch, channels, pixels, DTYPES[dtype])
            room = torch.empty_like(layer.x)
            for which in PASSES:
                ways = {"torch": by_torch(layer, which), **ours(layer, which)}
                ways["copy"] = partial(room.copy_, layer.x)
                runs = [Candidate(name=name, run=_in_graph(way), peer=name == "torch") for name, way in ways.items()]
                samples = interleave(runs, partial(device_s, device=layer.x.device), rounds=rounds, warmup=1)
                about = {"dtype": dtype, "pass": which, "shape": [batch, channels, pixels, pixels], "layers": layers}
                found = rows(runs, samples, unit="us", scale=1e6 / CALLS, **about)
                table += found
                medians = {row["name"]: row["median"] for row in found}
                fastest = min(value for name, value in medians.items() if name != "copy")
                if which in IN_A_STEP:
                    for name, value in (medians | {"fastest": fastest}).items():
                        if name in sums:
                            sums[name] += value * layers / 1e3
        steps.append({"dtype": dtype, **sums})
    return result("depthwise", table, batch=batch, step_ms=steps)


def _in_graph(way: Callable[[], Any]) -> Callable[[], Any]:
    return captured(lambda: [way() for _ in range(CALLS)])


def format_report(report: dict[str, Any]) -> str:
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in report["rows"]:
        key = row["dtype"], row["pass"], "x".join(map(str, row["shape"]))
        lines.setdefault(key, {})[row["name"]] = f"{row['median']:.1f}"
    names = list(dict.fromkeys(row["name"] for row in report["rows"]))
    body = [[*key, *(found.get(name, "") for name in names)] for key, found in lines.items()]
    head = ["dtype", "pass", "shape", *(f"{name} [us]" for name in names)]
    ends = [
        f"18 layers, {step['dtype']}: torch {step['torch']:.2f} ms a step, the fastest {step['fastest']:.2f} ms, "
        f"copies {step['copy']:.2f} ms"
        for step in report["step_ms"]
    ]
    return "\n".join([f"depthwise on {report['device']}", *text_table(head, body, left=3), *ends])


def _settings(text: str) -> list[tuple[int, int]]:
    return [(int(q), int(warps)) for q, warps in (part.split("x") for part in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dtypes", default="fp16,bf16")
    parser.add_argument("--settings", type=_settings, help="of the forward and the input gradient")
    parser.add_argument("--gradient-settings", type=_settings)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures kernels on a GPU, and there is none")
    workers.start()
    from hyperbatch.kernels import depthwise

    own = [(setting.columns, setting.warps) for setting in depthwise.SETTINGS]
    gradient = [(depthwise.GRADIENT.columns, depthwise.GRADIENT.warps)]
    try:
        with cudnn_trials(True):
            report = measure(
                args.batch,
                args.dtypes.split(","),
                args.settings or own,
                args.gradient_settings or gradient,
                args.rounds,
            )
    finally:
        workers.stop()
    print(strict_json(report, indent=1) if args.json else format_report(report))


if __name__ == "__main__":
    main()
