"""Assembles a report: headline and accuracy first, then the curves, then the run's configuration and environment."""

from __future__ import annotations

import json
import math
from typing import Any

import hyperbatch
from hyperbatch.report import chart as charts
from hyperbatch.report import classes, compare, ranks, sections, setup, timing, trust, units
from hyperbatch.report.chart import Chart, Line
from hyperbatch.report.markup import Html, el, join
from hyperbatch.report.runs import Run, axis_values, sample, smooth
from hyperbatch.report.style import CSS, SCRIPT

POINTS = 1600  # per curve and for all runs together: more than the pixels of a chart, and far less than a megabyte


def render(runs: list[Run]) -> str:
    drawn = curves(runs)
    accuracy, others = drawn[0], drawn[1:]
    body = _single(runs[0], accuracy, others) if len(runs) == 1 else _several(runs, accuracy, others)
    box = [charts.HEIGHT, charts.LEFT, charts.RIGHT, charts.TOP, charts.BOTTOM]
    hover = {"box": box, "charts": charts.hover_data(drawn), "heat": [trust.heat_data(run) for run in runs]}
    points = json.dumps(hover, separators=(",", ":"))
    # "</" inside the data would end the script element.
    data = el("script", Html(points.replace("</", "<\\/")), type="application/json", id="points")
    footer = f"Drawn by hyperbatch {hyperbatch.__version__} from the run's own files."
    return document(_title(runs), body, footer, data, el("script", Html(SCRIPT)), data_axis="time")


def document(title: str, body: Html, footer: str, *scripts: Html, **attributes: str) -> str:
    """Returns a page in one file, with the style of the report."""
    page = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("title", title),
            el("style", Html(CSS)),
        ),
        el("body", el("main", body, el("footer", footer)), *scripts),
        lang="en",
        **attributes,
    )
    return "<!doctype html>\n" + page + "\n"


def _title(runs: list[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    return f"{runs[0].record.recipe if runs[0].record else runs[0].name}: {sections.verdict(runs[0])[2]}"


def curves(runs: list[Run]) -> list[Chart]:
    accuracy, loss, val_loss, rate, batch, speed = [], [], [], [], [], []
    points = POINTS // max(4, len(runs))
    for color, run in enumerate(runs):
        accuracy.append(_accuracy(run, color, points))
        val_loss += _val_loss(run, color, points)
        keep = sample(run.steps, points, extremes=("loss", "images_per_s"), changes="global_batch")
        x = {axis: [values[i] for i in keep] for axis, values in axis_values(run.steps).items()}

        def line(values: list[float], *, color=color, run=run, keep=keep, x=x, **options: Any) -> Line:
            return Line(label=run.name, color=color, x=x, y=[values[i] for i in keep], **options)

        loss += [line(run.steps["loss"], faint=True), line(smooth(run.steps["loss"], 0.02))]
        speed += [line(run.steps["images_per_s"], faint=True), line(smooth(run.steps["images_per_s"], 0.01))]
        rate.append(line(run.steps["lr"]))
        batch.append(line(run.steps["global_batch"], stairs=True))
    targets = {run.target for run in runs if run.target is not None}
    several = len(runs) > 1
    notes = [f"{run.name}: not finite from step {run.first_bad_step:,} on" for run in runs if run.first_bad_step]
    return [
        Chart(
            key="accuracy",
            title="Top-1 accuracy",
            form="percent",
            lines=accuracy,
            ceiling=1.0,
            from_zero=False,
            target=targets.pop() if len(targets) == 1 else None,
        ),
        Chart(
            key="loss",
            title="Training loss",
            form="number",
            lines=loss,
            from_zero=False,
            notes=notes if several else [],
        ),
        *(
            [Chart(key="val_loss", title="Validation loss", form="number", lines=val_loss, from_zero=False)]
            * bool(val_loss)
        ),
        Chart(key="rate", title="Learning rate", form="number", lines=rate),
        Chart(key="batch", title="Global batch", form="count", lines=batch),
        Chart(key="speed", title="Images per second", form="count", lines=speed),
    ]


def _accuracy(run: Run, color: int, points: int) -> Line:
    top1 = run.evals["top1"]
    reached = next((i for i, value in enumerate(top1) if run.target is not None and value >= run.target), None)
    also = set() if reached is None else {reached}
    keep = sample(run.evals, points // 2, extremes=("top1",), changes="samples", also=also)
    x = {axis: [values[i] for i in keep] for axis, values in axis_values(run.evals).items()}
    return Line(label=run.name, color=color, x=x, y=[top1[i] for i in keep], dots=len(keep) <= 60)


def _val_loss(run: Run, color: int, points: int) -> list[Line]:
    """Returns no line for a run of an older version."""
    values = run.evals["val_loss"]
    if not any(map(math.isfinite, values)):
        return []
    keep = sample(run.evals, points // 2, extremes=("val_loss",), changes="samples")
    x = {axis: [column[i] for i in keep] for axis, column in axis_values(run.evals).items()}
    return [Line(label=run.name, color=color, x=x, y=[values[i] for i in keep], dots=len(keep) <= 60)]


def _curves_card(title: str, drawn: list[Chart], runs: list[Run]) -> Html:
    buttons = [
        el("button", text, type="button", data_set_axis=axis, aria_pressed="true" if axis == "time" else "false")
        for axis, text in (("time", "time"), ("epoch", "epochs"), ("step", "steps"))
    ]
    key = [el("span", compare.swatch(i), run.name) for i, run in enumerate(runs)] if len(runs) > 1 else []
    if any(line.faint for chart in drawn for line in chart.lines):
        key += [
            el("span", el("i", cls="stroke faint"), "faint: every step"),
            el("span", el("i", cls="stroke"), "bold: moving average"),
        ]
    if any(chart.target is not None for chart in drawn):
        key.append(el("span", el("i", cls="ring"), "ring: the target is reached"))
    return el(
        "section",
        el("div", el("h2", title), el("div", buttons, cls="switch", role="group", aria_label="x axis"), cls="head"),
        el("div", key, cls="key") if key else None,
        el("div", [charts.draw(chart) for chart in drawn], cls="charts"),
        cls="card",
    )


def top(title: str, where: str) -> Html:
    return el("header", el("h1", title), el("span", where, cls="where"), cls="top")


def _origin(run: Run) -> str:
    """When the run was made, and its seed, commit and folder."""
    env = run.record.environment if run.record else {}
    seed = sections.config_value(run.record, "run", "seed") if run.record else None
    parts = [f"seed {seed}" if seed is not None else "", str(env.get("date") or "").replace("T", " ")]
    parts.append(f"commit {env['commit']}" if env.get("commit") else "")
    return " · ".join(filter(None, [*parts, str(run.folder)]))


def _single(run: Run, accuracy: Chart, others: list[Chart]) -> Html:
    device = ranks.device_tile(run)
    headline = sections.headline(run, *([device] if device else []))
    return join(
        top(f"{run.record.recipe if run.record else run.name}", _origin(run)),
        sections.alerts(run),
        el("section", el("div", headline), charts.draw(accuracy), cls="card hero"),
        _curves_card("Training", others, [run]),
        _details(run),
    )


def _details(run: Run, number: int = 0) -> Html:
    return join(
        timing.where_time_went(run),
        ranks.ranks(run),
        sections.groups(run),
        classes.by_class(run),
        trust.trust_ratios(run, number),
        sections.phases(run),
        setup.config(run),
        setup.reproduce(run),
    )


def _several(runs: list[Run], accuracy: Chart, others: list[Chart]) -> Html:
    folded = [
        el(
            "details",
            el("summary", compare.swatch(index), f"{run.name}: {sections.verdict(run)[2]}"),
            sections.alerts(run),
            _details(run, index),
            cls="card",
        )
        for index, run in enumerate(runs)
    ]
    return join(
        top("hyperbatch", units.plural(len(runs), "run")),
        compare.comparison(runs),
        _curves_card("Curves", [accuracy, *others], runs),
        compare.clocks(runs),
        compare.differences(runs),
        folded,
    )
