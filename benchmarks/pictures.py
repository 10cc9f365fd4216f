"""The pictures of docs/simulator.md: `python -m benchmarks.pictures` draws them from the built-in machine files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperbatch.plan.planner import make_plan, plan_step
from hyperbatch.plan.workload import resolve, resolve_all
from hyperbatch.report.chart import Chart
from hyperbatch.report.picture import charts_picture, cost_chart, line_chart, timeline_picture
from hyperbatch.sim.sweep import simulate


def points_of(recipe: str, **options: Any) -> list[dict[str, Any]]:
    return simulate(recipe, **options).to_dict()["points"]


def efficiency_chart(recipe: str, cluster: str, gpus: Sequence[int], batch_per_rank: int) -> Chart:
    """Weak scaling: each algorithm's fraction of the speed of a single device."""
    series = {
        name: [
            (point["gpus"], point["efficiency"])
            for point in points_of(recipe, cluster=cluster, gpus=gpus, algorithm=name, batch_per_rank=batch_per_rank)
        ]
        for name in ("flat", "hierarchical", "torus", "hybrid")
    }
    title = f"{recipe} on {cluster}, {batch_per_rank} images per GPU: efficiency"
    return line_chart(title, "GPUs", series, form="percent")


def strong_scaling_chart(recipe: str, cluster: str, gpus: Sequence[int]) -> Chart:
    """Images per second at the recipe's own batch, and those of perfect scaling."""
    points = points_of(recipe, cluster=cluster, gpus=gpus)
    got = [(point["gpus"], point["images_per_s"]) for point in points]
    perfect = [(count, got[0][1] * count / gpus[0]) for count in gpus]
    batch = points[0]["global_batch"]
    title = f"{recipe} on {cluster}, global batch {batch:,}: images per second"
    return line_chart(title, "GPUs", {"predicted": got, "perfect": perfect}, form="count")


def grouping_chart() -> Chart:
    """Exposed communication against the number of groups on Fujitsu's 2,048 V100: two groupings, and the optimum."""
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
    return line_chart("ResNet-50 on 2,048 V100, 512 nodes of 4: exposed milliseconds", "groups", series)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the simulator's documents.")
    parser.add_argument("folder", nargs="?", type=Path, default="docs/pictures", help="[%(default)s]")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    names = ("single", "equal", "cubic", "optimal")
    runs = {
        "overlap": ("fujitsu_resnet50", {"cluster": "abci", "gpus": 2048, "grid": "512x4", "algorithm": "torus"}),
        "overlap_alexnet": (
            "tencent_alexnet",
            {"cluster": "tencent_p40", "gpus": 1024, "grid": "128x8", "algorithm": "hybrid"},
        ),
    }
    pictures = {
        picture: timeline_picture({name: make_plan(recipe, **options, strategy=name).step.timing for name in names})
        for picture, (recipe, options) in runs.items()
    }
    sizes = [128, 256, 512, 1024, 2048, 4096]
    clusters = ["dgx1_v100", "dgx_a100", "dgx_h100", "h200x8"]
    energy = {name: points_of("mlperf_resnet50", cluster=name, gpus=[8, 32, 128, 512]) for name in clusters}
    priced = {
        name: points_of(recipe, cluster="cloud_h200_efa", gpus=[8, 32, 128, 512])
        for name, recipe in (("ResNet-50", "mlperf_resnet50"), ("AlexNet", "tencent_alexnet"))
    }
    charts = {
        "grouping": grouping_chart(),
        "efficiency": efficiency_chart("fujitsu_resnet50", "abci", sizes, 42),
        "efficiency_alexnet": efficiency_chart("tencent_alexnet", "tencent_p40", sizes[:-1], 64),
        "strong_scaling": strong_scaling_chart("fujitsu_resnet50", "abci", [512, 1024, 2048]),
        "energy": cost_chart("mlperf_resnet50: 8 to 512 GPUs", energy),
        "cost": cost_chart("cloud_h200_efa: 8 to 512 GPUs", priced, "cost_usd"),
    }
    pictures |= {name: charts_picture(chart) for name, chart in charts.items()}
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture)
    print(f"{folder}: {len(pictures)} pictures written")


if __name__ == "__main__":
    main()
