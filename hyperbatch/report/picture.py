"""Charts and time lines as separate SVG files: `simulate --plot`, `plan --plot`, the pictures of the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperbatch.errors import InputError
from hyperbatch.plan.planner import Plan
from hyperbatch.plan.types import StepTiming
from hyperbatch.report import chart as charts
from hyperbatch.report import units
from hyperbatch.report.chart import HEIGHT, Band, Chart, Line, color, dash, in_words, marks, said, time_unit
from hyperbatch.report.markup import Html, el
from hyperbatch.report.style import CHART_CSS
from hyperbatch.report.timing import GROUP_COLOR, LEFT, WIDTH, part_names, step_bars, timeline

MARGIN, TITLE = 12, 26  # around a chart; height of its title
LINE = 16  # height of a line of text or of the key
LETTERS = 88  # characters in a line as wide as a chart
LONG = {"s": "seconds", "min": "minutes", "h": "hours"}

Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(
    title: str, x_name: str, series: Series, *, about: str = "", form: str = "number", log_y: bool = False
) -> Chart:
    """Makes a chart of lines over a logarithmic x axis. x_name is the unit of that axis."""
    lines = [
        Line(label=name, color=i, x={x_name: [x for x, _ in points]}, y=[y for _, y in points], dots=len(points) <= 12)
        for i, (name, points) in enumerate(series.items())
    ]
    return Chart(key="", title=title, about=about, form=form, lines=lines, axes=(x_name,), log_x=True, log_y=log_y)


def sweep_charts(values: Mapping[str, Any]) -> list[Chart]:
    """The charts of `simulate`: time to target, speed, efficiency, and cost (or energy) against time."""
    points, name = values["points"], f"{values['recipe']} on {values['cluster']}"

    def against_gpus(title: str, about: str, of: Mapping[str, Callable[[Any], float]], **options: Any) -> Chart:
        series = {label: [(point["gpus"], get(point)) for point in points] for label, get in of.items()}
        return line_chart(title, "GPUs", series, about=f"{name}. {about}", **options)

    first = points[0]["images_per_s"] / points[0]["gpus"]
    speed = {"predicted": lambda point: point["images_per_s"], "perfect": lambda point: first * point["gpus"]}
    what = "energy_kwh" if any(point["cost_usd"] is None for point in points) else "cost_usd"
    return [
        time_chart(name, points),
        against_gpus(
            "Images per second",
            "Perfect scaling is the first point's speed per GPU times the number of GPUs.",
            speed,
            form="count",
            log_y=True,
        ),
        against_gpus(
            "Efficiency",
            "The part of a single GPU's speed that each GPU keeps.",
            {"predicted": lambda point: point["efficiency"]},
            form="percent",
        ),
        cost_chart(name, {"predicted": points}, what),
    ]


def time_chart(name: str, points: Sequence[Mapping[str, Any]]) -> Chart:
    """The chart of time to target against GPUs, in a suitable unit."""
    times = [point["time_to_target_s"] for point in points]
    unit, scale = time_unit(max(time["high"] for time in times))
    x = {"GPUs": [float(point["gpus"]) for point in points]}
    low, mid, high = ([time[key] / scale for time in times] for key in ("low", "mid", "high"))
    return Chart(
        key="",
        title=f"Time to target, in {LONG[unit]}",
        about=f"{name}. The band spans the epochs that it may take and the error of a predicted step.",
        form="number",
        lines=[Line(label="expected", color=0, x=x, y=mid, dots=len(points) <= 12)],
        bands=[Band(color=0, x=x, low=low, high=high)],
        axes=("GPUs",),
        log_x=True,
        log_y=True,
    )


def cost_chart(name: str, sweeps: Mapping[str, Sequence[Mapping[str, Any]]], what: str = "energy_kwh") -> Chart:
    """The chart of cost or energy against time to target as the cluster grows, for one or several sweeps."""
    unit, scale = time_unit(max(point["time_to_target_s"]["mid"] for points in sweeps.values() for point in points))
    title, amount = {"energy_kwh": ("Energy", "kWh"), "cost_usd": ("Cost", "US dollars")}[what]
    lines = []
    for index, (label, points) in enumerate(sweeps.items()):
        ordered = sorted(points, key=lambda point: point["gpus"])  # a larger cluster may take longer
        x = {unit: [point["time_to_target_s"]["mid"] / scale for point in ordered]}
        gpus = [units.count(point["gpus"]) for point in ordered]
        gpus[-1] += "" if index else " GPUs"
        y = [point[what] for point in ordered]
        lines.append(Line(label=label, color=index, x=x, y=y, dots=True, texts=gpus if len(gpus) <= 12 else []))
    return Chart(
        key="",
        title=f"{title} against time to target",
        about=f"{name}. {amount} against {LONG[unit]}; a point is marked with its number of GPUs.",
        form="number",
        lines=lines,
        axes=(unit,),
        log_x=True,
        log_y=True,
    )


def charts_picture(*shown: Chart) -> str:
    """Draws charts into one picture, two in a row, each with its title, text and key."""
    columns = min(2, len(shown))
    heads = [_head(chart) for chart in shown]
    rows = [max(height for _, height in heads[i : i + columns]) for i in range(0, len(heads), columns)]
    width = charts.WIDTH + 2 * MARGIN
    panels, top = [], 0
    for row, head_height in enumerate(rows):
        for i in range(row * columns, min(len(shown), (row + 1) * columns)):
            body = el("g", marks(replace(shown[i], key=f"chart{i}")), transform=f"translate(0 {head_height})")
            place = f"translate({i % columns * width + MARGIN} {top})"
            panels.append(el("g", heads[i][0], body, transform=place))
        top += head_height + HEIGHT + MARGIN
    words = "; ".join(f"{chart.title}: {in_words(chart)}" for chart in shown)
    return _file(panels, columns * width, top, words)


def _head(chart: Chart) -> tuple[list[Html], int]:
    """Returns the title, text and key above a chart, and their height."""
    drawn = [_title(chart.title)]
    y = TITLE
    for text in textwrap.wrap(said(chart), LETTERS):
        drawn.append(el("text", text, x=0, y=y + 8))
        y += LINE
    named = [(line.label, line.color) for line in chart.lines if not line.faint]
    if len(named) > 1:
        entries, lines = _key(named)
        drawn.append(el("g", entries, transform=f"translate(0 {y - TITLE})"))
        y += LINE * lines
    return drawn, y


def _title(text: str) -> Html:
    return el("text", text, x=0, y=18, cls="ink", font_size=13, font_weight=600)


def _key(names: Sequence[tuple[str, int]], width: float = charts.WIDTH) -> tuple[list[Html], int]:
    """Returns names beside their colours, and the number of lines they take. A name of n letters is about 7 n wide."""
    entries, x, line = [], 0, 0
    for name, index in names:
        if x and x + 14 + 7 * len(name) > width:
            x, line = 0, line + 1
        paint = {"fill": "none", "stroke": color(index), "stroke_width": 2} if dash(index) else {"fill": color(index)}
        entries.append(el("rect", x=x, y=26 + LINE * line, width=9, height=9, rx=3, **paint))
        entries.append(el("text", name, x=x + 14, y=34 + LINE * line))
        x += 30 + 7 * len(name)
    return entries, line + 1


def timeline_picture(steps: Mapping[str, StepTiming]) -> str:
    """Draws steps as time lines with one scale, each under its title."""
    drawn, height = _timeline(steps)
    return _file([_at(MARGIN, 0, *drawn)], WIDTH + 2 * MARGIN, height, f"time lines of {', '.join(steps)}")


def _timeline(steps: Mapping[str, StepTiming]) -> tuple[list[Html], float]:
    drawn, height = timeline(steps)
    key, _ = _key([*part_names(steps.values()), ("a group's all-reduce", GROUP_COLOR)], width=WIDTH)
    return [_at(LEFT, -12, *key), _at(0, 40, *drawn)], height + 40


def plan_picture(plan: Plan) -> str:
    """Draws the result of `plan`: the step as a time line, and bars for every other grouping and all-reduce."""
    timing, phase = plan.step.timing, plan.phase
    name = f"{plan.recipe} on {units.plural(plan.gpus, 'GPU')} of {plan.cluster}"
    title = f"One step of {name}: {units.duration(timing.step_s)}"
    about = (
        f"Global batch {phase.global_batch:,}, grid {plan.step.grid}, {plan.step.plan.strategy} groups. Compute above, "
        f"the all-reduce of each group below; a thin line is a group that waits for the one before it."
    )
    lines = textwrap.wrap(about, LETTERS * WIDTH // charts.WIDTH)
    head = [_title(title), *(el("text", text, x=0, y=TITLE + 8 + LINE * i) for i, text in enumerate(lines))]
    drawn, height = _timeline({"": timing})
    top = TITLE + LINE * len(lines)
    panels = [_at(MARGIN, 0, *head), _at(MARGIN, top, *drawn)]
    top += height + MARGIN
    longest_s = max(choice.timing.step_s for table in (plan.strategies, plan.algorithms) for choice in table.values())
    for what, choices in (("grouping", plan.strategies), ("all-reduce", plan.algorithms)):
        ordered = sorted(choices.items(), key=lambda choice: choice[1].timing.step_s)
        bars, tall = step_bars({name: choice.timing for name, choice in ordered}, longest_s=longest_s)
        panels.append(_at(MARGIN, top, _title(f"The step by {what}, shortest first"), _at(0, TITLE + 4, *bars)))
        top += TITLE + tall + 2 * MARGIN
    words = f"{title}; {', '.join(f'{name} {units.duration(s.timing.step_s)}' for name, s in plan.strategies.items())}"
    return _file(panels, WIDTH + 2 * MARGIN, top, words)


def _at(x: float, y: float, *drawn: Html) -> Html:
    return el("g", drawn, transform=f"translate({x} {y:.0f})")


def _file(drawn: list[Html], width: float, height: float, words: str) -> str:
    paper = el("rect", width=width, height=f"{height:.0f}", fill="var(--card)")
    box = f"0 0 {width} {height:.0f}"
    style = el("style", Html(CHART_CSS))
    picture = el("svg", style, paper, drawn, xmlns="http://www.w3.org/2000/svg", viewBox=box, aria_label=words)
    return picture + "\n"


def write_picture(path: Path, picture: str) -> None:
    """Writes a picture to the user's file. InputError if it cannot be written."""
    if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".pdf"):
        raise InputError(f"{path}: pictures are written as SVG; use the suffix .svg")
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
