"""The charts of a sweep: a comparison of the arms, the search of each arm, and the spread over seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hyperbatch.report.chart import Band, Chart, Line
from hyperbatch.sweep.plan import setting
from hyperbatch.sweep.table import PointResult, arms_of, best_points
from hyperbatch.sweep.values import key_of

Place = tuple[float, PointResult]
MOST_LINES = 16  # the most single runs that a reader can tell apart in a chart
X = ""  # the x axis has no label, since the chart's title names it


def sweep_charts(points: Sequence[PointResult]) -> list[Chart]:
    """Returns the charts that have data."""
    made = [comparison_chart(points), *search_charts(points), seeds_chart(points)]
    return [chart for chart in made if chart is not None]


def comparison_chart(points: Sequence[PointResult]) -> Chart | None:
    """Draws the best point of each arm against the first condition that is numeric and varies."""
    best = list(best_points(points).values())
    axis = _varying([point.conditions for point in best])
    if axis is None:
        return None
    lines: dict[str, list[Place]] = {}
    for point in best:
        rest = [setting(name, value) for name, value in point.conditions.items() if name != axis]
        lines.setdefault(", ".join([point.arm, *rest]), []).append((float(point.conditions[axis]), point))
    words = axis.replace("_", " ")
    tuned = ", best of its own search" if any(point.search for point in best) else ""
    return _chart("compared", f"Top-1 against {words}{tuned}", lines, _colors(points))


def search_charts(points: Sequence[PointResult]) -> list[Chart]:
    """Draws a chart for each condition and each number that is the first one to vary in the search of some arms."""
    charts = []
    colors = _colors(points)
    points = [point for point in points if point.confirms is None]
    for conditions in dict.fromkeys(key_of(point.conditions) for point in points):
        here = [point for point in points if key_of(point.conditions) == conditions]
        axes = {arm: _varying([point.search for point in here if point.arm == arm]) for arm in arms_of(here)}
        for axis in dict.fromkeys(axis for axis in axes.values() if axis is not None):
            lines: dict[str, list[Place]] = {}
            for point in here:
                if axes[point.arm] == axis and axis in point.search:
                    rest = [setting(name, value) for name, value in point.search.items() if name != axis]
                    lines.setdefault(", ".join([point.arm, *rest]), []).append((float(point.search[axis]), point))
            where = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in conditions)
            title = f"Top-1 against {axis.replace('_', ' ')}" + (f" at {where}" if where else "")
            chart = _chart(f"search{len(charts)}", title, lines, colors)
            charts += [] if chart is None else [chart]
    return charts


def seeds_chart(points: Sequence[PointResult]) -> Chart | None:
    """Draws the runs of each arm's best points, from the lowest accuracy to the highest."""
    lines: list[Line] = []
    colors = _colors(points)
    others = itertools.count(len(colors))
    for point in (p for p in best_points(points).values() if p.top1.n > 2):
        color = colors[point.arm]
        color = next(others) if any(line.color == color for line in lines) else color
        values = sorted(value for row in point.rows if (value := row.top1) is not None)
        label = ", ".join([point.arm, *(setting(name, value) for name, value in point.conditions.items())])
        x = {"runs": [float(i + 1) for i in range(len(values))]}
        lines.append(Line(label=label, color=color, x=x, y=values, dots=len(values) <= 60))
    if not lines or len(lines) > MOST_LINES:
        return None
    title = "Top-1 of each run, from the lowest to the highest"
    return Chart(key="seeds", title=title, form="percent", lines=lines, axes=("runs",), from_zero=False, ceiling=1.0)


def _varying(settings: Sequence[dict[str, Any]]) -> str | None:
    """Returns the first field that is numeric and has several values."""
    for name in dict.fromkeys(name for values in settings for name in values):
        found = {values[name] for values in settings if name in values and _is_number(values[name])}
        if len(found) > 1 and all(_is_number(values[name]) for values in settings if name in values):
            return name
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _colors(points: Sequence[PointResult]) -> dict[str, int]:
    """The color of each arm, the same in every chart and in the table."""
    return {arm: color for color, arm in enumerate(arms_of(points))}


def _chart(key: str, title: str, series: dict[str, list[Place]], colors: dict[str, int]) -> Chart | None:
    """Draws means over seeds, and their confidence intervals as bands. An arm's first line has the arm's color."""
    lines: list[Line] = []
    bands: list[Band] = []
    every: list[float] = []
    others = itertools.count(len(colors))
    for label, places in series.items():
        known = sorted(((x, p.top1) for x, p in places if p.top1.mean is not None), key=lambda place: place[0])
        if not known:
            continue
        own = colors[places[0][1].arm]
        color = next(others) if any(line.color == own for line in lines) else own
        x = {X: [place for place, _ in known]}
        every += x[X]
        means = [values.mean or 0.0 for _, values in known]
        halves = [values.half_width or 0.0 for _, values in known]
        if any(halves):
            low = [max(0.0, mean - half) for mean, half in zip(means, halves, strict=True)]  # an accuracy is a share
            high = [min(1.0, mean + half) for mean, half in zip(means, halves, strict=True)]
            bands.append(Band(color=color, x=x, low=low, high=high))
        lines.append(Line(label=label, color=color, x=x, y=means, dots=True))
    if all(len(line.y) < 2 for line in lines):  # e.g. because all other points failed; the table has these
        return None
    log = min(every) > 0 and max(every) / min(every) >= 4
    return Chart(
        key=key,
        title=title,
        form="percent",
        lines=lines,
        bands=bands,
        axes=(X,),
        from_zero=False,
        ceiling=1.0,
        log_x=log,
    )
