"""What a run tells its caller while it goes on: `hyperbatch.train(config, callbacks=[...])`.

    class Curve(hyperbatch.Callback):
        def on_step(self, event):
            print(event.step, event.loss)

Events are plain values, told on rank 0. They follow metrics.jsonl: a step is told once its loss has arrived on the
host, one launch after its own, so that nobody waits for the device. Where ranks are processes of their own, rank 0
appends each event to a file, and the process that called `train` reads it: callbacks always run there.
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

EVENTS_FILE = "events.jsonl"  # beside the config that a rank is started with
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class StartEvent:
    """The run is set up; its time begins now."""

    config: Config
    folder: str  # of the run
    step: int = 0  # steps that were done before, of a run that is resumed

    def to_dict(self) -> dict[str, Any]:
        return {"config": self.config.to_dict(), "folder": self.folder, "step": self.step}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StartEvent:
        return cls(**{**values, "config": Config.from_dict(values["config"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """A step that gets a line in metrics.jsonl: every `log_every_steps`-th."""

    step: int  # from 1
    epoch: float
    time_s: float  # of the run
    loss: float  # mean over all ranks
    lr: float
    global_batch: int
    images_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEvent:
    step: int
    epoch: float
    time_s: float
    scores: dict[str, Any] = field(default_factory=dict)  # top1, samples, and what else was counted

    @property
    def top1(self) -> float:
        return self.scores["top1"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent:
    """A checkpoint that is on the disk."""

    step: int
    epoch: float
    path: str
    best: bool  # of the evaluated ones so far


class Callback:
    """A base class for callbacks: override the methods that you need. An exception in a method ends the run; with
    several processes, it is raised once the ranks have ended."""

    def on_start(self, event: StartEvent) -> None: ...
    def on_step(self, event: StepEvent) -> None: ...
    def on_eval(self, event: EvalEvent) -> None: ...
    def on_checkpoint(self, event: CheckpointEvent) -> None: ...
    def on_end(self, record: RunRecord) -> None:
        """The run is over: reached its target or not, or failed, which `record.error` says."""


EVENTS: dict[str, Callable[..., Any]] = {
    "on_start": StartEvent.from_dict,
    "on_step": lambda values: StepEvent(**values),
    "on_eval": lambda values: EvalEvent(**values),
    "on_checkpoint": lambda values: CheckpointEvent(**values),
}


class Hooks:
    """The methods of all callbacks, by name; those that nobody has overridden are left out and so cost nothing."""

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
        """Names of events that somebody listens to."""
        return [name for name in EVENTS if self._calls[name]]


NO_HOOKS = Hooks()


def _overrides(callback: Any, name: str) -> bool:
    method = getattr(type(callback), name, None) or getattr(callback, name, None)
    return callable(method) and method is not getattr(Callback, name)


# Between processes


class Forward(Hooks):
    """The hooks of a rank: every event that is wanted goes into the file. Made where the file is."""

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
    """None: the beginning of it was read before it was taken back, since a disk was full."""
    try:
        name, values = json.loads(line)
    except ValueError:
        return None
    return name, values


@contextlib.contextmanager
def forwarded(hooks: Hooks, scratch: Path) -> Iterator[None]:
    """Tells `hooks` in this process what rank 0 writes into the scratch folder meanwhile. Without any, does nothing."""
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
                last = over.is_set()  # asked before reading: what was written until then is read
                *lines, rest = (rest + file.read()).split("\n")
                for name, values in filter(None, map(_event, lines)):
                    hooks.tell(name, EVENTS[name](values))
                if last:
                    return
                over.wait(POLL_S)

    def guarded() -> None:
        try:
            follow()
        except BaseException as error:  # of a callback: it is raised where `train` was called
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
