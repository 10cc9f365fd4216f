"""What a run writes while it runs: record.json, metrics.jsonl, mllog.txt, trace.json, tensorboard/.

`RunRecord` is the run's summary and the contract with the report; `RunWriter` appends to the folder as the run goes.
Neither imports torch, so a report can be drawn on any machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hyperbatch.errors import InputError

SCHEMA = 1


@dataclass(kw_only=True, slots=True)
class Result:
    """How the run ended. Times are seconds of training as the clock counts them, evaluation included."""

    reached: bool = False
    target_top1: float | None = None
    top1: float | None = None
    time_to_target_s: float | None = None
    train_s: float = 0.0
    images_per_s: float = 0.0
    epochs: float = 0.0
    steps: int = 0


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """One run. The first block is fixed by the design; the second is what this version adds."""

    recipe: str
    config: dict[str, Any]
    environment: dict[str, Any]
    world_size: int
    grid: str
    result: Result = field(default_factory=Result)
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    plan: dict[str, Any] = field(default_factory=dict)  # GroupPlan.to_dict()
    phases: list[dict[str, Any]] = field(default_factory=list)  # resolved batch phases, with the step each began at
    trust_ratios: dict[str, float] = field(default_factory=dict)  # parameter -> ratio at the last logged step
    clock: dict[str, float] = field(default_factory=dict)  # init_s, train_s, eval_s, pause_s
    timing: dict[str, Any] = field(default_factory=dict)  # StepTiming.to_dict() of a typical step
    folder: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, folder: Path) -> None:
        """Writes record.json in one atomic move, so a reader never sees half of it."""
        partial = folder / "record.json.partial"
        partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        os.replace(partial, folder / "record.json")

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / "record.json"
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise InputError(f"{folder} is not a run folder: it has no record.json") from None
        except json.JSONDecodeError as error:
            raise InputError(f"{path} is not valid JSON ({error}); the run that wrote it was damaged") from None
        if values.get("schema") != SCHEMA:
            raise InputError(f"{path}: schema {values.get('schema')} is not {SCHEMA}; use the version that wrote it")
        known = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        values["result"] = Result(**values["result"])
        return cls(**values)


class RunWriter:
    """Appends to a run's folder. Made on rank 0 only; the others have none."""

    def __init__(self, folder: Path, *, resume_from_step: int | None = None) -> None:
        """resume_from_step: drop metric lines of steps at or after it, which the resumed run will write again."""
        raise NotImplementedError

    def step(
        self,
        *,
        step: int,
        epoch: float,
        time_s: float,
        loss: float,
        lr: float,
        global_batch: int,
        images_per_s: float,
        **extra: Any,
    ) -> None:
        raise NotImplementedError

    def eval(self, *, step: int, epoch: float, time_s: float, top1: float, samples: int, **extra: Any) -> None:
        raise NotImplementedError

    def mlperf(self, key: str, value: Any = None, *, kind: str = "POINT_IN_TIME", **metadata: Any) -> None:
        """One line of mllog.txt (MLPerf's key, value and metadata such as epoch_num)."""
        raise NotImplementedError

    def span(self, name: str, start_s: float, duration_s: float, *, track: str = "engine", **args: Any) -> None:
        """One slice of trace.json (Chrome trace format, opens in Perfetto); seconds since the run began."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
