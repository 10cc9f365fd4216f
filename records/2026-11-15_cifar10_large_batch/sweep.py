"""Trains the arms of this record one after another in one process and appends a row as each ends.

    python sweep.py DATA ROWS [--until SECONDS]      DATA: CIFAR-10; rows that are in ROWS already are not run again

Every arm is `hyperbatch train cifar10_resnet --data DATA` with the overrides of its row, at a fixed number of epochs
and with a rate that is given, not scaled.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

import hyperbatch
from hyperbatch import BatchPhase, RunFailed

COMMON = {
    "epochs": 30.0,
    "lr_scaling": "none",
    "warmup_epochs": 6.0,
    "eval_every_epochs": 10.0,
    "stop_at_target": False,
    "checkpoint_every_epochs": 0.0,
    "nproc": 1,
    "log_every_steps": 10,
}
SETTINGS = ("optimizer", "batch", "lr", "trust_coefficient", "seed")
# Peak rates that are tried on one seed. LARS moves a layer by rate x trust coefficient of its own length in a step, and
# norm parameters and biases by the rate itself, so both are varied: first the rate, at the recipe's trust of 0.02.
RATES = {
    ("lars", 8192): [2.0, 4.0, 8.0, 16.0],
    ("sgd", 8192): [0.8, 1.6, 3.2, 6.4],
    ("lars", 16384): [4.0, 8.0, 16.0, 32.0],
    ("sgd", 16384): [0.8, 1.6, 3.2, 6.4],
    ("lars", 256): [0.5, 1.0, 2.0],
    ("sgd", 256): [0.05, 0.1, 0.2],
    ("lars", 4096): [2.0, 4.0, 8.0],
    ("sgd", 4096): [0.8, 1.6, 3.2],
}
# Then the trust coefficient, at the recipe's rate of 1; SGD, which has none, gets as many lower rates.
TRUSTS = {8192: [0.04, 0.08, 0.16], 16384: [0.08, 0.16, 0.32]}
LOWER = {8192: [0.1, 0.2, 0.4], 16384: [0.1, 0.2, 0.4]}


def arms() -> list[dict[str, object]]:
    """The tuning runs, in the order in which they are made."""
    found: list[dict[str, object]] = []
    for (rule, batch), rates in RATES.items():
        found += [{"optimizer": rule, "batch": batch, "lr": lr, "seed": 0} for lr in rates]
        if batch == 16384 and rule == "sgd":
            for large, trusts in TRUSTS.items():
                same = {"optimizer": "lars", "batch": large, "lr": 1.0, "seed": 0}
                found += [{**same, "trust_coefficient": trust} for trust in trusts]
                found += [{"optimizer": "sgd", "batch": large, "lr": lr, "seed": 0} for lr in LOWER[large]]
    return found


def train(data: str, arm: dict[str, object]) -> dict[str, object]:
    values = {name: value for name, value in arm.items() if name != "batch"}
    with tempfile.TemporaryDirectory() as folder:
        phases = (BatchPhase(0, arm["batch"]),)
        config = hyperbatch.get_recipe("cifar10_resnet").build()
        config = config.override(**COMMON, **values, data=data, batch_phases=phases, lr_batch=0, out=f"{folder}/run")
        start_s = time.perf_counter()
        try:
            record = hyperbatch.train(config)
        except RunFailed as error:
            return {**arm, "top1": None, "error": str(error)}
        result = record.result
        return {
            **arm,
            "top1": result.top1,
            "steps": result.steps,
            "train_s": round(result.train_s, 2),
            "wall_s": round(time.perf_counter() - start_s, 2),
            "warnings": record.warnings,
            "device": record.environment["device"],
            "torch": torch.__version__,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--until", type=float, default=float("inf"), help="begin no run after so many seconds")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th arm from the K-th, for N processes side by side")
    options = parser.parse_args()
    start_s, (part, parts) = time.perf_counter(), map(int, options.part.split("/"))
    done = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    for arm in arms()[part::parts]:
        if any({name: row[name] for name in row if name in SETTINGS} == arm for row in done):
            continue
        if time.perf_counter() - start_s > options.until:
            break
        row = train(options.data, arm)
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
