"""The sweep command: trains the runs of a plan that have no row yet, one after another in this process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperbatch.cores import usable_cores
from hyperbatch.data.source import DataCounts, check_data
from hyperbatch.durable import replace_text
from hyperbatch.engine.agent import count_gpus
from hyperbatch.engine.folder import holds_run
from hyperbatch.engine.ranks import ended_by_sigterm, find_ranks
from hyperbatch.engine.worker import end_with_parent
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.launch import check_input
from hyperbatch.report import units
from hyperbatch.sweep.missing import MissingRuns
from hyperbatch.sweep.page import write_page
from hyperbatch.sweep.plan import Plan, PlannedRun, load_plan, title
from hyperbatch.sweep.rows import (
    PLAN,
    REPORT,
    Row,
    append_row,
    note_environment,
    of_plan,
    read_environments,
    read_rows,
)
from hyperbatch.sweep.sharing import held
from hyperbatch.sweep.table import CONFIRM_NOTE, PointResult, format_points, interval_note, percent, points_of, progress
from hyperbatch.sweep.trainer import Trainer, ranks_of
from hyperbatch.trackers import trackers_of

WAIT_S = 1.0  # between two reads of the rows that other commands write

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """The state of a sweep when its command ends."""

    name: str
    folder: str
    planned: int
    done: int  # of the planned runs; without rows that confirm a point that is no longer the best
    rows: tuple[Row, ...]  # the plan's rows, in its order
    points: tuple[PointResult, ...]

    @property
    def failed(self) -> int:
        return sum(row.error is not None for row in self.rows)

    @property
    def all_failed(self) -> bool:
        return 0 < len(self.rows) == self.failed

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "folder": self.folder,
            "planned": self.planned,
            "done": self.done,
            "failed": self.failed,
            "points": [point.to_dict() for point in self.points],
            "rows": [row.to_dict() for row in self.rows],
            "report": str(Path(self.folder) / REPORT),
        }


def sweep(
    plan_file: Path,
    out: Path | None = None,
    *,
    data: str | None = None,
    part: tuple[int, int] = (1, 1),
    until_s: float | None = None,
    retry_failed: bool = False,
    keep_runs: bool = False,
    say: Say = lambda line: None,
) -> SweepResult:
    """Trains the missing runs and returns all results.

    out: the sweep's folder [sweeps/NAME]. data: the folder of the data set. part: (k, n), the k-th of n commands side
    by side. until_s: no run begins after this time. keep_runs: keeps a folder for each run, with its metrics, under
    `runs`.
    """
    if find_ranks() is not None:
        raise InputError(
            "a sweep runs in one process; start it without torchrun, srun or mpirun, and set nproc in "
            "the plan for several ranks"
        )
    begin_s = time.perf_counter()
    plan = load_plan(plan_file, data=data)
    check_runs(plan)
    folder = out or default_folder(plan)
    if holds_run(folder):
        raise InputError(f"--out {folder} holds a run, whose report would be replaced; choose another folder")
    say(f"{plan.name}: {units.plural(plan.count, 'run')} of {plan.recipe}, rows and report in {folder}")
    with contextlib.ExitStack() as stack:
        with written(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(folder, part))  # before prepare_folder: a refused command must not write its plan
        stack.enter_context(ended_by_sigterm())
        prepare_folder(folder, plan)
        trainer = Trainer(folder if keep_runs else None)
        missing = iter(MissingRuns(plan, folder, part=part, retry_failed=retry_failed))
        waiting = False
        try:
            for run in missing:
                if until_s is not None and time.perf_counter() - begin_s > until_s:
                    say(f"{until_s:g} s have passed; run the same command again to continue")
                    break
                if run is None:
                    if not waiting:
                        say("waiting for the searches of the other parts")
                    waiting = True
                    time.sleep(WAIT_S)
                    continue
                row = trainer.row_of(run)
                say(f"{run_label(plan, run)}  {progress_line(row)}")  # before the row, which may not fit on the disk
                (folder / PLAN).stat()  # not there: --keep-runs has made a folder again that was deleted with its rows
                if trainer.environment is not None:
                    note_environment(folder, trainer.environment)
                append_row(folder, row)
                trainer.check_device()
        except BrokenPipeError:  # stderr was closed
            raise
        except OSError as error:  # of the folder; a run's own errors are in its row
            raise RunFailed(
                f"the rows can no longer be written to {folder}: {error.strerror}; "
                "once that is repaired, run the same command again to continue"
            ) from None
        except KeyboardInterrupt:
            done = result_of(plan, folder)
            raise RunFailed(
                f"interrupted; {done.done} of {done.planned} rows are in {folder}; "
                "run the same command again to continue"
            ) from None
        finally:
            missing.close()
            trainer.close()
            page = write_if_possible(folder / REPORT, plan)
        if page is not None:  # only a warning, because the rows matter more
            say(f"warning: {folder / REPORT} could not be written: {page}; the same command writes it later")
    return result_of(plan, folder)


def rerun(plan_file: Path, number: int, *, data: str | None = None) -> Row:
    """Trains one run of the plan now, even if it already has a row, and writes nothing."""
    plan = load_plan(plan_file, data=data)
    runs = {run.number: run for run in plan.every_run}
    if number not in runs:
        raise InputError(f"--row {number}: the plan has runs 1 to {len(runs)}; --dry-run lists them")
    run = runs[number]
    check_runs(plan, [run])
    with ended_by_sigterm(), contextlib.closing(Trainer(None)) as trainer:
        return trainer.row_of(run)


def side_by_side(
    plan_file: Path,
    out: Path | None,
    count: int,
    *,
    data: str | None = None,
    until_s: float | None = None,
    retry_failed: bool = False,
    keep_runs: bool = False,
) -> SweepResult:
    """Starts `count` commands that share runs, folder, cores and GPUs. Each uses at most one GPU."""
    plan = load_plan(plan_file, data=data)
    check_runs(plan)
    folder = out or default_folder(plan)
    gpus = visible_gpus()
    # If threads that wait for one another share a core, they take ten times as long.
    shared = {"OMP_NUM_THREADS": str(max(1, usable_cores() // count))} | os.environ
    words = [sys.executable, "-m", "hyperbatch", "sweep", str(plan_file), "--out", str(folder)]
    words += [] if data is None else ["--data", data]
    words += [] if until_s is None else ["--until", str(until_s)]
    words += [flag for flag, given in (("--retry-failed", retry_failed), ("--keep-runs", keep_runs)) if given]
    children = [
        subprocess.Popen(
            [*words, "--part", f"{k}/{count}"],
            stdout=subprocess.DEVNULL,
            env=shared | ({"CUDA_VISIBLE_DEVICES": gpus[(k - 1) % len(gpus)]} if gpus else {}),
            preexec_fn=end_with_parent,
        )
        for k in range(1, count + 1)
    ]
    try:
        with ended_by_sigterm():
            codes = [child.wait() for child in children]
    except KeyboardInterrupt:
        for child in children:
            child.terminate()  # a job that a script started with & ignores SIGINT, and so do its processes
        codes = [child.wait() for child in children]
    if any(codes):
        raise (InputError if 2 in codes else RunFailed)(
            "a part of the sweep ended early (see above); run the same command again to continue"
        )
    return result_of(plan, folder)


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        [str(i) for i in range(count_gpus())] if named is None else [name for name in named.split(",") if name.strip()]
    )


def default_folder(plan: Plan) -> Path:
    return Path("sweeps") / plan.name


def check_runs(plan: Plan, runs: Sequence[PlannedRun] | None = None) -> None:
    """Makes the checks of `hyperbatch train` for every point of the plan, before anything is trained."""
    counts: dict[Any, DataCounts] = {}
    for run in {id(run.point): run for run in runs or plan.runs}.values():
        config = run.config
        try:
            if config.data not in counts:
                counts[config.data] = check_data(config.data)
            check_input(config, ranks_of(config), counts[config.data])
            trackers_of(config)
        except InputError as error:
            raise InputError(f"{title(run.point)}: {error}") from None


def prepare_folder(folder: Path, plan: Plan) -> None:
    """Creates the folder and writes the plan into it."""
    with written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / PLAN, plan.text)
        read_environments(folder)  # if it is damaged, the first row could not be written after its run


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """Wraps the first writes to the folder and turns their errors into InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"--out {folder} cannot be written: {error.strerror}; choose another folder") from None


def write_if_possible(path: Path, plan: Plan) -> str | None:
    """Writes the report. Returns None, or the reason why it could not be written."""
    try:
        write_page(path, plan, result_of(plan, path.parent).points)
    except OSError as error:
        return error.strerror
    return None


def result_of(plan: Plan, folder: Path) -> SweepResult:
    rows = of_plan(read_rows(folder), plan.every_run)
    points = points_of(rows)
    done, planned = progress(plan, points)
    return SweepResult(
        name=plan.name, folder=str(folder), planned=planned, done=done, rows=tuple(rows), points=tuple(points)
    )


def run_label(plan: Plan, run: PlannedRun) -> str:
    """The run's number, with the number of runs. Of runs that confirm a search most are never made: no total."""
    return str(run.number) if run.confirms else f"{run.number}/{len(plan.runs)}"


def progress_line(row: Row) -> str:
    point = f"{row.title}, seed {row.seed}"
    if row.error is not None:
        outcome = f"failed: {row.error}"
    else:
        train_s, wall_s = (units.significant(row.number(name) or 0.0, 4) for name in ("train_s", "wall_s"))
        outcome = f"{percent(row.top1)} top-1, {train_s} s of training, {wall_s} s in all"
    return f"{point}  {outcome}"


def format_sweep(result: SweepResult) -> str:
    """Formats the table, the number of missing runs, and the path of the report."""
    left = result.planned - result.done
    lines = [format_points(result.points), interval_note()] if result.points else ["no run has ended yet"]
    lines += [CONFIRM_NOTE] if any(point.confirms for point in result.points) else []
    words = [f"{result.done} of {units.plural(result.planned, 'run')} done"]
    if failed := [row for row in result.rows if row.error is not None]:
        words.append(f"{len(failed)} failed, the first of them (run {failed[0].run}): {failed[0].error}")
    words += ["run the same command again for the others"] if left else []
    return "\n".join([*lines, "; ".join(words), f"report: {Path(result.folder) / REPORT}"])


def format_plan_runs(plan: Plan) -> str:
    """Formats the output of --dry-run: every run with its number and command, and the possible confirmations."""
    lines = [f"{plan.name}: {units.plural(plan.count, 'run')} of {plan.recipe}"]
    for step in plan.in_order():
        if isinstance(step, PlannedRun):
            lines += [f"{step.number:>5}  {title(step.point)}, seed {step.seed}", f"       {step.command}"]
        else:
            seeds = units.plural(len(step.seeds), "seed") + f" ({', '.join(map(str, step.seeds))})"
            numbers = f"{step.fresh[0].number} to {step.fresh[-1].number}, {len(step.seeds)} for each point"
            points = units.plural(len(step.fresh) // len(step.seeds), "point")
            best = f"the best of these {points} is repeated with {seeds}"
            lines.append(f"       {step.title}: {best}; numbers {numbers}")
    return "\n".join(lines)
