"""Reads a run's folder for the report, even if files are missing or incomplete.

metrics.jsonl may end in the middle of a line, record.json may be missing (the run is still running, or it died), and
values may be null (NaN). None of these prevents a report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperbatch.errors import InputError
from hyperbatch.record import RunRecord, read_metrics

AXES = {"time": "s", "epoch": "epochs", "step": "steps"}  # x axis of a run's curves -> its unit
_STEP_FIELDS = ("step", "epoch", "time_s", "loss", "lr", "global_batch", "images_per_s")
_EVAL_FIELDS = ("step", "epoch", "time_s", "top1", "val_loss", "samples")


@dataclass(kw_only=True, slots=True)
class Run:
    """The data of a run. `steps` and `evals` are columns of equal length, in order of steps; NaN marks other values."""

    folder: Path
    name: str
    record: RunRecord | None
    problem: str = ""  # why there is no record
    steps: dict[str, list[float]] = field(default_factory=dict)
    evals: dict[str, list[float]] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)  # lines of layers.jsonl, in order of steps

    @property
    def target(self) -> float | None:
        return self.record.result.target_top1 if self.record else None

    @property
    def best_top1(self) -> float | None:
        return max((value for value in self.evals["top1"] if math.isfinite(value)), default=None)

    @property
    def first_bad_step(self) -> int | None:
        """The first step whose loss was not a number."""
        pairs = zip(self.steps["step"], self.steps["loss"], strict=True)
        return next((int(step) for step, loss in pairs if math.isnan(loss)), None)


def check_folder(folder: Path) -> None:
    """Raises InputError unless the folder exists."""
    if not folder.is_dir():
        raise _not_a_run(folder, "is a file" if folder.exists() else "does not exist")


def check_run(folder: Path, files: tuple[str, ...] = ("record.json", "metrics.jsonl")) -> None:
    """Raises InputError unless the folder has one of the files."""
    check_folder(folder)
    if not any((folder / name).exists() for name in files):
        page = folder / "report.html"
        sweep = f" (a sweep has its own report: {page})" if page.exists() else ""
        raise _not_a_run(folder, f"has neither record.json nor metrics.jsonl{sweep}")


def _not_a_run(path: Path, why: str) -> InputError:
    return InputError(f"{path} is not a run folder: it {why}; use a folder that `hyperbatch train` has written")


def load_run(folder: Path) -> Run:
    check_run(folder)
    record, problem = None, ""
    try:
        record = RunRecord.load(folder)
    except InputError as error:
        problem = str(error)
        if not (folder / "record.json").exists():
            problem = "There is no record.json: the run is still running, or it ended before it could write one."
    lines = read_metrics(folder)
    return Run(
        folder=folder,
        name=folder.resolve().name,
        record=record,
        problem=problem,
        steps=_columns(lines, "step", _STEP_FIELDS),
        evals=_columns(lines, "eval", _EVAL_FIELDS),
        layers=_rows(read_metrics(folder, "layers.jsonl"), "layers"),
    )


def load_runs(folders: list[Path]) -> list[Run]:
    runs = [load_run(Path(folder)) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return runs


def _columns(lines: list[dict[str, Any]], event: str, fields: tuple[str, ...]) -> dict[str, list[float]]:
    rows = _rows(lines, event)
    return {name: [_number(row.get(name)) for row in rows] for name in fields}


def _rows(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """Returns the lines in order of steps. Of a step that was written twice (by a manual resume), the later counts."""
    by_step = {line["step"]: line for line in lines if line["event"] == event}
    return [by_step[step] for step in sorted(by_step)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def axis_values(columns: dict[str, list[float]]) -> dict[str, list[float]]:
    return {"time": columns["time_s"], "epoch": columns["epoch"], "step": columns["step"]}


def smooth(values: list[float], share: float) -> list[float]:
    """An exponential mean over about `share` of the run, unbiased at the start. NaN stays NaN and does not spread."""
    keep = 1 - 1 / max(1.0, len(values) * share)
    total = weight = 0.0
    out = []
    for value in values:
        if math.isfinite(value):
            total, weight = total * keep + value, weight * keep + 1
            out.append(total / weight)
        else:
            out.append(math.nan)
    return out


def sample(
    columns: dict[str, list[float]],
    points: int,
    *,
    extremes: tuple[str, ...],
    changes: str,
    also: set[int] | None = None,
) -> list[int]:
    """Selects about `points` indices that preserve the curve's shape.

    They are the ends, the indices in `also`, the points where `changes` changes, and in each section of the run the
    minimum and the maximum of each of `extremes` and its first non-finite value.
    """
    length = len(columns["step"])
    if length <= points:
        return list(range(length))
    steady = columns[changes]
    turns = [i for i in range(1, length) if steady[i] != steady[i - 1]]
    keep = {0, length - 1, *(also or ())}
    if len(turns) <= points // 4:
        keep.update(i - side for i in turns for side in (0, 1))
    stretches = max(1, points // (2 * len(extremes)))
    for part in range(stretches):
        span = range(part * length // stretches, (part + 1) * length // stretches)
        for values in (columns[name] for name in extremes):
            finite = [i for i in span if math.isfinite(values[i])]
            if finite:
                keep |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            if len(finite) < len(span):
                keep.add(next(i for i in span if not math.isfinite(values[i])))
    return sorted(keep)
