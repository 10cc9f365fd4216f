"""What a command has still to make: the runs without a row, and the confirmation of each search that is complete.

Of the plan's runs a command makes its part. Which runs confirm a search is known when all of its rows are there,
whoever wrote them; then they are made by any command that is free. Until then one that is free waits, as long as
another one searches:

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
    """The runs of its best point; none where every run failed; None as long as a run of the search has no row."""
    found = of_plan(rows, search.runs)
    if len(found) < len(search.runs):
        return None
    best = best_points(points_of(found))[search.point.place]
    if best.top1.mean is None:
        return []
    return [run for run in search.fresh if key_of(run.point.search) == key_of(best.search)]


class MissingRuns:
    """Yields a run when the row of the one before is there, and None while the others' rows must be waited for."""

    def __init__(self, plan: Plan, folder: Path, *, part: tuple[int, int], retry_failed: bool) -> None:
        """part: (k, n), the k-th of n commands side by side."""
        self._plan = plan
        self._folder = folder
        self._alone = part[1] == 1
        self._own = {run.number for run in plan.runs[part[0] - 1 :: part[1]]}
        self._retry_failed = retry_failed
        self._before = len(read_rows(folder))  # failed ones among these are made again on demand, later ones are not

    def __iter__(self) -> Generator[PlannedRun | None, None, None]:
        with searching(self._folder):
            for step in self._plan.in_order():
                if isinstance(step, Search):
                    if self._alone:  # others wait for the runs of this part
                        yield from self._confirm(step, others=False)
                elif step.number in self._own and not self._is_done(step):
                    yield step
        left = list(self._plan.searches)
        while left:
            others = others_search(self._folder)  # before rows are read: who has ended by now has written its own
            waiting = []
            for search in left:
                complete = yield from self._confirm(search, others=others)
                waiting += [] if complete else [search]
            if waiting and others:
                yield None
            left = waiting if others else []  # nobody is there who makes what is missing

    def _confirm(self, search: Search, *, others: bool) -> Generator[PlannedRun, None, bool]:
        """Whether the search is complete. others: whether other commands may still add to it."""
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
        """Read anew each time: other commands write there, too."""
        rows = read_rows(self._folder)
        return run.digest in {row.digest for row in rows} and not self._to_retry(run, rows)

    def _to_retry(self, run: PlannedRun, rows: list[Row]) -> bool:
        """Whether its last row is one of a failure, from before this command."""
        digest = run.digest
        place = max((i for i, row in enumerate(rows) if row.digest == digest), default=None)
        return self._retry_failed and place is not None and place < self._before and rows[place].error is not None
