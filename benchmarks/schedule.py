"""The time of a recipe's whole schedule, measured in slices: some steps of every image size, and the switches.

    python -m benchmarks.schedule resnet50_fast --data DIR --steps 100 --json > benchmarks/schedule_h200.json
    python -m benchmarks.schedule resnet50_fast --data DIR --gpus 8 --set cache=none

One run through the engine makes `--steps` steps of each size in the recipe's order and evaluates once. The time of a
size is that of its steady steps, extrapolated to all images that the recipe shows at that size; the time of a switch is
the additional time of the first steps. Everything here is measured, except if --gpus is above 1: then one GPU does the
work of one rank, and the additional time for the exchange of gradients (`exposed_comm_s`) is simulated, on the recipe's
cluster.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperbatch.bench import harness
from hyperbatch.config import BatchPhase, Config, SizePhase, fields
from hyperbatch.data.source import check_data
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError
from hyperbatch.recipes import find_recipe
from hyperbatch.recipes.mlperf import IMAGENET_SAMPLES
from hyperbatch.record import read_metrics, strict_json
from hyperbatch.schedule import SizeSpan, full_size_epochs, size_spans
from hyperbatch.sim.sweep import simulate

STEPS = 60
SETTLING = 4  # this fraction (one in SETTLING) of a size's steps belongs to the switch
EVAL_SAMPLES = 50_000


def sliced(config: Config, samples: int, batch: int, steps: int) -> Config:
    """The same run with `steps` steps of every image size and one evaluation, for a set of this many samples."""
    spans, slice_epochs = size_spans(config), steps * batch / samples
    phases = tuple(SizePhase(i * slice_epochs, span.image_size) for i, span in enumerate(spans))
    return config.override(
        batch_phases=(BatchPhase(0, batch),),
        epochs=len(spans) * slice_epochs,
        size_phases=phases,
        lr=1e-3,  # far from divergence, even without a warm-up
        lr_scaling="none",
        warmup_epochs=0.0,
        decay_epochs=None,
        target_top1=None,
        eval_every_epochs=1e9,
        eval_offset_epochs=0.0,
        keep_checkpoints=0,
        max_rollbacks=0,
        log_every_steps=1,
        nproc=1,
    )


def span_rows(
    spans: Sequence[SizeSpan], ends_s: Sequence[float], waits_s: Sequence[float], batch: int
) -> list[dict[str, Any]]:
    """Returns a row for each size, from the times at which the steps of all slices ended."""
    steps = len(ends_s) // len(spans)
    settling = max(1, steps // SETTLING)
    rows = []
    for i, span in enumerate(spans):
        before_s = ends_s[i * steps - 1] if i else 0.0
        here, waits = ends_s[i * steps : (i + 1) * steps], waits_s[i * steps + settling : (i + 1) * steps]
        step_s = (here[-1] - here[settling - 1]) / (steps - settling)
        rows.append(
            {
                "image_size": span.image_size,
                "epochs": span.epochs,
                "steps": steps - settling,
                "step_s": step_s,
                "images_per_s": batch / step_s,
                "data_wait_fraction": sum(waits) / (here[-1] - here[settling - 1]),
                "switch_s": max(0.0, here[settling - 1] - before_s - settling * step_s),
            }
        )
    return rows


def add_up(rows: list[dict[str, Any]], *, images: int, batch: int, gpus: int, exposed_s: Sequence[float]) -> float:
    """Fills in the time of each size over all its images, including the switch, and returns the sum."""
    for row, exposed in zip(rows, exposed_s, strict=True):
        row["exposed_comm_s"] = exposed
        row["train_s"] = row["epochs"] * images / (batch * gpus) * (row["step_s"] + exposed) + row["switch_s"]
    return sum(row["train_s"] for row in rows)


def exposed_comm_s(config: Config, gpus: int) -> list[float]:
    """Returns the simulated seconds per step, for each size, that the exchange of gradients adds; 0 for one GPU."""
    if gpus == 1:
        return [0.0] * len(size_spans(config))
    point = simulate(config, cluster=find_recipe(config.recipe).cluster, gpus=[gpus]).points[0]
    return [span.exposed_comm_s for span in point.spans]


def measure(config: Config, *, gpus: int = 1, steps: int = STEPS, images: int = IMAGENET_SAMPLES) -> dict[str, Any]:
    """Returns the report. config: a recipe with its data. images: the size of the training set that it is about."""
    if len(config.schedule.batch_phases) > 1:
        raise InputError(f"{config.recipe} changes its batch, too: give --set batch_phases=0:N")
    if steps < SETTLING:
        raise InputError(f"--steps {steps}: give at least {SETTLING}, so that the switch can be told from the rest")
    batch, rest = divmod(config.global_batch, gpus)
    if rest:
        raise InputError(f"--gpus {gpus}: the batch of {config.global_batch} does not divide")
    spans, counts = size_spans(config), check_data(config.data)
    with tempfile.TemporaryDirectory(prefix="hyperbatch-schedule-") as scratch:
        out = Path(scratch) / "run"
        record = run(sliced(config, counts.train_samples, batch, steps).override(out=str(out)), Ranks())
        lines = [line for line in read_metrics(out) if line["event"] == "step"]
    rows = span_rows(spans, [line["time_s"] for line in lines], [line["data_wait_s"] for line in lines], batch)
    train_s = add_up(rows, images=images, batch=batch, gpus=gpus, exposed_s=exposed_comm_s(config, gpus))
    eval_s = record.clock["eval_s"] * EVAL_SAMPLES / counts.eval_samples / gpus
    return harness.result(
        "schedule",
        rows,
        recipe=config.recipe,
        gpus=gpus,
        measured="all" if gpus == 1 else "steps of one rank's share and switches; the exchange is simulated",
        batch_per_gpu=batch,
        images=images,
        images_at_hand=counts.train_samples,
        full_size_epochs=full_size_epochs(config),
        set_up_s=record.clock["init_s"],
        switches_s=sum(row["switch_s"] for row in rows[1:]),
        train_s=train_s,
        eval_s_each=eval_s,
        loader=record.data,
        warnings=list(record.warnings),
        config=config.to_dict(),
    )


def format_report(report: dict[str, Any]) -> str:
    lines = [
        f"{report['recipe']} on {report['gpus']} x {report['device']}, {report['batch_per_gpu']} images a GPU and "
        f"step; measured: {report['measured']}"
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['image_size']:>4} px  {row['epochs']:>5.1f} epochs  {row['images_per_s']:>9,.0f} images/s a GPU  "
            f"{row['train_s']:>8,.1f} s  switch {row['switch_s']:.2f} s  waits for data {row['data_wait_fraction']:.0%}"
        )
    lines.append(
        f"{report['train_s']:,.0f} s of training for {report['images']:,} images ({report['train_s'] / 60:.1f} "
        f"minutes, the pixels of {report['full_size_epochs']:.1f} epochs at 224 px), switches "
        f"{report['switches_s']:.1f} s; an evaluation of {EVAL_SAMPLES:,} images takes {report['eval_s_each']:.1f} s; "
        f"set-up {report['set_up_s']:.0f} s"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe with one batch phase, as `hyperbatch recipes` lists them")
    parser.add_argument("--data", help="folder of the data set")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of the run that is asked about [1]")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each image size [{STEPS}]")
    parser.add_argument("--images", type=int, default=IMAGENET_SAMPLES, help="of the training set [ImageNet's]")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any config field")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    known = {spec.name: spec for spec in fields()}
    given = dict(pair.split("=", 1) for pair in args.set)
    values = {name: known[name].parse(text) for name, text in given.items()}
    config = find_recipe(args.recipe).config().override(**values | ({"data": args.data} if args.data else {}))
    report = measure(config, gpus=args.gpus, steps=args.steps, images=args.images)
    print(strict_json(report) if args.json else format_report(report))


if __name__ == "__main__":
    main()
