"""`hyperbatch bench step` with two more columns: memory traffic against a copy, and each candidate's first step.

    python -m benchmarks.step --json > benchmarks/step_h200.json

The traffic model (benchmarks/traffic.py) says how many bytes a step must move through memory. Divided by the measured
time this is a bandwidth, which is compared with that of a large copy on the same GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.first_step import first_step_s
from benchmarks.traffic import RUNGS, image_bytes, step_bytes
from hyperbatch.bench.harness import pick_device, say
from hyperbatch.bench.step import bench_step, format_result
from hyperbatch.bench.step_runs import Setting
from hyperbatch.record import strict_json
from hyperbatch.stopwatch import copy_bytes_per_s

# What each candidate of `bench step` fuses, as a rung of the traffic model. The model supports only 16-bit steps.
RUNG_OF = {
    "hyperbatch fused, graph": "moments",
    "hyperbatch plain, graph": "unfused",
    "torch eager": "unfused",
    "torch graph": "unfused",
    "torch graph, fp32 masters": "unfused",
    "torch.compile reduce-overhead": "norm",
    "torch.compile max-autotune": "norm",
    "reference path, fp16": "unfused",
}


def with_traffic(report: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """Adds to each row its `rung`, the bytes per second that it moves by the model, and their share of the bandwidth.

    `traffic`: the bytes per image of each rung, and the speed at which these use up the bandwidth.
    """
    shape = {"image_size": report["image_size"], "classes": report["classes"]}
    rows = []
    for row in report["rows"]:
        rung = RUNG_OF.get(_candidate(row))
        moved = step_bytes(report["model"], rung, row["batch"], **shape) / row["ms_per_step"] * 1e3 if rung else None
        share = None if moved is None else moved / bandwidth
        rows.append(row | {"rung": rung, "model_bytes_per_s": moved, "copy_share": share})
    table = []
    for rung in RUNGS:
        parts = image_bytes(report["model"], rung, **shape)
        table.append({"rung": rung, "bytes_per_image": parts, "roof_images_per_s": bandwidth / parts["total"]})
    return report | {"rows": rows, "copy_bytes_per_s": bandwidth, "traffic": table}


def with_first_steps(report: dict[str, Any], device: str = "auto") -> dict[str, Any]:
    """Adds `first_step_s` of each candidate, and `warm_first_step_s` of those that compile, with caches that are kept.
    The rows of the reference path, which is measured separately, have neither."""
    names = ("model", "precision", "image_size", "classes")
    setting = Setting(**{name: report[name] for name in names}, device=pick_device(device))
    rows = []
    for row in report["rows"]:
        apart = _candidate(row).startswith("reference path")
        say(f"{row['name']}: first step")
        order = (_candidate(row), setting, row["batch"])
        row = row | {"first_step_s": None if apart else first_step_s(*order)}
        if "compile" in _candidate(row):
            row["warm_first_step_s"] = first_step_s(*order, warm=True)
        rows.append(row)
    return report | {"rows": rows}


def _candidate(row: dict[str, Any]) -> str:
    """Returns the candidate of a row named, for example, "batch 256 / torch eager"."""
    return row["name"].partition(" / ")[2]


def format_report(report: dict[str, Any]) -> str:
    """The text of `bench step`, followed by the additional columns."""
    lines = [format_result(report)]
    for row in report["rows"]:
        extra = []
        if row.get("copy_share") is not None:
            extra.append(f"{row['copy_share']:.0%} of the copy bandwidth")
        if row.get("first_step_s") is not None:
            extra.append(f"first step {row['first_step_s']:.1f} s")
        if row.get("warm_first_step_s") is not None:
            extra.append(f"with warm caches {row['warm_first_step_s']:.1f} s")
        lines += [f"  {row['name']}: {', '.join(extra)}"] if extra else []
    if "traffic" in report:
        copy = report["copy_bytes_per_s"]
        lines.append(f"  traffic model, roofs at the measured copy bandwidth of {copy / 1e12:.2f} TB/s")
        for rung in report["traffic"]:
            megabytes, roof = rung["bytes_per_image"]["total"] / 1e6, rung["roof_images_per_s"]
            lines.append(f"    {rung['rung']:<8} {megabytes:6.0f} MB per image  {roof:8,.0f} img/s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="built in, timm/NAME or package.module:callable [resnet50; on a CPU resnet20]")
    parser.add_argument("--precision", help="fp16 or bf16, on a GPU [fp16]")
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], metavar="N,N,...")
    parser.add_argument("--peers", type=lambda text: text.split(","), metavar="NAME,...")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--max-autotune", action="store_true", help="torch.compile's max-autotune, too: takes minutes")
    parser.add_argument("--first-step", action="store_true", help="each candidate's first step in its own process")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("model", "precision", "batch", "peers", "rounds", "max_autotune")}
    report = bench_step(**options)
    device = pick_device("auto")
    if any(_candidate(row) == "hyperbatch fused, graph" for row in report["rows"]):  # the traffic model has them
        report = with_traffic(report, copy_bytes_per_s(device))
    if args.first_step:
        report = with_first_steps(report)
    print(strict_json(report) if args.json else format_report(report))


if __name__ == "__main__":
    main()
