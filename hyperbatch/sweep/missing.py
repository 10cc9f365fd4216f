"""The runs that a command still has to train: runs without a row, and the confirmation of each complete search.

Each command trains its part of the plan's runs. The runs that confirm a search are known as soon as all rows of the
search exist, whichever command wrote them. Any command that is free then trains them. Until then, a free command waits
as long as another one is still searching:

    part 1/2   search  search  search  .......  confirm  confirm
    part 2/2   search  search  search  search   confirm  confirm  confirm
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path

from hyperbatch.sweep.plan import Plan, PlannedRun, Search
from hyperbatch.sweep.rows import Row, of_plan, read_rows
from hyperbatch.sweep.sharing import claimed, others_search, searching
from hyperbatch.sweep.table import best_points, points_of
from hyperbatch.sweep.values import key_of


def confirming(search: Search, rows: Iterable[Row]) -> list[PlannedRun] | None:
    """Returns the runs that confirm the best point: [] if every run failed, None if a run has no row yet."""
    found = of_plan(rows, search.runs)
    if len(found) < len(search.runs):
        return None
    best = best_points(points_of(found))[search.point.place]
    if best.top1.mean is None:
        return []
    return [run for run in search.fresh if key_of(run.point.search) == key_of(best.search)]


class MissingRuns:
    """Yields a run once the row of the previous one is written, and None while rows of other commands are missing."""

    def __init__(self, plan: Plan, folder: Path, *, part: tuple[int, int], retry_failed: bool) -> None:
        """part: (k, n), the k-th of n commands side by side."""
        self._plan = plan
        self._folder = folder
        self._alone = part[1] == 1
        self._own = {run.number for run in plan.runs[part[0] - 1 :: part[1]]}
        self._retry_failed = retry_failed
        self._before = len(read_rows(folder))  # with retry_failed, only failures among these are repeated

    def __iter__(self) -> Generator[PlannedRun | None, None, None]:
        with searching(self._folder):
            for step in self._plan.in_order():
                if isinstance(step, Search):
                    if self._alone:  # other commands wait for the runs of this part
                        yield from self._confirm(step, others=False)
                elif step.number in self._own and not self._is_done(step):
                    yield step
        left = list(self._plan.searches)
        while left:
            others = others_search(self._folder)  # before reading rows: who has ended has written them
            waiting = []
            for search in left:
                complete = yield from self._confirm(search, others=others)
                waiting += [] if complete else [search]
            if waiting and others:
                yield None
            left = waiting if others else []  # no command is left that would make the missing rows

    def _confirm(self, search: Search, *, others: bool) -> Generator[PlannedRun, None, bool]:
        """Yields the runs that confirm the search. Returns whether it is complete. others: others may add rows."""
        rows = read_rows(self._folder)
        runs = confirming(search, rows)
        if runs is None or (others and any(self._to_retry(run, rows) for run in search.runs)):
            return False
        for run in runs:
            with claimed(self._folder, run.digest) as free:
                if free and not self._is_done(run):
                    yield run
        return True

    def _is_done(self, run: PlannedRun) -> bool:
        """Rows are read again each time, because other commands write them too."""
        rows = read_rows(self._folder)
        return run.digest in {row.digest for row in rows} and not self._to_retry(run, rows)

    def _to_retry(self, run: PlannedRun, rows: list[Row]) -> bool:
        """Whether the run's last row is a failure from before this command that is to be repeated."""
        digest = run.digest
        place = max((i for i, row in enumerate(rows) if row.digest == digest), default=None)
        return self._retry_failed and place is not None and place < self._before and rows[place].error is not None
