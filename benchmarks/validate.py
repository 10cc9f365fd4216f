"""The simulator against published runs: `python -m benchmarks.validate` writes docs/simulator_validation.md.

The inputs are the machine files: data sheets and single-node results. No figure of a predicted row is an input to its
prediction.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.published import BEYOND, LATER, LATER_CLUSTER, LATER_SOURCE, ROWS, Row, TimedRun, run_rate
from hyperbatch.config import BatchPhase, Config
from hyperbatch.plan.clusters import load_cluster
from hyperbatch.plan.compute import stretch
from hyperbatch.plan.cost import all_reduce_cost
from hyperbatch.plan.inventory import tensors
from hyperbatch.plan.machine import Cluster
from hyperbatch.plan.types import RankGrid
from hyperbatch.plan.workload import model_times
from hyperbatch.sim.convergence import Interval
from hyperbatch.sim.sweep import simulate
from hyperbatch.vocabulary import PRECISION_DTYPE

CONSTANT_EFFICIENCY = 0.9  # the assumption of the first naive predictor

INTRODUCTION = f"""\
# The simulator against published runs

`python -m benchmarks.validate` writes this page; do not edit it. The inputs are the machine files in
`hyperbatch/plan/machines/`: data sheets, single-node results, and NCCL's own latency table. They were committed before
this comparison was first made and have not been changed since. No figure of a predicted row is an input to its
prediction. The published figures were known while the model was written, so this is not a blind test.

The table also has two naive predictors. *Constant* is the single-node speed times {CONSTANT_EFFICIENCY:g}. *Ring*
adds the time of the textbook ring all-reduce to the single-node step, without any overlap.
"""

WITHOUT_SPEED = """\
## Whole runs without a single-node speed of their own

No single-node speed is available for AlexNet on a P40 or Skylake, or for Sony's framework on a V100. Tencent's 6.6
minutes include evaluations, whose share is not given. These predictions start from the speed of another model or
system, and most of them have large errors: they show what the hardware allows, not how fast that software was. For
your own software, give `simulate` a machine file with its measured speed.
"""

FOUND_LATER = f"""\
## Runs found after the model was written

Source: {LATER_SOURCE}. Each prediction includes the number of epochs
to the target at that batch size, the step time and the evaluations. Nothing was changed after these runs were seen.
However, only their times are published. The batch sizes are assumed, and other batch sizes would change the prediction.
The run on 8 devices is nearly an input, because the machine file has the speed of one node from MLPerf v4.0.

| devices | batch, assumed | published, s | simulator, s | error | its interval, s |
|---|---|---|---|---|---|"""

INPUTS = """\
## Inputs

| cluster | device | measured time over roofline, fp16 / fp32 | per layer and pass |
|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Outcome:
    row: Row
    predicted: float
    constant: float  # single-node speed times a constant efficiency
    ring: float  # single-node speed and the ring formula, without overlap

    def error(self, value: float) -> float:
        return value / self.row.published - 1


def predict(row: Row) -> Outcome:
    rate, run = _simulated(row, row.devices)
    if row.kind == "scaling":
        predicted = rate / _simulated(row, row.base)[0]
    else:
        predicted = rate if row.kind == "rate" else run
    speed = _single_speed(row)
    cluster = load_cluster(row.cluster)
    grid = RankGrid(row.devices, 1)
    dtype = PRECISION_DTYPE[row.comm.get("wire_dtype") or row.precision]
    nbytes = sum(spec.nbytes for spec in tensors(row.model, dtype=dtype))
    alone = row.batch_per_device / speed
    ring = alone / (alone + all_reduce_cost(cluster.network, grid, "ring", nbytes).seconds(nbytes))
    unit = 1.0 if row.kind == "scaling" else speed
    return Outcome(row, predicted, CONSTANT_EFFICIENCY * unit, ring * unit)


def _config(row: Row, devices: int) -> Config:
    return Config(recipe=row.name).override(
        model=row.model,
        precision=row.precision,
        epochs=row.epochs,
        batch_phases=(BatchPhase(0, row.batch_per_device * devices),),
        **row.comm,
    )


def _simulated(row: Row, devices: int) -> tuple[float, float]:
    """Returns (images/s per device while training, the same over the whole run)."""
    point = simulate(_config(row, devices), cluster=row.cluster, gpus=[devices]).points[0]
    return point.images_per_s / devices, run_rate(row.epochs, point.run.total_s, devices)


def _single_speed(row: Row) -> float:
    """Returns where the naive predictors start: the published single-node speed, or else the compute model's."""
    cluster = load_cluster(row.cluster)
    for point in cluster.device.measured:
        if point.model == row.model and point.precision == row.precision:
            return point.images_per_s_per_device
    times = model_times(cluster, _config(row, 1), row.batch_per_device)
    return row.batch_per_device / sum(layer.forward_s + layer.backward_s for layer in times)


def report() -> str:
    outcomes, beyond = [predict(row) for row in ROWS], [predict(row) for row in BEYOND]
    lines = [INTRODUCTION, *_table(outcomes), "", "| | median error | worst error |", "|---|---|---|"]
    for title, errors in absolute_errors(outcomes).items():
        lines.append(f"| {title} | {median(errors):.1%} | {max(errors):.1%} |")
    lines += ["", FOUND_LATER, *_later(), "", WITHOUT_SPEED, *_table(beyond), "", INPUTS]
    for name in sorted({row.cluster for row in ROWS}):
        cluster = load_cluster(name)
        overhead = cluster.device.layer_overhead_s * 1e6
        lines.append(f"| {name} | {cluster.device.name} | {_stretches(cluster)} | {overhead:.1f} us |")
    return "\n".join(lines) + "\n"


def time_to_target_s(run: TimedRun) -> Interval:
    answer = simulate("mlperf_resnet50", cluster=LATER_CLUSTER, gpus=[run.devices], global_batch=run.global_batch)
    return answer.points[0].time_to_target_s


def _later() -> list[str]:
    lines = []
    for run in LATER:
        time = time_to_target_s(run)
        lines.append(
            f"| {run.devices:,} | {run.global_batch:,} | {run.seconds:,.1f} | {time.mid:,.1f} | "
            f"{time.mid / run.seconds - 1:+.1%} | {time.low:,.1f} to {time.high:,.1f} |"
        )
    return lines


def _stretches(cluster: Cluster) -> str:
    known = {point.precision for point in cluster.device.measured}
    texts = [f"{stretch(cluster, p):.2f}" if p in known else "-" for p in ("fp16", "fp32")]
    return " / ".join(texts) if known else f"{stretch(cluster, 'fp32'):.2f} (default)"


def absolute_errors(outcomes: list[Outcome]) -> dict[str, list[float]]:
    return {
        "**simulator**": [abs(o.error(o.predicted)) for o in outcomes],
        "constant efficiency": [abs(o.error(o.constant)) for o in outcomes],
        "ring formula": [abs(o.error(o.ring)) for o in outcomes],
    }


def _table(outcomes: list[Outcome]) -> list[str]:
    lines = [
        "| run | figure | published | simulator | error | constant | error | ring | error | source |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        show = (lambda v: f"{v:.1%}") if o.row.kind == "scaling" else (lambda v: f"{v:,.1f}")
        what = {
            "rate": "images/s per device",
            "run": "images/s per device, whole run",
            "scaling": f"scaling from {o.row.base}",
        }[o.row.kind]
        cells = [o.row.name, f"{what}, {o.row.batch_per_device} each", show(o.row.published)]
        for value in (o.predicted, o.constant, o.ring):
            cells += [show(value), f"{o.error(value):+.1%}"]
        lines.append(f"| {' | '.join([*cells, o.row.source])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the simulator's comparison with published runs.")
    parser.add_argument("file", nargs="?", type=Path, default="docs/simulator_validation.md", help="[%(default)s]")
    target: Path = parser.parse_args().file
    target.write_text(report())
    print(f"{target} written")


if __name__ == "__main__":
    main()
