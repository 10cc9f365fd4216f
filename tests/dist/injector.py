"""Faults at chosen steps and ranks of a real run, each once, whether steps are captured or not.

    hyperbatch train ... --model injector:model        with FAULTS=FOLDER in the environment of the ranks

FOLDER/plan.json is a list of `Fault`s. A fault is made once all before it have been. FOLDER/events.jsonl is what
happened when: {"event": "step", "step": 12, "time": ..., "rank": 0, "pid": ...}, "fault" with its number, "joined" with
the time at which the process began, "set-up". The model is the one that the `digits` recipe trains.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SIGNALS = {"kill": "KILL", "kill rank 0": "KILL", "term": "TERM", "stop": "STOP", "segv": "SEGV", "usr1": "USR1"}
TO_COMMAND = {"kill command": "KILL", "preempt": "TERM"}  # the process that has started the ranks
DISK_STEPS = 15  # for which a disk stays full
PIECES = 30  # of a checkpoint's write, among which it may be cut short


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str  # of KINDS
    rank: int
    step: int  # from 1: it is made in this one, or in the first after it that a rank comes to
    draw: float  # in [0, 1): decides when within a step, which bit, how many bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


KINDS = (
    *SIGNALS,
    *TO_COMMAND,
    "exit",
    "raise",
    "hang",
    "nan",
    "flipped weight",
    "torn checkpoint",
    "flipped checkpoint",
    "kill in write",
    "kill in evaluation",
    "kill in set-up",
    "full disk",
)


class Injector:
    """Of one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, int(os.environ.get("RANK", "0"))
        self.faults = [Fault(**values) for values in json.loads((folder / "plan.json").read_text())]

    def due(self, step: int, *kinds: str) -> tuple[int, Fault] | None:
        """The next fault, if it is this rank's and time for it. kinds: that can be made here; none: all others."""
        number = sum(1 for _ in self.folder.glob("made-*"))
        if number == len(self.faults):
            return None
        fault = self.faults[number]
        here = fault.kind in kinds if kinds else fault.kind not in ELSEWHERE
        return (number, fault) if here and fault.rank == self.rank and step >= fault.step else None

    def note(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.time(), "rank": self.rank, "pid": os.getpid(), **values}
        with open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def made(self, number: int, step: int) -> None:
        (self.folder / f"made-{number}").touch()
        self.note("fault", number=number, step=step)

    def strike(self, number: int, fault: Fault, step: int, learner: Any, out: Path) -> None:
        """Makes a fault at the beginning of a step."""
        kind, draw = fault.kind, fault.draw
        if kind in SIGNALS or kind in TO_COMMAND:
            name = SIGNALS.get(kind) or TO_COMMAND[kind]
            target = os.getppid() if kind in TO_COMMAND else os.getpid()

            (self.folder / f"made-{number}").touch()  # before the next step looks for it

            def send() -> None:
                time.sleep(draw * 0.03)  # anywhere in the step, or in what follows it
                self.made(number, step)
                os.kill(target, signal.Signals[f"SIG{name}"])

            threading.Thread(target=send, daemon=True).start()
            return
        if kind in ("torn checkpoint", "flipped checkpoint"):
            for newest in sorted((out / "checkpoints").glob("step-*.pt"))[-1:]:
                damage(newest, draw, torn=kind == "torn checkpoint")
            self.made(number, step)
            os.kill(os.getpid(), signal.SIGKILL)
        self.made(number, step)
        if kind == "exit":
            os._exit(7)
        if kind == "raise":
            raise ValueError("an error of the model")
        if kind == "hang":
            time.sleep(3600)
        if kind == "full disk":
            self.fill(out)
        if kind in ("nan", "flipped weight"):
            spoil(learner.model, draw, kind)

    def fill(self, out: Path) -> None:
        with open(out / "filler", "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass

    def empty(self, out: Path, step: int) -> None:
        """Takes the filler away after a while."""
        filled = [fault.step for fault in self.faults if fault.kind == "full disk"]
        if self.rank == 0 and any(step >= first + DISK_STEPS for first in filled):
            (out / "filler").unlink(missing_ok=True)


ELSEWHERE = ("kill in write", "kill in evaluation", "kill in set-up")


def began_at() -> float:
    """When this process was started, by the clock of time.time()."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def damage(path: Path, draw: float, *, torn: bool) -> None:
    size = path.stat().st_size
    if torn:
        os.truncate(path, int(draw * size))
        return
    with open(path, "r+b") as file:
        file.seek(int(draw * size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << int(draw * 1e6) % 8]))


def spoil(model: Any, draw: float, kind: str) -> None:
    import torch

    params = list(model.parameters())
    values = params[int(draw * len(params))].data
    place = values.as_strided((values.numel(),), (1,))[int(draw * 1e4) % values.numel() :][:1]
    if kind == "nan":
        place.fill_(torch.nan)
    else:
        place.view(torch.uint8)[-1:].bitwise_xor_(1 << 5)  # of the exponent


def install(injector: Injector) -> None:
    """Into the loop of this process."""
    from hyperbatch import durable
    from hyperbatch.engine import loop

    train_stride, evaluate_run, write = loop.train_stride, loop.evaluate_run, durable._Summed.write
    train = loop.train
    run_of: dict[str, Any] = {}
    pieces: Counter[Any] = Counter()  # of a checkpoint, by file

    def training(run: Any, *args: Any) -> Any:
        run_of["run"] = run
        injector.note("set-up")
        return train(run, *args)

    def striding(runner: Any, stride: Any, *args: Any) -> Any:
        step, run = stride[-1].index + 1, run_of["run"]
        out = Path(run.config.run.out)
        injector.empty(out, step)
        if found := injector.due(step):
            injector.strike(*found, step, run.learner, out)
        result = train_stride(runner, stride, *args)
        injector.note("step", step=step)
        return result

    def evaluating(run: Any, *args: Any) -> Any:
        if found := injector.due(run.progress.step, "kill in evaluation"):
            number, fault = found

            def kill() -> None:
                time.sleep(fault.draw * 0.02)
                injector.made(number, run.progress.step)
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=kill, daemon=True).start()
        return evaluate_run(run, *args)

    def writing(self: Any, data: Any) -> int:
        if "run" in run_of and (found := injector.due(run_of["run"].progress.step, "kill in write")):
            number, fault = found
            pieces[self] += 1
            if pieces[self] > fault.draw * PIECES:
                injector.made(number, run_of["run"].progress.step)
                os.kill(os.getpid(), signal.SIGKILL)
        return write(self, data)

    loop.train, loop.train_stride, loop.evaluate_run = training, striding, evaluating
    durable._Summed.write = writing  # type: ignore[method-assign]


def model(classes: int, in_channels: int) -> Any:
    from hyperbatch.models import create_model

    if "FAULTS" in os.environ:
        injector = Injector(Path(os.environ["FAULTS"]))
        install(injector)
        injector.note("joined", began=began_at())
        if found := injector.due(1 << 60, "kill in set-up"):
            injector.made(found[0], 0)
            os.kill(os.getpid(), signal.SIGKILL)
    return create_model("resnet8", classes=classes, in_channels=in_channels)
