"""Faults without end: python -m benchmarks.soak [--faults N] [--device cuda] [--out FILE.json] [--FIELD VALUE ...]

Runs of `digits` are hit by random faults at random steps and ranks (tests/dist/injector.py), go on by themselves, and
must end with the weights, statistics and optimizer state of an undisturbed run, bit for bit. One JSON object:

    rows    one for each fault: kind, rank, step; stop_s: until all ranks had ended; again_s: until the first step after
            it was done; lost_steps: done before it, and done again
    runs    each run's faults, whether its end is bit-equal, processes and files that were left behind
    kinds   the rows by kind; `--table FILE.json` prints them as Markdown

    by command  (the default on CPUs)  hyperbatch train --nproc N --max-restarts; a command that was killed or was
                preempted is started again with --resume auto, as a cluster would
    by rank     (--device cuda: NCCL ranks that share one GPU)  one process per rank; when all have ended, all are
                started again, as a scheduler would
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "dist"))
sys.path.append(str(ROOT / "tests"))

from harness import one_gpu  # noqa: E402
from injector import KINDS, TO_COMMAND, Fault  # noqa: E402

from hyperbatch.record import commit, strict_json  # noqa: E402

TIMEOUT_S = 6.0  # --timeout-s: a rank that is stopped or hangs is given up after it
ATTEMPTS = 60  # of a run, at most
LIMIT_S = 600.0  # for an attempt: it has got stuck
DISK_BYTES = 24 << 20
RUN = [
    *("train", "digits", "--model", "injector:model", "--epochs", "7", "--warmup-epochs", "1", "--decay-epochs", "6"),
    *("--target-top1", "none", "--checkpoint-every-steps", "10", "--max-rollbacks", "0", "--resume", "auto"),
    *("--timeout-s", str(TIMEOUT_S)),
]
FIRST_STEP, LAST_STEP = 12, 125  # between which all faults of a run are made; it has 135


@dataclass(slots=True)
class Attempts:
    """A run: attempt after attempt until it is over."""

    folder: Path
    nproc: int
    by_rank: bool
    arguments: list[str]
    ends: list[float] = field(default_factory=list)  # when all ranks of an attempt had ended

    @property
    def out(self) -> Path:
        return self.folder / "disk" / "run"

    def go(self, faults: list[Fault]) -> None:
        (self.folder / "plan.json").write_text(json.dumps([fault.to_dict() for fault in faults]))
        (self.folder / "tmp").mkdir()
        for _ in range(ATTEMPTS):
            codes = self._by_rank() if self.by_rank else self._by_command()
            self.ends.append(time.time())
            if all(code == 0 for code in codes):
                return
        raise AssertionError(f"the run has not come to its end in {ATTEMPTS} attempts:\n{self.said()}")

    def said(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("*.log")))

    def _environ(self, **values: str) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "dist"), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": path, "FAULTS": str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        return {**os.environ, "OMP_NUM_THREADS": "1", **own, **values}

    def _words(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "hyperbatch", *RUN, "--out", str(self.out), *more, *self.arguments]

    def _by_command(self) -> list[int]:
        words = self._words("--nproc", str(self.nproc), "--max-restarts", str(ATTEMPTS))
        with (
            open(self.folder / "command.log", "a") as log,
            subprocess.Popen(words, env=self._environ(), stderr=subprocess.PIPE, stdout=log, text=True) as command,
        ):
            assert command.stderr is not None
            for line in command.stderr:  # until the command and its ranks have gone
                log.write(line)
                log.flush()
                if "; restart " in line:
                    self.ends.append(time.time())
            return [command.wait()]

    def _by_rank(self) -> list[int]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = []
        for rank in range(self.nproc):
            place = {"RANK": str(rank), "WORLD_SIZE": str(self.nproc), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **one_gpu(rank)}
            with open(self.folder / f"rank{rank}.log", "a") as log:
                ranks.append(subprocess.Popen(self._words(), env=self._environ(**place), stdout=log, stderr=log))
        deadline = time.monotonic() + LIMIT_S
        try:
            while any(rank.poll() is None for rank in ranks):
                stopped = [rank for rank in ranks if rank.poll() is None]
                # Only other ranks of its host could have ended a stopped one, and here each has a host of its own.
                if len(stopped) < len(ranks) and all(state_of(rank.pid) == "T" for rank in stopped):
                    for rank in stopped:
                        rank.kill()
                if time.monotonic() > deadline:
                    raise AssertionError(f"an attempt has not ended in {LIMIT_S:g} s:\n{self.said()}")
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [rank.returncode for rank in ranks]

    def rows(self, faults: list[Fault]) -> list[dict[str, Any]]:
        """What each fault has cost."""
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        events.sort(key=lambda event: event["time"])
        steps = [event for event in events if event["event"] == "step" and event["rank"] == 0]
        rows = []
        for made in [event for event in events if event["event"] == "fault"]:
            fault, at = faults[made["number"]], made["time"]
            before = [step for step in steps if step["time"] <= at]
            pid = before[-1]["pid"] if before else None
            keeps_going = fault.kind == "full disk"
            after = [step for step in steps if step["time"] > at and (keeps_going or step["pid"] != pid)]
            end = next((end for end in self.ends if end >= at), None)
            # A run whose weights were spoilt goes on for a while; a preempted one does, too, and saves what it did.
            undone = [step["step"] for step in steps if step["pid"] == pid]
            lost = 0 if keeps_going or not undone or not after else max(undone) - (after[0]["step"] - 1)
            rows.append(
                {
                    "kind": fault.kind,
                    "rank": fault.rank,
                    "step": made["step"],
                    "stop_s": None if keeps_going or end is None else round(end - at, 2),
                    "again_s": round(after[0]["time"] - at, 2) if after else None,
                    "lost_steps": lost,
                }
            )
        return rows


def state_of(pid: int) -> str:
    """ "T": stopped; empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def left_processes(folder: Path) -> int:
    """That were started for a run and are still there."""
    sign, count = f"FAULTS={folder}".encode(), 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            count += sign in path.read_bytes().split(b"\0")
    return count


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own, which can be filled; False: nobody may make one here."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    made = shutil.which("mount") is not None and not subprocess.run(words, capture_output=True, check=False).returncode
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def state(out: Path) -> dict[str, Any]:
    from toy import flat_weights

    return flat_weights(out)


def train(
    folder: Path, faults: list[Fault], *, nproc: int, by_rank: bool, arguments: list[str]
) -> tuple[dict[str, Any], Any]:
    """One run: its rows and what it left; and its final state."""
    run = Attempts(folder, nproc, by_rank, arguments)
    with small_disk(folder / "disk") as can_fill:
        if not can_fill:
            faults = [fault for fault in faults if fault.kind != "full disk"]
        run.go(faults)
        made = len(list(folder.glob("made-*")))
        left = sorted(path.name for path in (run.out / "checkpoints").glob("*.partial"))
        left += sorted(path.name for path in (folder / "tmp").iterdir())
        rows = run.rows(faults)
        result = {"faults": rows, "planned": len(faults), "made": made, "attempts": len(run.ends)}
        return result | {"left_processes": left_processes(folder), "left_files": left}, state(run.out)


def plans(count: int, per_run: int, nproc: int, kinds: list[str], draw: random.Random) -> Iterator[list[Fault]]:
    """Random faults; every kind comes before one comes again."""
    deck: list[str] = []
    while count > 0:
        chosen = []
        for _ in range(min(per_run, count)):
            deck = deck or draw.sample(kinds, len(kinds))
            chosen.append(deck.pop())
        count -= len(chosen)
        # It hits an attempt that begins, so it comes first or after a fault that ends one.
        chosen.sort(key=lambda kind: kind == "full disk")
        # Far enough apart that each has been answered before the next one comes.
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
    """Median and maximum of each kind."""
    found: dict[str, Any] = {}
    for kind in sorted({row["kind"] for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        found[kind] = {"faults": len(own), "bit_equal": sum(row["bit_equal"] for row in own)}
        for name in ("stop_s", "again_s", "lost_steps"):
            values = [row[name] for row in own if row[name] is not None]
            found[kind][name] = [statistics.median(values), max(values)] if values else None
    return found


def table(result: dict[str, Any]) -> str:
    """As Markdown: medians, and the longest in brackets."""
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


def soak(args: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    by_rank = args.device == "cuda"
    arguments = ["--device", args.device, *(["--deterministic"] if by_rank else []), *arguments]
    kinds = [kind for kind in args.kinds or KINDS if not (by_rank and kind in TO_COMMAND)]
    draw, began = random.Random(args.seed), time.monotonic()
    options: dict[str, Any] = {"nproc": args.nproc, "by_rank": by_rank, "arguments": arguments}
    runs: list[dict[str, Any]] = []

    def so_far() -> dict[str, Any]:
        import torch

        rows = [row | {"bit_equal": run["bit_equal"]} for run in runs for row in run["faults"]]
        bad = [run for run in runs if not run["bit_equal"] or run["left_processes"] or run["made"] != run["planned"]]
        device = torch.cuda.get_device_name(0) if by_rank else f"{os.cpu_count()} CPU cores"
        return {
            "bench": "soak",
            "device": device,
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "commit": commit(),
            "command": " ".join(RUN + arguments),
            "ranks": args.nproc,
            "started": "one process per rank" if by_rank else "by the command",
            "seed": args.seed,
            "faults": len(rows),
            "lost": len(bad),  # runs whose end differs, that left a process, or met fewer faults than planned
            "seconds": round(time.monotonic() - began, 1),
            "kinds": summary(rows),
            "rows": rows,
            "runs": [{name: value for name, value in run.items() if name != "faults"} for run in runs],
        }

    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        (Path(scratch) / "plain").mkdir()
        plain, wanted = train(Path(scratch) / "plain", [], **options)
        assert plain["attempts"] == 1
        for index, faults in enumerate(plans(args.faults, args.per_run, args.nproc, kinds, draw)):
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                break
            folder = Path(scratch) / f"run{index}"
            folder.mkdir()
            run, ends_with = train(folder, faults, **options)
            run["bit_equal"] = same(ends_with, wanted)
            runs.append(run)
            shutil.rmtree(folder, ignore_errors=True)
            if args.out:
                args.out.write_text(strict_json(so_far(), indent=1) + "\n")
            print(f"{sum(len(run['faults']) for run in runs)} faults, {so_far()['lost']} runs lost", file=sys.stderr)
    return so_far()


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    from toy import same_bits

    return same_bits(left, right)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--per-run", type=int, default=5, help="faults that hit one run")
    parser.add_argument("--minutes", type=float, default=0, help="begin no further run after so many; 0: any number")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="of faults; all by default")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the result here, after every run")
    parser.add_argument("--table", type=Path, help="print the table of a result file and do nothing else")
    args, arguments = parser.parse_known_args(words)
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return 0
    result = soak(args, arguments)
    print(strict_json(result, indent=1))
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
