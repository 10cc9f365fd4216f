"""Random faults, one after another: python -m benchmarks.soak [--faults N] [--jobs J] [--device cuda] [--out FILE]
[--FIELD VALUE ...]

Runs of `digits` are hit by random faults at random steps and ranks (tests/dist/injector.py), continue by themselves,
and must end with the weights, statistics and optimizer state of an undisturbed run, bit for bit. Prints one JSON
object:

    rows    one for each fault: kind, rank, step; seconds from the fault until all ranks had ended (stop_s), rank 0's
            process was started again (begin_s), had loaded torch and joined the others (joined_s), was set up
            (ready_s), and its first step was done (again_s); lost_steps: done before the fault, and done again
    runs    each run's faults, whether its end is bit-equal, processes and files that were left behind
    kinds   the rows by kind; `--table FILE.json` prints them as Markdown

    by command  (the default on CPUs)  hyperbatch train --nproc N --max-restarts; a command that was killed or was
                preempted is started again with --resume auto, as a cluster would
    by rank     (--by-rank; --device cuda: NCCL ranks that share one GPU)  one process per rank; when all have ended,
                all are started again, as a scheduler would

Runs are independent, so several can run at the same time (--jobs). A soak that is started again with the same --out
makes the rest of its --faults.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.soak_runs import RUN, OutOfTime, small_disk, train  # it also puts the test tree on the path
from hyperbatch.record import commit, strict_json

# isort: split
from injector import KINDS, TO_COMMAND, Fault
from toy import same_bits

FIRST_STEP, LAST_STEP = 12, 125  # all faults of a run are between these steps; it has 135


def plans(count: int, per_run: int, nproc: int, kinds: list[str], draw: random.Random) -> Iterator[list[Fault]]:
    """Yields random faults. Every kind occurs once before one occurs again."""
    deck: list[str] = []
    while count > 0:
        chosen = []
        for _ in range(min(per_run, count)):
            deck = deck or draw.sample(kinds, len(kinds))
            chosen.append(deck.pop())
        count -= len(chosen)
        # This fault hits an attempt that is starting, so it comes first, or after a fault that ends an attempt.
        chosen.sort(key=lambda kind: kind == "full disk")
        # Faults are so far apart that the run has recovered from each before the next one.
        width = (LAST_STEP - 25 - FIRST_STEP) // len(chosen)
        steps = [FIRST_STEP + i * width + draw.randrange(max(1, width - 8)) for i in range(len(chosen))]
        yield [
            Fault(
                kind,
                0 if kind in ("kill rank 0", "kill in write", "full disk") else draw.randrange(nproc),
                step,
                draw.random(),
            )
            for kind, step in zip(chosen, steps, strict=True)
        ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median and the maximum of each kind."""
    found: dict[str, Any] = {}
    for kind in sorted({row["kind"] for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        found[kind] = {"faults": len(own), "bit_equal": sum(row["bit_equal"] for row in own)}
        for name in ("stop_s", "again_s", "lost_steps"):
            values = [row[name] for row in own if row[name] is not None]
            found[kind][name] = [statistics.median(values), max(values)] if values else None
    return found


def table(result: dict[str, Any]) -> str:
    """Formats the result as Markdown: medians, and the maxima in brackets."""
    lines = [
        "| fault | times | until all ranks had ended | until training went on | steps done again | bit-equal |",
        "|---|---|---|---|---|---|",
    ]

    def pair(values: list[float] | None, unit: str, digits: int) -> str:
        return "no stop" if values is None else f"{values[0]:.{digits}f} ({values[1]:.{digits}f}){unit}"

    for kind, row in result["kinds"].items():
        cells = [pair(row["stop_s"], " s", 1), pair(row["again_s"], " s", 1), pair(row["lost_steps"], "", 0)]
        lines.append(f"| {kind} | {row['faults']} | {' | '.join(cells)} | {row['bit_equal']} of {row['faults']} |")
    return "\n".join(lines)


class Soak:
    """Makes runs in parallel, and collects their results so far."""

    def __init__(self, args: argparse.Namespace, arguments: list[str], scratch: Path) -> None:
        on_gpu = args.device == "cuda"
        by_rank = args.by_rank or on_gpu
        arguments = ["--device", args.device, *(["--deterministic"] if on_gpu else []), *arguments]
        self.args, self.scratch, self.began = args, scratch, time.monotonic()
        self.deadline = self.began + 60 * args.minutes if args.minutes else float("inf")
        self.options: dict[str, Any] = {"nproc": args.nproc, "by_rank": by_rank, "arguments": arguments}
        # The settings that a continued soak must have in common with this one.
        self.same = {
            "command": " ".join(RUN + arguments),
            "ranks": args.nproc,
            "started": "one process per rank" if by_rank else "by the command",
            "seed": args.seed,
        }
        with small_disk(scratch / "probe") as can_fill:
            here = [kind for kind in args.kinds or KINDS if can_fill or kind != "full disk"]
        self.kinds = [kind for kind in here if not (by_rank and kind in TO_COMMAND)]
        self.runs, self.before_s = self._earlier()
        self._longest_s, self._lock = 0.0, threading.Lock()

    def _earlier(self) -> tuple[dict[int, dict[str, Any]], float]:
        """Returns the runs in the file, by number, and the seconds that they took."""
        if self.args.out is None or not self.args.out.exists():
            return {}, 0.0
        file = json.loads(self.args.out.read_text())
        if other := [name for name, value in self.same.items() if file[name] != value]:
            raise SystemExit(f"{self.args.out} is a soak with another {' and '.join(other)}; choose another --out")
        runs = {run["number"]: {**run, "faults": []} for run in file["runs"]}
        for row in file["rows"]:
            runs[row["run"]]["faults"].append(row)
        return runs, file["seconds"]

    def go(self) -> dict[str, Any]:
        args = self.args
        drawn = plans(args.faults, args.per_run, args.nproc, self.kinds, random.Random(args.seed))
        left = [(number, faults) for number, faults in enumerate(drawn) if number not in self.runs]
        if left:
            with ThreadPoolExecutor(args.jobs) as pool:
                plain = pool.submit(train, self.scratch / "plain", [], deadline=self.deadline, **self.options)
                for done in [pool.submit(self._run, number, faults, plain) for number, faults in left]:
                    done.result()
        return self.result()

    def _run(self, number: int, faults: list[Fault], plain: Future[Any]) -> None:
        """Makes one run in a thread of the pool. A run is not started if it would end after the deadline, estimated by
        the longest so far. A run that does not end in time is not counted."""
        began, folder = time.monotonic(), self.scratch / f"run{number}"
        if began + self._longest_s > self.deadline:
            return
        try:
            run, ends_with = train(folder, faults, deadline=self.deadline, **self.options)
            _, wanted = plain.result()
        except OutOfTime:
            return
        run |= {"number": number, "bit_equal": same_bits(ends_with, wanted), "commit": commit()}
        shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self._longest_s = max(self._longest_s, time.monotonic() - began)
            self.runs[number] = run
            result = self.result()
            if self.args.out:
                self.args.out.write_text(strict_json(result, indent=1) + "\n")
            print(f"{result['faults']} faults, {result['lost']} runs lost", file=sys.stderr, flush=True)

    def result(self) -> dict[str, Any]:
        import torch

        runs = [self.runs[number] for number in sorted(self.runs)]
        rows = [row | {"run": run["number"], "bit_equal": run["bit_equal"]} for run in runs for row in run["faults"]]
        bad = [run for run in runs if not run["bit_equal"] or run["left_processes"] or run["made"] != run["planned"]]
        return {
            "bench": "soak",
            "device": torch.cuda.get_device_name(0) if self.args.device == "cuda" else f"{os.cpu_count()} CPU cores",
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            **self.same,
            "jobs": self.args.jobs,
            "faults": len(rows),
            "lost": len(bad),  # runs with a different end or a left process, or with fewer faults than planned
            "seconds": round(self.before_s + time.monotonic() - self.began, 1),
            "kinds": summary(rows),
            "rows": rows,
            "runs": [{name: value for name, value in run.items() if name != "faults"} for run in runs],
        }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60, help="in all, with those that --out has already")
    parser.add_argument("--per-run", type=int, default=5, help="faults that hit one run")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--minutes", type=float, default=0, help="to be over by then; 0: any number")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="of faults; all by default")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--by-rank", action="store_true", help="one process per rank on CPUs, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the result here, after every run; continue what is there")
    parser.add_argument("--table", type=Path, help="print the table of a result file and do nothing else")
    args, arguments = parser.parse_known_args(words)
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return 0
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        result = Soak(args, arguments, Path(scratch)).go()
    print(strict_json(result, indent=1))
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
