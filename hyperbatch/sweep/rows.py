"""The rows of a sweep: one JSON object per line, appended as a run ends, by one or several processes.

DIR/plan.toml  rows.jsonl  environment.json  report.html        runs/NUMBER/ with --keep-runs
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from hyperbatch.durable import replace_text
from hyperbatch.engine.folder import SWEEP_ROWS
from hyperbatch.errors import InputError
from hyperbatch.record import strict_json
from hyperbatch.sweep.plan import PlannedRun, point_title
from hyperbatch.sweep.values import Values

ROWS, PLAN, ENVIRONMENT, REPORT = SWEEP_ROWS, "plan.toml", "environment.json", "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run of a sweep, finished or failed. Values that a run did not determine are None."""

    run: int  # its number in the plan that made it
    arm: str
    conditions: Values = field(default_factory=dict)  # values of the plan's grid
    search: Values = field(default_factory=dict)  # values of the arm's own grid
    overrides: Values = field(default_factory=dict)  # values that override the recipe
    seed: int
    confirms: bool = False  # whether it is a fresh seed of a search's best point, and so had no part in the selection
    digest: str  # of the config
    recipe: str
    result: Values = field(default_factory=dict)  # as in record.json: top1, train_s, epochs, steps, reached ...
    setup_s: float | None = None  # time before the first step, and of captures after it
    eval_s: float | None = None
    wall_s: float | None = None  # of the whole run, measured by the sweep
    error: str | None = None  # why it failed; a failed run is repeated only with --retry-failed
    warnings: list[str] = field(default_factory=list)
    device: str | None = None
    torch: str | None = None
    commit: str | None = None
    time: str | None = None  # the UTC time at which it ended
    command: str = ""  # the command that trains this run alone

    def number(self, name: str) -> float | None:
        """A number of the run, from its result or from the row's other fields."""
        value = self.result.get(name) if name in self.result else getattr(self, name, None)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def title(self) -> str:
        """The name of its point, and whether it confirms the point."""
        return point_title(self.arm, {**self.conditions, **self.search}) + (", confirms" if self.confirms else "")

    @property
    def top1(self) -> float | None:
        """The accuracy; None for a failed run, even if it had an accuracy before it failed."""
        return None if self.error else self.number("top1")

    def to_dict(self) -> Values:
        """Returns one flat dict, in which the parts of the result are beside the other fields."""
        values: Values = {}
        for name, value in dataclasses.asdict(self).items():
            values |= value if name == "result" else {name: value}
        return values

    @classmethod
    def from_dict(cls, values: Values) -> Self:
        known = {f.name for f in dataclasses.fields(cls)} - {"result"}
        own = {name: value for name, value in values.items() if name in known}
        return cls(**own, result={name: value for name, value in values.items() if name not in known})


def append_row(folder: Path, row: Row) -> None:
    """Appends a row completely or not at all, even if other processes append at the same time. If a killed process has
    left an incomplete line, that line is ended first."""
    line = strict_json(row.to_dict()).encode() + b"\n"
    with open(folder / ROWS, "a+b", buffering=0) as file, _locked(file.fileno()):
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


def read_rows(folder: Path) -> list[Row]:
    """Returns the rows in the order in which they were written.

    Incomplete lines and lines that are not rows are skipped, and their runs are trained again.
    """
    try:
        text = (folder / ROWS).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{folder / ROWS}: cannot be read ({error.strerror})") from None
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # an incomplete line, or one without the required fields
            if isinstance(values := json.loads(line), dict):
                rows.append(Row.from_dict(values))
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """Returns one row per run: the one that was written last."""
    return list({row.digest: row for row in rows}.values())


def of_plan(rows: Iterable[Row], runs: Sequence[PlannedRun]) -> list[Row]:
    """Returns the rows of these runs, in their order and with the names that the plan has now."""
    found = {row.digest: row for row in rows}
    return [
        dataclasses.replace(
            found[run.digest],
            run=run.number,
            arm=run.point.arm,
            conditions=run.point.conditions,
            search=run.point.search,
            confirms=run.confirms,
        )
        for run in runs
        if run.digest in found
    ]


def read_environments(folder: Path) -> list[Values]:
    """The environments in which the rows were made."""
    path = folder / ENVIRONMENT
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); repair it or delete it") from None


def note_environment(folder: Path, environment: Values) -> None:
    """Adds the environment of a row to the file if it is not there yet."""
    with open(folder / ROWS, "ab") as file, _locked(file.fileno()):
        known = read_environments(folder)
        if environment not in known:
            replace_text(folder / ENVIRONMENT, strict_json([*known, environment], indent=1) + "\n")


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    yield  # closing the file releases the lock
