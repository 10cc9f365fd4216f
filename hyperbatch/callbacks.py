"""Events that a run reports to its caller: `hyperbatch.train(config, callbacks=[...])`.

    class Curve(hyperbatch.Callback):
        def on_step(self, event):
            print(event.step, event.loss)

Events are plain values from rank 0. They follow metrics.jsonl: a step is reported once its loss has arrived on the
host, one launch later, so that nothing waits for the device. If ranks are separate processes, rank 0 appends each event
to a file, and the process that called `train` reads it. Callbacks always run in that process.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyperbatch.config import Config
from hyperbatch.errors import InputError
from hyperbatch.record import RunRecord, strict_json
from hyperbatch.record.lines import Lines

EVENTS_FILE = "events.jsonl"  # next to the config with which a rank is started
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class StartEvent:
    """The run has been set up, and its time begins."""

    config: Config
    folder: str  # of the run
    step: int = 0  # number of steps done before, in a resumed run

    def to_dict(self) -> dict[str, Any]:
        return {"config": self.config.to_dict(), "folder": self.folder, "step": self.step}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StartEvent:
        return cls(**{**values, "config": Config.from_dict(values["config"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """A step with a line in metrics.jsonl: every `log_every_steps`-th step."""

    step: int  # counted from 1
    epoch: float
    time_s: float  # the run's time
    loss: float  # mean over all ranks
    lr: float
    global_batch: int
    images_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEvent:
    step: int
    epoch: float
    time_s: float
    scores: dict[str, Any] = field(default_factory=dict)  # top1, samples, and other scores

    @property
    def top1(self) -> float:
        return self.scores["top1"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent:
    """A checkpoint was written to the disk."""

    step: int
    epoch: float
    path: str
    best: bool  # whether it is the best of the evaluated checkpoints so far


class Callback:
    """A base class for callbacks: override the methods that you need. An exception in a method ends the run; with
    several processes, it is raised once the ranks have ended."""

    def on_start(self, event: StartEvent) -> None: ...
    def on_step(self, event: StepEvent) -> None: ...
    def on_eval(self, event: EvalEvent) -> None: ...
    def on_checkpoint(self, event: CheckpointEvent) -> None: ...
    def on_end(self, record: RunRecord) -> None:
        """The run has ended: with or without reaching its target, or with a failure, which `record.error` states."""


EVENTS: dict[str, Callable[..., Any]] = {
    "on_start": StartEvent.from_dict,
    "on_step": lambda values: StepEvent(**values),
    "on_eval": lambda values: EvalEvent(**values),
    "on_checkpoint": lambda values: CheckpointEvent(**values),
}


class Hooks:
    """The methods of all callbacks, by name. Methods that no callback overrides are not called and cost nothing."""

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self._calls: dict[str, list[Callable[[Any], None]]] = {name: [] for name in (*EVENTS, "on_end")}
        for callback in callbacks:
            own = [name for name in self._calls if _overrides(callback, name)]
            if not own:
                kind = type(callback).__name__
                raise InputError(f"callbacks: {kind} has none of the methods {', '.join(self._calls)}")
            for name in own:
                self._calls[name].append(getattr(callback, name))

    def wants(self, name: str) -> bool:
        return bool(self._calls[name])

    def tell(self, name: str, event: Any) -> None:
        for call in self._calls[name]:
            call(event)

    @property
    def wanted(self) -> list[str]:
        """Names of the events that a callback handles."""
        return [name for name in EVENTS if self._calls[name]]


NO_HOOKS = Hooks()


def _overrides(callback: Any, name: str) -> bool:
    method = getattr(type(callback), name, None) or getattr(callback, name, None)
    return callable(method) and method is not getattr(Callback, name)


# Between processes


class Forward(Hooks):
    """The hooks of a rank: writes every event that a callback handles to the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._lines = Lines(path, go_on=True, warn=self._warn)
        self._wanted = set(json.loads(path.with_suffix(".wanted").read_text()))

    @staticmethod
    def _warn(reason: str) -> None:
        print(f"warning: callbacks do not receive all events: {reason}", file=sys.stderr, flush=True)

    def wants(self, name: str) -> bool:
        return name in self._wanted

    def tell(self, name: str, event: Any) -> None:
        values = event.to_dict() if isinstance(event, StartEvent) else asdict(event)
        self._lines.add(strict_json([name, values]))

    def close(self) -> None:
        self._lines.close()


def _event(line: str) -> tuple[str, dict[str, Any]] | None:
    """Parses a line. Returns None for a partial line, which was written to a full disk and then removed, but had
    already been read."""
    try:
        name, values = json.loads(line)
    except ValueError:
        return None
    return name, values


@contextlib.contextmanager
def forwarded(hooks: Hooks, scratch: Path) -> Iterator[None]:
    """A context in which this process calls `hooks` for the events that rank 0 writes to the scratch folder. Does
    nothing if no callback handles events."""
    if not hooks.wanted:
        yield
        return
    path = scratch / EVENTS_FILE
    path.with_suffix(".wanted").write_text(json.dumps(hooks.wanted))
    path.touch()
    over = threading.Event()
    failure: list[BaseException] = []

    def follow() -> None:
        with path.open() as file:
            rest = ""
            while True:
                last = over.is_set()  # checked before reading, so that everything written before it was set is read
                *lines, rest = (rest + file.read()).split("\n")
                for name, values in filter(None, map(_event, lines)):
                    hooks.tell(name, EVENTS[name](values))
                if last:
                    return
                over.wait(POLL_S)

    def guarded() -> None:
        try:
            follow()
        except BaseException as error:  # an error of a callback, which is raised in the thread that called `train`
            failure.append(error)

    thread = threading.Thread(target=guarded, name="hyperbatch-callbacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failure:
        raise failure[0]
