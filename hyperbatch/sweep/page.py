"""The report of a sweep: the arms side by side, the search of each arm, every point and every row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hyperbatch
from hyperbatch.durable import replace_text
from hyperbatch.report import chart as charts
from hyperbatch.report import units
from hyperbatch.report.compare import swatch
from hyperbatch.report.markup import Html, el, join, table
from hyperbatch.report.page import document, top
from hyperbatch.report.sections import card, folded
from hyperbatch.sweep.charts import sweep_charts
from hyperbatch.sweep.plan import Plan
from hyperbatch.sweep.rows import PLAN, Row
from hyperbatch.sweep.table import (
    CONFIRM_NOTE,
    SEARCH_NOTE,
    PointResult,
    accuracy,
    arms_of,
    columns,
    found,
    interval_note,
    is_unconfirmed,
    percent,
    progress,
    setting_names,
    side_by_side,
)


def write_page(path: Path, plan: Plan, points: Sequence[PointResult]) -> None:
    replace_text(path, render_sweep(plan, points))


def render_sweep(plan: Plan, points: Sequence[PointResult]) -> str:
    rows = [row for point in points for row in point.rows]
    done, planned = progress(plan, points)
    about = [el("p", text, cls="lead") for text in plan.about.split("\n\n") if text]
    body = join(
        top(plan.name, f"{plan.recipe} · {done} of {units.plural(planned, 'run')}"),
        el("section", about, cls="card") if about else None,
        _alerts(rows),
        _arms(points),
        _drawn(points),
        _points(points),
        _rows(rows),
        _again(rows),
    )
    return document(plan.name, body, f"Drawn by hyperbatch {hyperbatch.__version__} from the sweep's own rows.")


def _alerts(rows: Sequence[Row]) -> Html | None:
    failed = [row for row in rows if row.error is not None]
    if not rows:
        return el("p", "No run has ended yet.", cls="alert warn")
    if not failed:
        return None
    return el(
        "p", f"{len(failed)} of {units.plural(len(rows), 'run')} failed; the means exclude them.", cls="alert warn"
    )


def _arms(points: Sequence[PointResult]) -> Html | None:
    """A table with a line per condition and a column per arm. An arm that searched is shown at its best point."""
    arms = arms_of(points)
    if len(arms) < 2:
        return None

    def cells(here: Sequence[PointResult | None]) -> list[str | Html]:
        highest = max((point.top1.mean or 0.0 for point in here if point is not None), default=None)
        return [
            units.NONE if point is None else _cell(point, points, best=point.top1.mean == highest) for point in here
        ]

    searched = any(point.search for point in points)
    note = CONFIRM_NOTE if any(point.confirms for point in points) else SEARCH_NOTE
    lead = "Mean top-1 of each arm" + (f", at the best point of its own search. {note} " if searched else ". ")
    head, rows = side_by_side(points, [join(swatch(i), arm) for i, arm in enumerate(arms)], cells)
    return card("Arms compared", lead + interval_note(), table(head, rows, cls="compare stack"))


def _cell(point: PointResult, points: Sequence[PointResult], *, best: bool) -> Html:
    text = accuracy(point.top1) if point.top1.n else "every run failed"
    runs = units.plural(len(point.rows), "run" if point.confirms is None else "fresh seed")
    failed = f"{point.failed} failed" if point.failed else ""
    chosen = "not confirmed" if is_unconfirmed(point, points) else ""
    more = el("span", f" {', '.join(filter(None, [found(point), runs, failed, chosen]))}", cls="note")
    return join(el("span", text, cls="figure best" if best else "figure"), more)


def _drawn(points: Sequence[PointResult]) -> Html | None:
    figures, shown = [], sweep_charts(points)
    for chart in shown:
        named = [(line.label, line.color) for line in chart.lines if not line.faint]
        key = el("div", [el("span", swatch(color), label) for label, color in named], cls="key")
        figures.append(el("div", charts.draw(chart), key if len(named) > 1 else None))
    if not figures:
        return None
    bands = any(chart.bands for chart in shown)
    note = "A band is the confidence interval of a mean." if bands else ""
    return card("Curves", note, el("div", figures, cls="charts"))


def _points(points: Sequence[PointResult]) -> Html | None:
    if not points:
        return None
    head, rows = columns(points)
    numeric = {place for place in range(1 + len(setting_names(points)), len(head)) if head[place] != "confirms"}
    return card(
        "Every point", interval_note(), table([*head], [[*row] for row in rows], numeric=numeric, cls="compare stack")
    )


def _rows(rows: Sequence[Row]) -> Html | None:
    if not rows:
        return None
    head = ["run", "point", "seed", "top-1", "epochs", "steps", "set-up", "training", "in all", "outcome"]
    lines = []
    for row in rows:
        numbers = [row.number(name) for name in ("epochs", "steps", "setup_s", "train_s", "wall_s")]
        epochs, steps, *spent = numbers
        outcome = row.error or ("reached its target" if row.result.get("reached") else "")
        counts = [percent(row.top1), units.number(epochs), units.count(steps), *map(units.duration, spent)]
        lines.append([row.run, row.title, row.seed, *counts, outcome])
    commands = el("pre", "\n".join(row.command for row in rows))
    return card(
        "Every run",
        "Set-up is the time before the first step; in all includes evaluation and the time between runs.",
        folded(f"all {units.plural(len(rows), 'row')}", table([*head], lines, numeric={0, *range(2, 9)})),
        folded("the command of each run alone", commands),
    )


def _again(rows: Sequence[Row]) -> Html | None:
    if not rows:
        return None
    made = dict.fromkeys((row.device, row.torch, row.commit) for row in rows if row.device)
    shown = [[device, torch, commit or units.NONE] for device, torch, commit in made]
    return card(
        "How to repeat it",
        "--row repeats one run and prints its row.",
        table(["device", "torch", "commit"], shown, cls="tight") if shown else None,
        el("pre", f"hyperbatch sweep {PLAN} --out DIR\nhyperbatch sweep {PLAN} --row {rows[0].run}"),
    )
