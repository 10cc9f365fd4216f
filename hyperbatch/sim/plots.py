"""Curves of a sweep as self-contained SVG. `python -m hyperbatch.sim.plots FOLDER` draws those of docs/simulator.md."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperbatch.plan.planner import make_plan, plan_step
from hyperbatch.plan.workload import resolve, resolve_all
from hyperbatch.sim.sweep import simulate
from hyperbatch.sim.trace import overlap_svg, write_file

COLORS = ("#3182bd", "#e6550d", "#31a354", "#756bb1", "#636363")
_W, _H, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 320, 64, 30, 110, 44

Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(
    title: str, x_name: str, y_name: str, series: Series, *, y_from_zero: bool = True, log_y: bool = False
) -> str:
    """Lines over a logarithmic x axis with a tick at each x that occurs, labelled at their right ends."""
    points = [point for line in series.values() for point in line]
    x_low, x_high = (math.log(f(x for x, _ in points)) for f in (min, max))
    heights = [math.log(y) if log_y else y for _, y in points]
    y_low = min(heights) if log_y or not y_from_zero else 0.0
    y_high = max(heights) if log_y else _round_up(max(heights))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - x_low) / ((x_high - x_low) or 1)
        up = ((math.log(y) if log_y else y) - y_low) / ((y_high - y_low) or 1)
        return _LEFT + across * (_W - _LEFT - _RIGHT), _H - _BOTTOM - up * (_H - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_W}" height="{_H}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{title}</text>',
        f'<text x="{_LEFT}" y="{_H - 8}">{x_name}</text>',
        f'<text x="14" y="{_H / 2}" transform="rotate(-90 14 {_H / 2})" text-anchor="middle">{y_name}</text>',
    ]
    free = 0.0
    for x in _ticks([x for x, _ in points]):
        left = place(x, points[0][1])[0]
        if left < free:
            continue  # it would lie on the one before
        free = left + 28
        parts.append(f'<text x="{left:.1f}" y="{_H - _BOTTOM + 16}" text-anchor="middle">{x:,.0f}</text>')
    for i in range(5):
        height = y_low + (y_high - y_low) * i / 4
        value = math.exp(height) if log_y else height
        top = place(points[0][0], value)[1] if value > 0 or not log_y else _H - _BOTTOM
        parts.append(f'<line x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{top:.1f}" y2="{top:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    labels = []
    for (name, line), color in zip(series.items(), COLORS * 2, strict=False):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        labels.append((*place(*line[-1])[::-1], name, color))
    lowest = 0.0
    for top, left, name, color in sorted(labels):
        lowest = max(top + 4, lowest + 12)  # one below the other where lines end together
        parts.append(f'<text x="{left + 6:.1f}" y="{lowest:.1f}" fill="{color}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(value: float) -> str:
    for unit, name in ((1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (unit if name == 'M' else 1e3):.3g}{name}"
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _round_up(value: float) -> float:
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 1.5, 2, 3, 4, 6, 8, 10) if step * unit >= value * 0.999)


def _ticks(values: Sequence[float]) -> list[float]:
    """Each value that occurs, or round numbers where there are too many to read."""
    known = sorted(set(values))
    if len(known) <= 8:
        return known
    powers = range(math.floor(math.log10(known[0])), math.ceil(math.log10(known[-1])) + 1)
    return [n * 10.0**k for k in powers for n in (1, 2, 5) if known[0] <= n * 10.0**k <= known[-1]]


def efficiency_chart(recipe: str, cluster: str, gpus: Sequence[int], batch_per_rank: int) -> str:
    """Weak scaling: part of the single-device speed that is left, per algorithm."""
    series = {
        name: [
            (point["gpus"], point["efficiency"])
            for point in simulate(
                recipe, cluster=cluster, gpus=gpus, algorithm=name, batch_per_rank=batch_per_rank
            ).to_dict()["points"]
        ]
        for name in ("flat", "hierarchical", "torus", "hybrid")
    }
    title = f"{recipe} on {cluster}, {batch_per_rank} images per GPU"
    return line_chart(title, "GPUs", "efficiency", series)


def strong_scaling_chart(recipe: str, cluster: str, gpus: Sequence[int]) -> str:
    """Images per second at the recipe's own batch, beside what perfect scaling would give."""
    points = simulate(recipe, cluster=cluster, gpus=gpus).to_dict()["points"]
    got = [(point["gpus"], point["images_per_s"] / 1e6) for point in points]
    perfect = [(count, got[0][1] * count / gpus[0]) for count in gpus]
    batch = points[0]["global_batch"]
    return line_chart(
        f"{recipe} on {cluster}, global batch {batch:,}",
        "GPUs",
        "million images/s",
        {"predicted": got, "perfect": perfect},
    )


def cost_chart(title: str, sweeps: Mapping[str, Sequence[Mapping[str, Any]]], what: str = "energy_kwh") -> str:
    """Cost or energy against time to target as the cluster grows: the points of a sweep, or of several."""
    series = {
        name: [(point["time_to_target_s"]["mid"], point[what]) for point in points] for name, points in sweeps.items()
    }
    unit = {"energy_kwh": "kWh", "cost_usd": "USD"}[what]
    return line_chart(title, "seconds to target", unit, series, log_y=True)


def sweep_svg(values: Mapping[str, Any]) -> str:
    """`simulate`'s answer as a picture: time to target, speed, efficiency, and cost against time."""
    points, title = values["points"], f"{values['recipe']} on {values['cluster']}"
    sizes = [point["gpus"] for point in points]

    def against_gpus(name: str, of: Mapping[str, Any], **options: Any) -> str:
        series = {label: list(zip(sizes, map(get, points), strict=True)) for label, get in of.items()}
        return line_chart(title, "GPUs", name, series, **options)

    times = {key: lambda point, key=key: point["time_to_target_s"][key] for key in ("high", "mid", "low")}
    first = points[0]["images_per_s"] / sizes[0]
    speed = {"predicted": lambda point: point["images_per_s"], "perfect": lambda point: first * point["gpus"]}
    what = "energy_kwh" if any(point["cost_usd"] is None for point in points) else "cost_usd"
    return stack(
        against_gpus("seconds to target", times, log_y=True),
        against_gpus("images/s", speed, log_y=True),
        against_gpus("efficiency", {"predicted": lambda point: point["efficiency"]}),
        cost_chart(title, {"": points}, what),
    )


def write_sweep(path: str | Path, values: Mapping[str, Any]) -> None:
    write_file(path, sweep_svg(values))


def stack(*charts: str) -> str:
    """Charts in two columns of one picture."""
    rows = -(-len(charts) // 2)
    places = [(i % 2 * _W, i // 2 * _H) for i in range(len(charts))]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _W} {rows * _H}">']
    for (x, y), chart in zip(places, charts, strict=True):
        parts.append(chart.replace("<svg ", f'<svg x="{x}" y="{y}" width="{_W}" height="{_H}" ', 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def grouping_chart() -> str:
    """Exposed communication against the number of groups on Fujitsu's 2,048 V100: their two ideas, and the least."""
    job = resolve("fujitsu_resnet50", "abci", 2048)
    phase = resolve_all(job.config, job.cluster.device.memory_bytes, job.ranks)[0]

    def exposed(strategy: str, **options: int) -> tuple[int, float]:
        config = job.config.override(**options)
        step = plan_step(job.cluster, config, job.ranks, phase, algorithm="torus", strategy=strategy)
        return len(step.plan.groups), step.timing.exposed_comm_s * 1e3

    equal = dict(exposed("equal", group_count=count) for count in range(1, 10))
    cubic: dict[int, float] = {}
    for base in range(1, 41):
        count, milliseconds = exposed("cubic", group_base=base)
        cubic[count] = min(milliseconds, cubic.get(count, milliseconds))
    best = exposed("optimal")[1]
    series = {
        "equal groups": sorted(equal.items()),
        "cubic groups": sorted(cubic.items()),
        "optimal": [(count, best) for count in (min(equal), max(equal))],
    }
    return line_chart("ResNet-50 on 2,048 V100, 512 nodes of 4", "groups", "exposed ms", series)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the simulator's documents.")
    parser.add_argument("folder", nargs="?", type=Path, default="docs/pictures", help="[%(default)s]")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    names = ("single", "equal", "cubic", "optimal")
    fujitsu = [
        make_plan(
            "fujitsu_resnet50", cluster="abci", gpus=2048, grid="512x4", algorithm="torus", strategy=name
        ).to_dict()
        for name in names
    ]
    alexnet = [
        make_plan(
            "tencent_alexnet", cluster="tencent_p40", gpus=1024, grid="128x8", algorithm="hybrid", strategy=name
        ).to_dict()
        for name in names
    ]
    sizes = [128, 256, 512, 1024, 2048, 4096]
    clusters = ["dgx1_v100", "dgx_a100", "dgx_h100", "h200x8"]
    energy = {
        name: simulate("mlperf_resnet50", cluster=name, gpus=[8, 32, 128, 512]).to_dict()["points"] for name in clusters
    }
    priced = {
        name: simulate(recipe, cluster="cloud_h200_efa", gpus=[8, 32, 128, 512]).to_dict()["points"]
        for name, recipe in (("ResNet-50", "mlperf_resnet50"), ("AlexNet", "tencent_alexnet"))
    }
    pictures = {
        "overlap": overlap_svg(*fujitsu),
        "overlap_alexnet": overlap_svg(*alexnet),
        "grouping": grouping_chart(),
        "efficiency": efficiency_chart("fujitsu_resnet50", "abci", sizes, 42),
        "efficiency_alexnet": efficiency_chart("tencent_alexnet", "tencent_p40", sizes[:-1], 64),
        "strong_scaling": strong_scaling_chart("fujitsu_resnet50", "abci", [512, 1024, 2048]),
        "energy": cost_chart("mlperf_resnet50: 8 to 512 GPUs", energy),
        "cost": cost_chart("cloud_h200_efa: 8 to 512 GPUs", priced, "cost_usd"),
    }
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture)
    print(f"{folder}: {len(pictures)} pictures written")


if __name__ == "__main__":
    main()
