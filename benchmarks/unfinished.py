"""The runs that the records still lack: lists them, or trains them on this machine for as long as there is time.

    python -m benchmarks.unfinished                                        # a line for each plan of the queue
    python -m benchmarks.unfinished --minutes 9 --data cifar10=DIR imagenette=DIR --tar rows.tar.gz

The queue is benchmarks/queue.toml. Plans whose data is not given are skipped. A plan's rows are in the newest folder
records/*_NAME, or else in records/DATE_NAME. Each plan runs in a process of its own, so that one that fails does not
end the others, and continues where it stopped. The tar holds the folders that have changed.
"""

from __future__ import annotations

import argparse
import datetime
import math
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperbatch.sweep.plan import load_plan
from hyperbatch.sweep.rows import PLAN, ROWS, of_plan, read_rows
from hyperbatch.sweep.table import points_of, progress

ROOT = Path(__file__).parents[1]
QUEUE = ROOT / "benchmarks" / "queue.toml"
GRACE_S = 60  # a run that has started may take this much longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A plan of the queue."""

    plan_file: Path
    folder: Path  # of its rows
    data: str | None
    options: tuple[str, ...]
    ranks: bool

    def progress(self) -> tuple[int, int]:
        """Returns (runs that are done, runs of the plan). Failed runs that the options repeat do not count as done."""
        plan = load_plan(self.plan_file, data=".")
        rows = of_plan(read_rows(self.folder), plan.every_run)
        done, planned = progress(plan, points_of(rows))
        return done - ("--retry-failed" in self.options) * sum(row.error is not None for row in rows), planned

    def run_cost_s(self) -> float:
        """The mean time of the runs that have a row; nan without one."""
        times = [row.wall_s for row in read_rows(self.folder) if row.error is None and row.wall_s is not None]
        return sum(times) / len(times) if times else math.nan

    def command(self, data: Mapping[str, str], seconds: float) -> list[str]:
        tool = ["benchmarks.shared_gpu"] if self.ranks else ["hyperbatch", "sweep"]
        words = [sys.executable, "-m", *tool, str(self.plan_file), "--out", str(self.folder), *self.options]
        words += [] if self.data is None else ["--data", data[self.data]]
        return [*words, "--until", f"{seconds:.0f}"]


def read_queue(path: Path = QUEUE, root: Path = ROOT) -> list[Waiting]:
    return [_waiting(root=root, **entry) for entry in tomllib.loads(path.read_text())["queue"]]


def _waiting(
    *, plan: str, data: str | None = None, options: Sequence[str] = (), ranks: bool = False, root: Path
) -> Waiting:
    records = root / "records"
    if (records / plan).is_dir():
        folder, plan_file = records / plan, records / plan / PLAN
    else:
        today = records / f"{datetime.date.today()}_{plan}"
        folder = max(records.glob(f"????-??-??_{plan}"), default=today)
        plan_file = root / "benchmarks" / "plans" / f"{plan}.toml"
    return Waiting(plan_file=plan_file, folder=folder, data=data, options=tuple(options), ranks=ranks)


def run_queue(queue: Sequence[Waiting], data: Mapping[str, str], end: float) -> list[Path]:
    """Trains missing runs until `end` (of time.monotonic). Returns the folders that have new rows."""
    changed = []
    for waiting in queue:
        left = end - time.monotonic()
        done, planned = waiting.progress()
        if left <= 0 or done >= planned or (waiting.data is not None and waiting.data not in data):
            continue
        print(f"== {waiting.folder.name}: {done} of {planned} runs are done, {left:.0f} s left", flush=True)
        before = len(read_rows(waiting.folder))
        try:
            subprocess.run(waiting.command(data, left), check=False, cwd=ROOT, timeout=left + GRACE_S)
        except subprocess.TimeoutExpired:
            print(f"{waiting.folder.name}: ended after {left + GRACE_S:.0f} s; its rows are kept", flush=True)
        if len(read_rows(waiting.folder)) > before:
            changed.append(waiting.folder)
    return changed


def listing(queue: Sequence[Waiting]) -> str:
    lines = []
    for waiting in queue:
        done, planned = waiting.progress()
        cost_s = waiting.run_cost_s()
        cost = "no run was timed" if math.isnan(cost_s) else f"{cost_s:.0f} s a run, {cost_s * (planned - done):.0f} s"
        lines.append(f"{done:>4} of {planned:<4} {waiting.folder.name}  ({waiting.data or 'no data'}; {cost})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="runs the queue, and begins no run after this many minutes")
    parser.add_argument("--data", nargs="*", default=[], metavar="NAME=DIR", help="the folder of each data set")
    parser.add_argument("--tar", type=Path, help="file for the folders that have changed")
    args = parser.parse_args(arguments)
    queue = read_queue()
    if args.minutes is None:
        print(listing(queue))
        return
    data = dict(pair.partition("=")[::2] for pair in args.data)
    if not all(data.values()):
        parser.error("--data takes NAME=DIR, such as cifar10=data/cifar10")
    changed = run_queue(queue, data, time.monotonic() + 60 * args.minutes)
    if args.tar:
        with tarfile.open(args.tar, "w:gz") as file:
            for folder in changed:
                file.add(folder, arcname=str(folder.relative_to(ROOT)))
    print(listing([waiting for waiting in queue if (waiting.folder / ROWS).exists()]))


if __name__ == "__main__":
    main()
