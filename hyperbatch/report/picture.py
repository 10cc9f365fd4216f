"""Charts and time lines in SVG files of their own: `simulate --plot`, `plan --plot`, the pictures of the documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperbatch.errors import InputError
from hyperbatch.plan.types import StepTiming
from hyperbatch.report import chart as charts
from hyperbatch.report.chart import HEIGHT, Chart, Line, color, in_words, marks
from hyperbatch.report.markup import Html, el
from hyperbatch.report.style import CHART_CSS
from hyperbatch.report.timing import GROUP_COLOR, LEFT, STEP, WIDTH, timeline

MARGIN, HEAD = 12, 40  # around a chart; for its title and a line of its key
KEY_LINE = 16  # for each further line of the key

Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(title: str, x_name: str, series: Series, *, form: str = "number", log_y: bool = False) -> Chart:
    """Lines over a logarithmic x axis; x_name is its unit."""
    lines = [
        Line(label=name, color=i, x={x_name: [x for x, _ in points]}, y=[y for _, y in points], dots=len(points) <= 12)
        for i, (name, points) in enumerate(series.items())
    ]
    return Chart(key="", title=title, form=form, lines=lines, axes=(x_name,), log_x=True, log_y=log_y)


def sweep_charts(values: Mapping[str, Any]) -> list[Chart]:
    """`simulate`'s answer: time to target, speed, efficiency, and cost (or energy) against time."""
    points, name = values["points"], f"{values['recipe']} on {values['cluster']}"

    def against_gpus(title: str, of: Mapping[str, Callable[[Any], float]], **options: Any) -> Chart:
        series = {label: [(point["gpus"], get(point)) for point in points] for label, get in of.items()}
        return line_chart(f"{name}: {title}", "GPUs", series, **options)

    times = {key: lambda point, key=key: point["time_to_target_s"][key] for key in ("high", "mid", "low")}
    first = points[0]["images_per_s"] / points[0]["gpus"]
    speed = {"predicted": lambda point: point["images_per_s"], "perfect": lambda point: first * point["gpus"]}
    what = "energy_kwh" if any(point["cost_usd"] is None for point in points) else "cost_usd"
    return [
        against_gpus("seconds to target", times, log_y=True),
        against_gpus("images per second", speed, form="count", log_y=True),
        against_gpus("efficiency", {"predicted": lambda point: point["efficiency"]}, form="percent"),
        cost_chart(name, {"predicted": points}, what),
    ]


def cost_chart(title: str, sweeps: Mapping[str, Sequence[Mapping[str, Any]]], what: str = "energy_kwh") -> Chart:
    """Cost or energy against time to target as the cluster grows: the points of a sweep, or of several."""
    series = {
        name: sorted((point["time_to_target_s"]["mid"], point[what]) for point in points)
        for name, points in sweeps.items()
    }
    unit = {"energy_kwh": "kWh", "cost_usd": "US dollars"}[what]
    return line_chart(f"{title}: {unit} against seconds to target", "s", series, log_y=True)


def charts_picture(*shown: Chart) -> str:
    """Charts in one picture, two in a row."""
    columns = min(2, len(shown))
    keys = [_key([(line.label, line.color) for line in chart.lines if not line.faint]) for chart in shown]
    head = HEAD + KEY_LINE * max(0, *(lines - 1 for _, lines in keys))
    width, height = charts.WIDTH + 2 * MARGIN, HEIGHT + head + MARGIN
    places = [(i % columns * width + MARGIN, i // columns * height) for i in range(len(shown))]
    panels = []
    for i, (chart, (x, y)) in enumerate(zip(shown, places, strict=True)):
        title = el("text", chart.title, x=0, y=18, cls="ink", font_size=13, font_weight=600)
        body = el("g", marks(replace(chart, key=f"chart{i}")), transform=f"translate(0 {head})")
        entries = keys[i][0]
        key = entries if len(entries) > 2 else None  # of more than one name
        panels.append(el("g", title, key, body, transform=f"translate({x} {y})"))
    words = "; ".join(f"{chart.title}: {in_words(chart)}" for chart in shown)
    return _file(panels, columns * width, -(-len(shown) // columns) * height, words)


def _key(names: Sequence[tuple[str, int]], width: float = charts.WIDTH) -> tuple[list[Html], int]:
    """Names beside their colours, in as many lines as they need; a name of n letters is about 7 n wide."""
    entries, x, line = [], 0, 0
    for name, index in names:
        if x and x + 14 + 7 * len(name) > width:
            x, line = 0, line + 1
        entries.append(el("rect", x=x, y=26 + KEY_LINE * line, width=9, height=9, rx=3, fill=color(index)))
        entries.append(el("text", name, x=x + 14, y=34 + KEY_LINE * line))
        x += 30 + 7 * len(name)
    return entries, line + 1


def timeline_picture(steps: Mapping[str, StepTiming]) -> str:
    """Steps as time lines to one scale, each under its title."""
    drawn, height = timeline(steps)
    shown = {name for timing in steps.values() for name, _, _ in timing.parts()}
    named = [names for part, names in STEP.items() if part in shown] + [("a group's all-reduce", GROUP_COLOR)]
    key, _ = _key(named, width=WIDTH)
    body = el("g", drawn, transform=f"translate(0 {HEAD})")
    panel = el("g", el("g", key, transform=f"translate({LEFT} -12)"), body, transform=f"translate({MARGIN} 0)")
    return _file([panel], WIDTH + 2 * MARGIN, height + HEAD, f"time lines of {', '.join(steps)}")


def _file(drawn: list[Html], width: float, height: float, words: str) -> str:
    paper = el("rect", width=width, height=f"{height:.0f}", fill="var(--card)")
    box = f"0 0 {width} {height:.0f}"
    style = el("style", Html(CHART_CSS))
    picture = el("svg", style, paper, drawn, xmlns="http://www.w3.org/2000/svg", viewBox=box, aria_label=words)
    return picture + "\n"


def write_picture(path: Path, picture: str) -> None:
    """A file the user asked for; a path that cannot be written is their mistake."""
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
