"""Rows -> one line per point: the number of its runs, and mean, deviation and interval of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hyperbatch.report import units
from hyperbatch.sweep.plan import Place, Plan, setting
from hyperbatch.sweep.rows import Row
from hyperbatch.sweep.statistics import CONFIDENCE, Spread, spread
from hyperbatch.sweep.values import Values, key_of, show
from hyperbatch.tables import text_table

SEARCH_NOTE = (
    "The best point of a search has the highest mean top-1 on the images that are reported, so its mean is biased "
    "upwards if many points have few seeds each."
)
CONFIRM_NOTE = (
    "The mean of a confirmed point is from fresh seeds, which had no part in the selection. The mean of a point that "
    "is only the best of its search is biased upwards."
)
ACROSS = 5  # the most arms that fit side by side on a page
OTHER_ACCURACIES = {"top1_plain": "top-1 without test-time augmentation"}
TIMES = {"run_s": "whole run", "train_s": "training", "time_to_target_s": "to target"}
MEASURES = ("run_s", "train_s", "time_to_target_s", "setup_s", "eval_s", "wall_s", "epochs", "steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The search whose best point was trained again with fresh seeds."""

    points: int
    fewest_seeds: int  # the fewest seeds of any point
    most_seeds: int
    stands: bool  # whether the point is still the best of the search: one that was extended later may have a better one

    def __str__(self) -> str:
        if not self.stands:
            return "best of an earlier search"
        seeds = units.plural(self.most_seeds, "seed")
        seeds = seeds if self.fewest_seeds == self.most_seeds else f"{self.fewest_seeds} to {seeds}"
        return f"best of {self.points} points with {seeds} each"


@dataclass(frozen=True, kw_only=True, slots=True)
class PointResult:
    """All runs of one point, or those that confirm it. Failed runs are counted but excluded from the means."""

    arm: str
    conditions: Values
    search: Values
    confirms: Choice | None  # None: runs that are trained in any case
    rows: tuple[Row, ...]
    top1: Spread
    measures: dict[str, Spread]  # MEASURES, and other accuracies that a run reports (e.g. without augmentation)

    @property
    def failed(self) -> int:
        return sum(row.error is not None for row in self.rows)

    @property
    def reached(self) -> int:
        return sum(bool(row.result.get("reached")) for row in self.rows)

    @property
    def place(self) -> Place:
        return key_of(self.conditions), self.arm

    @property
    def settings(self) -> Values:
        return {**self.conditions, **self.search}

    def to_dict(self) -> Values:
        return {
            "arm": self.arm,
            "conditions": self.conditions,
            "search": self.search,
            "confirms": None if self.confirms is None else asdict(self.confirms),
            "runs": len(self.rows),
            "failed": self.failed,
            "reached": self.reached,
            "top1": asdict(self.top1),
            **{name: asdict(values) for name, values in self.measures.items()},
        }


def points_of(rows: Iterable[Row]) -> list[PointResult]:
    """Returns the points in the order in which they first appear."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = repr((row.arm, key_of(row.conditions), key_of(row.search), row.confirms))
        groups.setdefault(name, []).append(row)
    plain = {name: _point(rows) for name, rows in groups.items() if not rows[0].confirms}
    return [plain.get(name) or _point(rows, list(plain.values())) for name, rows in groups.items()]


def _point(rows: Sequence[Row], among: Sequence[PointResult] | None = None) -> PointResult:
    """among: the points of which these rows confirm one."""
    first, good = rows[0], [row for row in rows if row.error is None]
    named = {name for row in good for name in row.result if name.startswith("top1_")}
    more = sorted(name for name in named if any(row.number(name) is not None for row in good))

    def of(name: str) -> Spread:
        return spread([value for row in good if (value := row.number(name)) is not None])

    return PointResult(
        arm=first.arm,
        conditions=first.conditions,
        search=first.search,
        confirms=None if among is None else _choice(first, among),
        rows=tuple(rows),
        top1=of("top1"),
        measures={name: of(name) for name in (*more, *MEASURES)},
    )


def _choice(row: Row, among: Sequence[PointResult]) -> Choice:
    rivals = [point for point in among if point.place == (key_of(row.conditions), row.arm)]
    counts = [len(point.rows) for point in rivals]
    return Choice(
        points=len(rivals),
        fewest_seeds=min(counts, default=0),
        most_seeds=max(counts, default=0),
        stands=any(key_of(best.search) == key_of(row.search) for best in best_points(rivals).values()),
    )


def best_points(points: Iterable[PointResult]) -> dict[Place, PointResult]:
    """Returns the point with the highest mean accuracy of each arm under each condition; the first of equal ones.

    If the point was confirmed, the runs with fresh seeds represent it.
    """
    best: dict[Place, PointResult] = {}
    for point in points:
        if point.confirms is None or point.confirms.stands:
            before = best.get(point.place)
            if before is None or _merit(point) > _merit(before):
                best[point.place] = point
    return best


def is_unconfirmed(point: PointResult, points: Iterable[PointResult]) -> bool:
    """Whether a point represents its arm because it was the best of several, judged by the runs that are shown."""
    rivals = {key_of(other.search) for other in points if other.place == point.place and other.confirms is None}
    return point.confirms is None and len(rivals) > 1


def counted(point: PointResult) -> str:
    """The number of runs: `10`, or `9 + 1 failed`."""
    return str(point.top1.n) + (f" + {point.failed} failed" if point.failed else "")


def _merit(point: PointResult) -> tuple[bool, float]:
    return point.confirms is not None, -1.0 if point.top1.mean is None else point.top1.mean


def progress(plan: Plan, points: Sequence[PointResult]) -> tuple[int, int]:
    """Returns (runs that are done, runs of the plan), without runs that confirm a point that is no longer the best.

    A search in which every run failed has no best point and nothing to confirm.
    """
    done = sum(len(point.rows) for point in points if point.confirms is None or point.confirms.stands)
    vain = 0
    for search in plan.searches:
        here = [point for point in points if point.confirms is None and point.place == search.point.place]
        complete = sum(len(point.rows) for point in here) >= len(search.runs)
        vain += len(search.seeds) if complete and all(point.top1.mean is None for point in here) else 0
    return done, plan.count - vain


def arms_of(points: Iterable[PointResult]) -> list[str]:
    return list(dict.fromkeys(point.arm for point in points))


def compared(points: Sequence[PointResult]) -> tuple[list[str], list[tuple[list[str], list[PointResult | None]]]]:
    """Returns (names of the conditions, a line for each condition: its values and the best point of every arm)."""
    best, arms = best_points(points), arms_of(points)
    names = list(dict.fromkeys(name for point in points for name in point.conditions))
    places = sorted({key_of(point.conditions) for point in points}, key=lambda place: [_in_order(v) for _, v in place])
    return names, [([value for _, value in place], [best.get((place, arm)) for arm in arms]) for place in places]


def side_by_side(
    points: Sequence[PointResult], arms: Sequence[Any], cells: Callable[[Sequence[PointResult | None]], Sequence[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """Returns the comparison of the arms as (head, rows): a row per condition, or a row per arm if there are many arms.

    arms: their names as they are shown. cells: returns the cells for the points of one condition.
    """
    names, lines = compared(points)
    if len(arms) <= ACROSS:
        head = [*(name.replace("_", " ") for name in names), *arms]
        return head, [[*values, *cells(here)] for values, here in lines]
    conditions = [
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in zip(names, values, strict=True)) or "top-1"
        for values, _ in lines
    ]
    columns = [cells(here) for _, here in lines]
    return ["arm", *conditions], [[arm, *(column[i] for column in columns)] for i, arm in enumerate(arms)]


def _in_order(text: str) -> tuple[float, str]:
    """The sort key: numbers by size, then texts."""
    try:
        return float(text), ""
    except ValueError:
        return float("inf"), text


def setting_names(points: Iterable[PointResult]) -> list[str]:
    """The fields in which points differ, conditions first."""
    points = list(points)
    names = [name for point in points for name in point.conditions]
    return list(dict.fromkeys([*names, *(name for point in points for name in point.search)]))


def columns(points: Sequence[PointResult]) -> tuple[list[str], list[list[str]]]:
    """Returns (head, a row of texts per point), as terminal, report and documents show them."""
    names = setting_names(points)
    more = list(dict.fromkeys(name for point in points for name in point.measures if name.startswith("top1_")))
    times = [name for name in TIMES if any(point.measures[name].n for point in points)]
    head = ["arm", *(name.replace("_", " ") for name in names), "runs", "top-1", "deviation", "range"]
    confirmed = any(point.confirms for point in points)
    head += [*(OTHER_ACCURACIES.get(name, name.replace("_", " ")) for name in more), *(TIMES[name] for name in times)]
    head += ["confirms"] if confirmed else []
    rows = []
    for point in points:
        shown = [show(point.settings[name]) if name in point.settings else units.NONE for name in names]
        top1 = point.top1
        low_high = f"{percent(top1.low)} to {percent(top1.high)}" if top1.n > 1 else units.NONE
        row = [point.arm, *shown, counted(point), accuracy(top1), percent(top1.deviation), low_high]
        row += [accuracy(point.measures[name]) if name in point.measures else units.NONE for name in more]
        row += [_time(point, name) for name in times]
        rows.append([*row, str(point.confirms or units.NONE)] if confirmed else row)
    return head, rows


def accuracy(values: Spread) -> str:
    """The mean and its confidence interval."""
    return _with_interval(percent(values.mean), percent(values.half_width), values)


def percent(share: float | None) -> str:
    """Formats a fraction with two decimals, so that columns can be compared."""
    return units.NONE if share is None else f"{share:.2%}".replace("%", " %")


def seconds(values: Spread) -> str:
    text = units.NONE if values.mean is None else f"{units.significant(values.mean, 4)} s"
    return _with_interval(text, f"{units.significant(values.half_width or 0.0, 2)} s", values)


def _time(point: PointResult, name: str) -> str:
    """Only runs that reach the target have a time to it: the mean says of how many it is."""
    values = point.measures[name]
    runs = f" ({values.n} of {point.top1.n} runs)" if 0 < values.n < point.top1.n else ""
    return seconds(values) + runs


def _with_interval(mean: str, half: str, values: Spread) -> str:
    return mean if values.half_width is None else f"{mean} ± {half}"


def found(point: PointResult) -> str:
    """The values that an arm's own search selected, e.g. `lr 2, trust coefficient 0.04`."""
    return ", ".join(setting(name, value) for name, value in point.search.items())


def interval_note() -> str:
    share = f"{CONFIDENCE:.0%}".replace("%", " %")
    return f"± is the {share} confidence interval of the mean (Student's t); the means exclude failed runs."


def format_points(points: Sequence[PointResult]) -> str:
    """Formats the points as aligned lines for a terminal."""
    head, rows = columns(points)
    return "\n".join(text_table(head, rows, left=len(head)))
