"""Curves of a sweep as self-contained SVG. `python -m hyperbatch.sim.plots FOLDER` draws those of docs/simulator.md."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperbatch.plan.planner import make_plan
from hyperbatch.sim.sweep import simulate
from hyperbatch.sim.trace import overlap_svg

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
    for x in _ticks([x for x, _ in points]):
        left = place(x, points[0][1])[0]
        parts.append(f'<text x="{left:.1f}" y="{_H - _BOTTOM + 16}" text-anchor="middle">{x:,.0f}</text>')
    for i in range(5):
        height = y_low + (y_high - y_low) * i / 4
        value = math.exp(height) if log_y else height
        top = place(points[0][0], value)[1] if value > 0 or not log_y else _H - _BOTTOM
        parts.append(f'<line x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{top:.1f}" y2="{top:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{value:.3g}</text>')
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
            for point in simulate(recipe, cluster=cluster, gpus=gpus, algorithm=name, batch_per_rank=batch_per_rank)[
                "points"
            ]
        ]
        for name in ("flat", "hierarchical", "torus", "hybrid")
    }
    title = f"{recipe} on {cluster}, {batch_per_rank} images per GPU"
    return line_chart(title, "GPUs", "efficiency", series)


def strong_scaling_chart(recipe: str, cluster: str, gpus: Sequence[int]) -> str:
    """Images per second at the recipe's own batch, beside what perfect scaling would give."""
    points = simulate(recipe, cluster=cluster, gpus=gpus)["points"]
    got = [(point["gpus"], point["images_per_s"] / 1e6) for point in points]
    perfect = [(count, got[0][1] * count / gpus[0]) for count in gpus]
    batch = points[0]["global_batch"]
    return line_chart(
        f"{recipe} on {cluster}, global batch {batch:,}",
        "GPUs",
        "million images/s",
        {"predicted": got, "perfect": perfect},
    )


def cost_chart(recipe: str, clusters: Sequence[str], gpus: Sequence[int]) -> str:
    """Energy against time to target as the cluster grows."""
    series = {
        name: [
            (point["time_to_target_s"]["mid"], point["energy_kwh"])
            for point in simulate(recipe, cluster=name, gpus=gpus)["points"]
        ]
        for name in clusters
    }
    title = f"{recipe}: {gpus[0]} to {gpus[-1]} GPUs"
    return line_chart(title, "seconds to target", "kWh", series, log_y=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    options = {"cluster": "abci", "gpus": 2048, "grid": "512x4", "algorithm": "torus"}
    plans = [
        make_plan("fujitsu_resnet50", strategy=name, **options) for name in ("single", "equal", "cubic", "optimal")
    ]
    (folder / "overlap.svg").write_text(overlap_svg(*plans))
    sizes = [128, 256, 512, 1024, 2048, 4096]
    (folder / "efficiency.svg").write_text(efficiency_chart("fujitsu_resnet50", "abci", sizes, 42))
    (folder / "efficiency_alexnet.svg").write_text(efficiency_chart("tencent_alexnet", "tencent_p40", sizes[:-1], 64))
    (folder / "strong_scaling.svg").write_text(strong_scaling_chart("fujitsu_resnet50", "abci", [512, 1024, 2048]))
    clusters = ["dgx1_v100", "dgx_a100", "dgx_h100", "h200x8"]
    (folder / "energy.svg").write_text(cost_chart("mlperf_resnet50", clusters, [8, 32, 128, 512]))
    print(f"{folder}: 5 pictures written")


if __name__ == "__main__":
    main()
