"""One run of the soak (benchmarks/soak.py): attempt after attempt until it has ended, and the cost of each fault."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "dist"))
sys.path.append(str(ROOT / "tests"))

from harness import one_gpu  # noqa: E402
from injector import Fault  # noqa: E402
from toy import flat_weights  # noqa: E402

TIMEOUT_S = 6.0  # --timeout-s: after this time a rank that is stopped or hangs is given up
ATTEMPTS = 60  # the most attempts of a run
LIMIT_S = 150.0  # time without a step or another event of a rank after which a run counts as stuck
GONE_S = 10.0  # time after the end of a run in which the last process must disappear
DISK_BYTES = 24 << 20
RUN = [
    *("train", "digits", "--model", "injector:model", "--epochs", "7", "--warmup-epochs", "1", "--decay-epochs", "6"),
    *("--target-top1", "none", "--checkpoint-every-steps", "10", "--max-rollbacks", "0", "--resume", "auto"),
    *("--timeout-s", str(TIMEOUT_S)),
]


class RunLost(Exception):
    """A run did not reach its end."""


class OutOfTime(Exception):
    """The soak has to end, and a run that has not ended yet has no result."""


@dataclass(slots=True)
class Attempts:
    """A run: attempt after attempt until it has ended."""

    folder: Path
    nproc: int
    by_rank: bool
    arguments: list[str]
    deadline: float = float("inf")  # of the whole soak, as time.monotonic()
    ends: list[float] = field(default_factory=list)  # when all ranks of an attempt had ended
    told: int = 0  # the number of these reported by the command, which then restarted its ranks

    @property
    def out(self) -> Path:
        return self.folder / "disk" / "run"

    def go(self, faults: list[Fault]) -> None:
        (self.folder / "plan.json").write_text(json.dumps([fault.to_dict() for fault in faults]))
        (self.folder / "tmp").mkdir()
        (self.folder / "events.jsonl").touch()
        try:
            for _ in range(ATTEMPTS):
                codes = self._attempt()
                self.ends.append(time.time())
                if all(code == 0 for code in codes):
                    return
            raise RunLost(f"not at its end after {ATTEMPTS} attempts:\n{self.said()}")
        finally:
            for pid in processes_of(self.folder) if sys.exc_info()[0] else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def said(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("*.log")))

    def _environ(self, **values: str) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "dist"), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": path, "FAULTS": str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        return {**os.environ, "OMP_NUM_THREADS": "1", **own, **values}

    def _start(self, name: str, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        words = (sys.executable, "-m", "hyperbatch", *RUN, "--out", str(self.out), *words, *self.arguments)
        with open(self.folder / f"{name}.log", "a") as log:
            return subprocess.Popen(words, env=self._environ(**environ), stdout=log, stderr=log)

    def _attempt(self) -> list[int]:
        """Makes one attempt. Returns the exit codes of the command, or of every rank."""
        started = self._ranks() if self.by_rank else [self._command()]
        try:
            while any(process.poll() is None for process in started):
                self._look(started)
                time.sleep(0.05)
        finally:
            for process in started:
                process.kill()
                process.wait()
        left_processes(self.folder)  # the ranks of a killed command end a moment after it
        return [process.returncode for process in started]

    def _command(self) -> subprocess.Popen[bytes]:
        return self._start("command", "--nproc", str(self.nproc), "--max-restarts", str(ATTEMPTS))

    def _ranks(self) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = {"WORLD_SIZE": str(self.nproc), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [self._start(f"rank{rank}", **world, **one_gpu(rank), RANK=str(rank)) for rank in range(self.nproc)]

    def _look(self, started: list[subprocess.Popen[bytes]]) -> None:
        """Checks an attempt that is running."""
        if self.by_rank:
            stopped = [rank for rank in started if rank.poll() is None]
            # Only other ranks of its host could have ended a stopped rank, and here each rank is on a separate host.
            if len(stopped) < len(started) and all(state_of(rank.pid) == "T" for rank in stopped):
                for rank in stopped:
                    rank.kill()
        if time.monotonic() > self.deadline:
            raise OutOfTime
        if time.time() - (self.folder / "events.jsonl").stat().st_mtime > LIMIT_S:
            raise RunLost(f"nothing has happened for {LIMIT_S:g} s:\n{self.said()}")
        if not self.by_rank and len(self._restarts()) > self.told:
            self.told += 1
            self.ends.append(time.time())

    def _restarts(self) -> list[str]:
        """The lines in which the command says that it restarts ranks."""
        return [line for line in (self.folder / "command.log").read_text().splitlines() if "; restart " in line]

    def rows(self, faults: list[Fault]) -> list[dict[str, Any]]:
        """Returns the cost of each fault."""
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        events.sort(key=lambda event: event["time"])
        steps = [event for event in events if event["event"] == "step" and event["rank"] == 0]
        rows = []
        for made in [event for event in events if event["event"] == "fault"]:
            fault, at = faults[made["number"]], made["time"]

            def since(time_s: float | None, at: float = at) -> float | None:
                return None if time_s is None else round(time_s - at, 2)

            before = [step for step in steps if step["time"] <= at]
            pid = before[-1]["pid"] if before else None
            keeps_going = fault.kind == "full disk"
            after = [step for step in steps if step["time"] > at and (keeps_going or step["pid"] != pid)]
            end = next((end for end in self.ends if end >= at), None)
            # For the rank 0 that trains again: when it started, had joined the others, and was set up.
            new = [event for event in events if after and not keeps_going and event["pid"] == after[0]["pid"]]
            joined = next((event for event in new if event["event"] == "joined"), None)
            ready = next((event["time"] for event in new if event["event"] == "set-up"), None)
            # A run with damaged weights continues for a while. So does a preempted run, which saves its steps.
            undone = [step["step"] for step in steps if step["pid"] == pid]
            lost = 0 if keeps_going or not undone or not after else max(undone) - (after[0]["step"] - 1)
            rows.append(
                {
                    "kind": fault.kind,
                    "rank": fault.rank,
                    "step": made["step"],
                    "stop_s": None if keeps_going else since(end),
                    "begin_s": since(joined and joined["began"]),
                    "joined_s": since(joined and joined["time"]),
                    "ready_s": since(ready),
                    "again_s": since(after[0]["time"] if after else None),
                    "lost_steps": lost,
                }
            )
        return rows


def state_of(pid: int) -> str:
    """Returns the state of a process: "T" is stopped, and "" means that there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def processes_of(folder: Path) -> list[int]:
    """Returns the processes that were started for a run and still exist."""
    sign, found = f"FAULTS={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if sign in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def left_processes(folder: Path) -> int:
    """Returns the number of a run's processes that are left after a grace period."""
    deadline = time.monotonic() + GONE_S
    while (found := len(processes_of(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def small_disk(folder: Path, *, files: int = 0) -> Iterator[bool]:
    """Yields whether it could mount a small file system, which can be filled.

    files: the number of files that it has room for; 0: any number.
    """
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},nr_inodes={files}", "tmpfs", str(folder)]
    made = shutil.which("mount") is not None and not subprocess.run(words, capture_output=True, check=False).returncode
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def train(
    folder: Path,
    faults: list[Fault],
    *,
    nproc: int,
    by_rank: bool,
    arguments: list[str],
    deadline: float = float("inf"),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes one run in a new folder. Returns its rows and leftovers, and its final state.

    The final state is empty if the run is lost. Raises OutOfTime after the deadline.
    """
    folder.mkdir()
    run, ends_with, lost = Attempts(folder, nproc, by_rank, arguments, deadline), {}, {}
    with small_disk(folder / "disk"):
        try:
            run.go(faults)
            ends_with = flat_weights(run.out)
        except RunLost as error:
            lost = {"error": str(error)}
        left = sorted(path.name for path in (run.out / "checkpoints").glob("*.partial"))
        left += sorted(path.name for path in (folder / "tmp").iterdir())
        rows, made = run.rows(faults), len(list(folder.glob("made-*")))
        result = {"faults": rows, "planned": len(faults), "made": made, "attempts": len(run.ends)}
        return result | lost | {"left_processes": left_processes(folder), "left_files": left}, ends_with
