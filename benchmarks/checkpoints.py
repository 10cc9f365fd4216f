"""What checkpoints cost a run: python -m benchmarks.checkpoints [RECIPE] [--nproc N] [--rounds N] [--FIELD VALUE ...]

The same run without checkpoints ("off"), with checkpoints that are written beside training ("beside": as it is), and
with a run that waits for each write ("waiting": as it was), one after the other, round after round. One JSON object:

    stall_share     seconds that the steps waited for checkpoints, over the seconds of the run
    end_s           seconds that the run's end waited for the last write
    whole_s         training, evaluation and pauses together: what the thread takes away from training shows here
    over_off        whole_s over that of "off", median of the rounds
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hyperbatch.config import Config, fields
from hyperbatch.recipes import find_recipe
from hyperbatch.record import strict_json

KINDS = ("off", "beside", "waiting")


def one(kind: str, config: Config, result: Path) -> None:
    """A rank of a run; rank 0 writes what it took."""
    from hyperbatch.engine.ranks import find_ranks
    from hyperbatch.engine.saver import Saver
    from hyperbatch.launch import train

    spent = {"save": 0.0, "wait": 0.0}
    calls = []
    save, wait = Saver.save, Saver.wait
    inside = []

    def timed_save(self: Saver) -> None:
        start = time.perf_counter()
        inside.append(1)
        save(self)
        if kind == "waiting":
            wait(self)
        inside.pop()
        calls.append(time.perf_counter() - start)
        spent["save"] += calls[-1]

    def timed_wait(self: Saver) -> bool:
        start = time.perf_counter()
        done = wait(self)
        if not inside:
            spent["wait"] += time.perf_counter() - start
        return done

    Saver.save, Saver.wait = timed_save, timed_wait
    ranks, record = find_ranks(), train(config)
    if ranks is None or ranks.rank != 0:  # the others wait for nothing and write nothing
        return
    clock = record.clock
    whole_s = clock["train_s"] + clock["capture_s"] + clock["eval_s"] + clock["pause_s"]
    sizes = [path.stat().st_size for path in (Path(record.folder) / "checkpoints").glob("step-*.pt")]
    row = {
        "kind": kind,
        "steps": record.result.steps,
        "checkpoints": len(calls) if sizes else 0,
        "bytes": max(sizes, default=0),
        "stall_s": spent["save"] if sizes else 0.0,
        "stall_share": spent["save"] / whole_s if sizes else 0.0,
        "longest_stall_s": max(calls) if sizes else 0.0,
        "end_s": spent["wait"],
        "train_s": clock["train_s"],
        "whole_s": whole_s,
        "device": record.environment["device"],
        "torch": record.environment["torch"],
    }
    result.write_text(json.dumps(row))


def measured(kind: str, recipe: str, values: dict[str, str], nproc: int) -> dict[str, Any]:
    """A run of its own processes."""
    with tempfile.TemporaryDirectory(prefix="hyperbatch-checkpoints-", dir=Path.cwd()) as folder:
        result = Path(folder) / "result.json"
        values = {**values, "out": str(Path(folder) / "run"), "stop_at_target": "false"}
        if kind == "off":
            values["keep_checkpoints"] = "0"
        order = json.dumps({"kind": kind, "recipe": recipe, "values": values, "result": str(result)})
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m", __spec__.name]
        done = subprocess.run([sys.executable, *words, "--one", order], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(result.read_text())


def configured(recipe: str, values: dict[str, str]) -> Config:
    known = {spec.name: spec for spec in fields()}
    return find_recipe(recipe).config().override(**{name: known[name].parse(text) for name, text in values.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="digits")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.one:
        order = json.loads(args.one)
        one(order["kind"], configured(order["recipe"], order["values"]), Path(order["result"]))
        return
    values = {flag.removeprefix("--").replace("-", "_"): text for flag, text in zip(rest[::2], rest[1::2], strict=True)}
    configured(args.recipe, values)  # a mistake is told before anything starts
    rows = []
    for _ in range(args.rounds):
        for kind in KINDS:
            rows.append(measured(kind, args.recipe, values, args.nproc))
            print(rows[-1], file=sys.stderr, flush=True)
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    summary = {
        kind: {
            "stall_share": statistics.median(row["stall_share"] for row in found),
            "longest_stall_s": max(row["longest_stall_s"] for row in found),
            "end_s": statistics.median(row["end_s"] for row in found),
            "whole_s": statistics.median(row["whole_s"] for row in found),
            "over_off": statistics.median(
                row["whole_s"] / off["whole_s"] for row, off in zip(found, by_kind["off"], strict=True)
            ),
        }
        for kind, found in by_kind.items()
    }
    print(strict_json({"recipe": args.recipe, "nproc": args.nproc, "values": values, "summary": summary, "rows": rows}))


if __name__ == "__main__":
    main()
