"""`record.json`: the summary of a run, and the contract with the report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hyperbatch.durable import replace_text
from hyperbatch.errors import InputError
from hyperbatch.record.lines import read_metrics
from hyperbatch.record.text import strict_json

if TYPE_CHECKING:
    from hyperbatch.config import Config

SCHEMA = 1


@dataclass(kw_only=True, slots=True)
class Result:
    """The result of a run. `time_to_target_s` includes evaluation, as in MLPerf; `train_s` is training alone.

    The run's time begins when training data is first used and ends with an evaluation; it does not include pauses.
    """

    reached: bool = False
    target_top1: float | None = None
    top1: float | None = None
    top1_plain: float | None = None  # without test-time augmentation; None if there was no augmentation
    top5: float | None = None  # None: there are at most five classes
    val_loss: float | None = None  # cross entropy on the validation set, without label smoothing
    time_to_target_s: float | None = None
    run_s: float = 0.0  # the run's time at the end of the last evaluation
    setup_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0
    images_per_s: float = 0.0
    epochs: float = 0.0
    steps: int = 0


@dataclass(kw_only=True, slots=True, repr=False)
class RunRecord:
    """The record of one run: the contents of record.json. The first block of fields is fixed; the second may grow."""

    recipe: str
    config: dict[str, Any]
    environment: dict[str, Any]
    world_size: int
    grid: str
    result: Result = field(default_factory=Result)
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    plan: dict[str, Any] = field(default_factory=dict)  # GroupPlan.to_dict()
    phases: list[dict[str, Any]] = field(default_factory=list)  # resolved batch phases, with the first step of each
    optimizer_groups: dict[str, Any] = field(default_factory=dict)  # GroupSummary.to_dict(): decay and rate factors
    trust_ratios: dict[str, float] = field(default_factory=dict)  # parameter -> ratio at the last logged step
    compiled: dict[str, Any] = field(default_factory=dict)  # the effect of --compile: engine.compiled.Compilation
    clock: dict[str, float] = field(default_factory=dict)  # init_s, train_s, capture_s, eval_s, pause_s, data_wait_s
    skipped_steps: int = 0  # updates skipped because a gradient was inf or nan
    classes: list[str] = field(default_factory=list)  # names, in the order of the model's outputs
    by_class: dict[str, Any] = field(default_factory=dict)  # the last evaluation: samples, right, confusions
    # rank 0's loader (wait_fraction, bottleneck, busy seconds), and the data set's train_samples, eval_samples, classes
    data: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)  # StepTiming.to_dict() of a typical step
    stragglers: list[dict[str, Any]] = field(default_factory=list)  # rank, host, phase, lost_s, share, message
    # for each rank: rank, host, device, memory, clock and utilisation as far as known, and the mean times of its steps
    ranks: list[dict[str, Any]] = field(default_factory=list)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # step, to_step, passed_over, reason, message
    folder: str = ""
    error: str = ""  # why the run ended early, in one line; empty if it did not
    failure: dict[str, Any] = field(default_factory=dict)  # the first cause: rank, host, step, time, message, traceback

    def __repr__(self) -> str:
        """Not every field, which would fill the screen of a notebook."""
        return (
            f"RunRecord(recipe={self.recipe!r}, folder={self.folder!r}, error={self.error!r}, result={self.result!r})"
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def metrics(self, event: str | None = None) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl, e.g. for `pandas.DataFrame(record.metrics("eval"))`.

        event: "step" or "eval". With None, all rows are returned in the order in which they were written.
        """
        rows = read_metrics(Path(self.folder)) if self.folder else []
        return [row for row in rows if event in (None, row["event"])]

    def save(self, folder: Path) -> None:
        """Writes record.json atomically, so that a reader never sees a part of it. If an OSError is raised, the old
        file is unchanged."""
        replace_text(folder / "record.json", strict_json(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        path = Path(folder) / "record.json"
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise InputError(f"{folder} is not a run folder: it has no record.json") from None
        except ValueError as error:
            raise InputError(f"{path} is not valid JSON ({error}); the file is damaged") from None
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            schema = values.get("schema") if isinstance(values, dict) else None
            raise InputError(f"{path}: schema {schema} is not {SCHEMA}; use the version that wrote it")
        try:
            result = Result(**_checked(Result, values["result"]))
            return cls(**{**_checked(cls, values), "result": result, "folder": str(folder)})  # it may have been moved
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} lacks a field of a run's record, or has a wrong one ({error})") from None


def note_failure(folder: Path, words: Mapping[str, Any], config: Config, world_size: int) -> None:
    """Writes a failure to record.json. The parent command calls it, which knows how every rank ended and what it
    reported.

    The record that rank 0 wrote when it failed may only say that it lost another rank. There is none if rank 0 was
    killed, or if the run had not begun. The record of a run that has ended without an error is not changed.
    """
    record = RunRecord(recipe=config.recipe, config=config.to_dict(), environment={}, world_size=world_size, grid="")
    if (folder / "record.json").exists():
        try:
            record = RunRecord.load(folder)
        except InputError:
            return
        if not record.error:
            return
    step = record.result.steps + 1 if words.get("step") is None and record.result.steps else words.get("step")
    record.error, record.failure, record.folder = words["message"], {**words, "step": step}, str(folder)
    record.save(folder)


def _known(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are fields in this version: a newer version may have written more."""
    names = {f.name for f in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def _checked(cls: Any, values: Any) -> dict[str, Any]:
    """Like `_known`, but raises a TypeError that names the first value of a wrong type. The file may come from
    anybody."""
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool, "dict": dict, "list": list, "Result": dict}
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__} is no {cls.__name__}")
    known = _known(cls, values)
    for spec in dataclasses.fields(cls):
        name = str(spec.type).removesuffix(" | None").partition("[")[0]
        may_be_none = name == "float" or spec.type.endswith("| None")  # a number that is not finite is null in JSON
        value = known.get(spec.name)
        if spec.name in known and not isinstance(value, kinds[name]) and not (value is None and may_be_none):
            raise TypeError(f"{spec.name} is a {type(value).__name__}")
    return known
