"""The cost of checkpoints and of the comparison of ranks: python -m benchmarks.checkpoints [RECIPE] [--nproc N]
[--rounds N] [--quiet CORES] [--out FILE] [--FIELD VALUE ...]

In every round, the same run is made in several kinds, one after the other:

    off             no checkpoints, and the ranks are not compared
    hash            ranks are compared by the checksums of their weights and optimizer state
    checkpoints     checkpoints are written while training continues
    both            the default of a run
    waiting         as "both", but the run waits for each write

Prints one JSON object with a row for every run, and the medians of each kind over the rounds. All times are rank 0's:

    stall_share     seconds that the steps waited for checkpoints, over the seconds of the run
    hash_share      seconds of the checksums, over the seconds of the run
    compare_share   seconds of whole comparisons over those of the run: the checksums, the check for values that are not
                    finite, which every kind makes, and an all-gather, in which rank 0 waits for the other ranks
    end_s           seconds that the run's end waited for the last write
    whole_s         training, evaluation and pauses together, including time that the thread takes away from training
    over_off        whole_s over that of "off" in the same round; the noise is that between two runs of one kind
    others_cores    CPU cores that other programs used meanwhile. With --quiet CORES a run starts once they use fewer;
                    if they used more during it, it is repeated, and the first one is listed under "disturbed"
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from hyperbatch.config import Config, fields
from hyperbatch.recipes import find_recipe
from hyperbatch.record import commit, strict_json

NO_HASH, NO_CHECKPOINTS = {"compare_every_steps": "0"}, {"keep_checkpoints": "0"}
KINDS = {
    "off": NO_HASH | NO_CHECKPOINTS,
    "hash": NO_CHECKPOINTS,
    "checkpoints": NO_HASH,
    "both": {},
    "waiting": {},
}
MEDIANS = ("stall_share", "hash_share", "compare_share", "end_s", "whole_s")

T = TypeVar("T")


class Timed:
    """Records the seconds of each call of a function."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def __call__(self, function: Callable[..., T]) -> Callable[..., T]:
        def run(*args: Any) -> T:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.calls.append(time.perf_counter() - start)

        return run


def synchronised(function: Callable[[torch.Tensor], T]) -> Callable[[torch.Tensor], T]:
    """Adds a wait for the device to a function. Before an evaluation or a checkpoint the host waits in any case."""

    def run(tensor: torch.Tensor) -> T:
        result = function(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return result

    return run


def one(kind: str, config: Config, result: Path) -> None:
    """Runs one rank of a run. Rank 0 writes the measured times."""
    from hyperbatch.engine import guard
    from hyperbatch.engine.guard import Guard
    from hyperbatch.engine.ranks import find_ranks
    from hyperbatch.engine.saver import Saver
    from hyperbatch.launch import train

    stalls, ends, sums, compared, started = (Timed() for _ in range(5))
    save, wait, word_sum = Saver.save, Saver.wait, sums(synchronised(guard.word_sum))

    def stalling(self: Saver) -> None:
        self.wait = lambda: wait(self)  # inside a stall this wait does not count as the end's
        save(self)
        if kind == "waiting":
            wait(self)
        del self.wait

    def summing(flat: torch.Tensor) -> torch.Tensor:
        if flat.is_cuda:
            torch.cuda.synchronize()  # work that was queued before must not count for the sum
        return word_sum(flat)

    Saver.save, Saver.wait = stalls(stalling), ends(wait)
    Guard.check, guard.word_sum = compared(Guard.check), summing
    Guard._start = started(Guard._start)  # `check` returns at once if the step was already checked
    ranks, record = find_ranks(), train(config)
    if ranks is None or ranks.rank != 0:  # the other ranks wait for nothing and write nothing
        return
    clock = record.clock
    whole_s = clock["train_s"] + clock["capture_s"] + clock["eval_s"] + clock["pause_s"]
    sizes = [path.stat().st_size for path in (Path(record.folder) / "checkpoints").glob("step-*.pt")]
    row = {
        "kind": kind,
        "steps": record.result.steps,
        "checkpoints": len(stalls.calls) if sizes else 0,
        "bytes": max(sizes, default=0),
        "comparisons": len(started.calls),
        "stall_s": sum(stalls.calls),
        "stall_share": sum(stalls.calls) / whole_s,
        "longest_stall_s": max(stalls.calls),
        "hash_s": sum(sums.calls),
        "hash_share": sum(sums.calls) / whole_s,
        "compare_s": sum(compared.calls),
        "compare_share": sum(compared.calls) / whole_s,
        "end_s": sum(ends.calls),
        "train_s": clock["train_s"],
        "whole_s": whole_s,
        "device": record.environment["device"],
        "torch": record.environment["torch"],
    }
    result.write_text(json.dumps(row))


def measured(kind: str, recipe: str, values: dict[str, str], nproc: int) -> dict[str, Any]:
    """Makes one run in separate processes."""
    with tempfile.TemporaryDirectory(prefix="hyperbatch-checkpoints-", dir=Path.cwd()) as folder:
        result = Path(folder) / "result.json"
        values = {**values, "out": str(Path(folder) / "run"), "stop_at_target": "false", **KINDS[kind]}
        order = json.dumps({"kind": kind, "recipe": recipe, "values": values, "result": str(result)})
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m", __spec__.name]
        others = others_cores()
        done = subprocess.run([sys.executable, *words, "--one", order], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(result.read_text()) | {"others_cores": round(others(), 2)}


def others_cores() -> Callable[[], float]:
    """Starts to count the CPU cores that other programs use. The returned function returns their average number."""
    start, before_s = time.monotonic(), _others_s()
    return lambda: (_others_s() - before_s) / (time.monotonic() - start)


def _others_s() -> float:
    """Seconds of all cores that other programs used, without this one and the programs that it has started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    all_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return all_s - sum(used.ru_utime + used.ru_stime for used in own)


def wait_for_quiet(cores: float) -> None:
    busy = cores < float("inf")
    while busy:
        others = others_cores()
        time.sleep(2.0)
        busy = others() > cores


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    return {
        kind: {name: statistics.median(row[name] for row in found) for name in MEDIANS}
        | {
            "longest_stall_s": max(row["longest_stall_s"] for row in found),
            "over_off": statistics.median(
                row["whole_s"] / off["whole_s"] for row, off in zip(found, by_kind["off"], strict=True)
            ),
        }
        for kind, found in by_kind.items()
    }


def configured(recipe: str, values: dict[str, str]) -> Config:
    known = {spec.name: spec for spec in fields()}
    return find_recipe(recipe).config().override(**{name: known[name].parse(text) for name, text in values.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="digits")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=float("inf"), help="cores that other programs may use meanwhile")
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.one:
        order = json.loads(args.one)
        one(order["kind"], configured(order["recipe"], order["values"]), Path(order["result"]))
        return
    values = {flag.removeprefix("--").replace("-", "_"): text for flag, text in zip(rest[::2], rest[1::2], strict=True)}
    configured(args.recipe, values)  # reports a mistake before anything starts
    rows, disturbed = [], []
    for number in range(args.rounds):
        # Every second round is reversed, so that a machine that becomes faster or slower meanwhile favours no kind.
        for kind in list(KINDS)[:: -1 if number % 2 else 1]:
            while True:
                wait_for_quiet(args.quiet)
                row = measured(kind, args.recipe, values, args.nproc) | {"round": number}
                print(row, file=sys.stderr, flush=True)
                if row["others_cores"] <= args.quiet:
                    break
                disturbed.append(row)
            rows.append(row)
    result = {
        "bench": "checkpoints",
        "commit": commit(),
        "recipe": args.recipe,
        "nproc": args.nproc,
        "values": values,
        "summary": summary(rows),
        "rows": rows,
        "disturbed": disturbed,
    }
    text = strict_json(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
