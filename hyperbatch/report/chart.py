"""Line charts as inline SVG, drawn here so that they need no script, print well and open from a file.

Each chart holds one group of marks per x axis (time, epochs, steps); the page shows one of them. The script only adds
the cross-hair: it reads the same points from the page's data block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hyperbatch.report import units
from hyperbatch.report.markup import Html, el
from hyperbatch.report.runs import AXES

WIDTH, HEIGHT = 540, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 14, 30
COLORS = 8

Scale = Callable[[float], float]


@dataclass(kw_only=True, slots=True)
class Line:
    """One curve of one run. `faint` is the raw data behind a smoothed curve."""

    label: str
    color: int
    x: dict[str, list[float]]
    y: list[float]
    faint: bool = False
    stairs: bool = False
    dots: bool = False


@dataclass(kw_only=True, slots=True)
class Chart:
    key: str
    title: str
    form: str  # how values are written: percent, number or count
    lines: list[Line]
    from_zero: bool = True
    ceiling: float | None = None
    target: float | None = None
    width: int = WIDTH
    notes: list[str] = field(default_factory=list)


def color(index: int) -> str:
    return f"var(--c{index % COLORS})"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-30):  # one value: give it room
        high = low + (abs(low) if abs(low) > 1e-30 else 1.0)
    rough = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * nice for nice in (1, 2, 2.5, 5, 10) if scale * nice >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def time_unit(longest_s: float) -> tuple[str, float]:
    for name, seconds in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if longest_s >= 2 * seconds:
            return name, seconds
    return "s", 1.0


def y_range(chart: Chart) -> tuple[float, float]:
    """The middle 99 % of what is drawn: one wild first step must not flatten the rest."""
    values = sorted(v for line in chart.lines for v in line.y if math.isfinite(v))
    if not values:
        return 0.0, chart.ceiling or 1.0
    trim = len(values) // 200
    low, high = values[trim], values[-1 - trim]
    if chart.target is not None:
        low, high = min(low, chart.target), max(high, chart.target)
    if chart.from_zero:
        low = min(0.0, low)
    return low, high


def draw(chart: Chart) -> Html:
    """The chart's figure, or a sentence where there is nothing to draw."""
    if not any(math.isfinite(v) for line in chart.lines for v in line.y):
        body = el("p", "Nothing was recorded.", cls="empty")
    else:
        body = _svg(chart)
    notes = [el("p", note, cls="note") for note in chart.notes]
    cls = "wide" if chart.width > WIDTH else None
    return el("figure", el("figcaption", chart.title), el("div", body, cls="scroll" if cls else None), notes, cls=cls)


def _svg(chart: Chart) -> Html:
    y_ticks = ticks(*y_range(chart))
    if chart.ceiling is not None:
        y_ticks = [tick for tick in y_ticks if tick <= chart.ceiling + 1e-9]
    bottom, top = y_ticks[0], y_ticks[-1]

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (value - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    form = {"percent": lambda v: units.percent(v, 1), "number": units.number, "count": units.count}[chart.form]
    grid = [
        [
            el("line", x1=LEFT, x2=chart.width - RIGHT, y1=f"{y_of(tick):.1f}", y2=f"{y_of(tick):.1f}", cls="grid"),
            el("text", form(tick), x=LEFT - 8, y=f"{y_of(tick) + 4:.1f}", text_anchor="end"),
        ]
        for tick in y_ticks
    ]
    if chart.target is not None:
        y = y_of(chart.target)
        grid.append(
            [
                el("line", x1=LEFT, x2=chart.width - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", cls="target"),
                el("text", f"target {units.percent(chart.target)}", x=LEFT + 6, y=f"{y + 15:.1f}", cls="target"),
            ]
        )
    clip = el(
        "clipPath",
        el("rect", x=LEFT, y=0, width=chart.width - LEFT, height=HEIGHT - BOTTOM + 4),
        id=f"clip-{chart.key}",
    )
    axes, spans = [], []
    for axis in AXES:
        marks, right = _axis(chart, axis, y_of)
        axes.append(el("g", marks, cls=f"axis {axis}"))
        spans.append(f"{right:.6g}")
    return el(
        "svg",
        el("defs", clip),
        grid,
        axes,
        el("g", cls="hover"),
        viewBox=f"0 0 {chart.width} {HEIGHT}",
        role="img",
        aria_label=f"{chart.title}: {_in_words(chart)}",
        data_key=chart.key,
        data_right=",".join(spans),
        data_y=f"{bottom:.6g},{top:.6g}",
    )


def _in_words(chart: Chart) -> str:
    """What a reader who cannot see the curve is told."""
    form = {"percent": units.percent, "number": units.number, "count": units.count}[chart.form]
    parts = []
    for line in chart.lines:
        finite = [v for v in line.y if math.isfinite(v)]
        if finite and not line.faint:
            parts.append(f"{line.label} from {form(finite[0])} to {form(finite[-1])}")
    return "; ".join(parts)


def _axis(chart: Chart, axis: str, y_of: Scale) -> tuple[list[Html], float]:
    """The x ticks and the curves against one axis, and the value at the right edge."""
    longest = max((v for line in chart.lines for v in line.x[axis] if math.isfinite(v)), default=1.0) or 1.0
    unit, scale = time_unit(longest) if axis == "time" else ("", 1.0)
    inside = [tick for tick in ticks(0, longest / scale, 6) if tick * scale <= longest * 1.0001]

    def x_of(value: float) -> float:
        return LEFT + value / longest * (chart.width - LEFT - RIGHT)

    marks = []
    for tick in inside:
        # The unit stands at the last tick, as one reads it.
        suffix = {"time": f" {unit}", "epoch": " epochs", "step": " steps"}[axis] if tick == inside[-1] else ""
        near_edge = x_of(tick * scale) > chart.width - RIGHT - 40 and suffix
        marks.append(
            el(
                "text",
                f"{tick:,g}{suffix}",
                x=f"{chart.width - 2 if near_edge else x_of(tick * scale):.1f}",
                y=HEIGHT - 10,
                text_anchor="end" if near_edge else "middle",
            )
        )
    marks.append(el("line", x1=LEFT, x2=chart.width - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, cls="base"))
    curves = [_curve(line, axis, x_of, y_of) for line in chart.lines]
    if chart.target is not None:
        curves += [_ring(line, axis, chart.target, x_of, y_of) for line in chart.lines]
    return [*marks, el("g", curves, clip_path=f"url(#clip-{chart.key})")], longest


def _curve(line: Line, axis: str, x_of: Scale, y_of: Scale) -> list[Html]:
    parts: list[str] = []
    dots: list[Html] = []
    pen_down, y_before = False, 0.0
    for x_value, y_value in zip(line.x[axis], line.y, strict=True):
        if not (math.isfinite(x_value) and math.isfinite(y_value)):
            pen_down = False
            continue
        x, y = x_of(x_value), y_of(y_value)
        if pen_down and line.stairs:
            parts.append(f"H{x:.1f}" + (f"V{y:.1f}" if y != y_before else ""))
        else:
            parts.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        if line.dots:
            dots.append(el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.2, fill=color(line.color)))
        pen_down, y_before = True, y
    if parts and len(parts) == 1 and not line.dots:
        return [el("circle", cx=parts[0][1:].split()[0], cy=parts[0].split()[1], r=3.2, fill=color(line.color))]
    cls = "curve faint" if line.faint else "curve"
    return [el("path", d="".join(parts), cls=cls, stroke=color(line.color)), *dots]


def _ring(line: Line, axis: str, target: float, x_of: Scale, y_of: Scale) -> Html | None:
    """Where the curve first reaches the target."""
    first = next((i for i, value in enumerate(line.y) if value >= target), None)
    if first is None:
        return None
    return el("circle", cx=f"{x_of(line.x[axis][first]):.1f}", cy=f"{y_of(line.y[first]):.1f}", r=6.5, cls="reached")


def hover_data(charts: list[Chart]) -> dict[str, object]:
    """What the cross-hair reads: per chart the curves that are not faint, rounded to what can be seen."""

    def rounded(values: list[float]) -> list[float | None]:
        return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]

    return {
        chart.key: {
            "form": chart.form,
            "lines": [
                {
                    "label": line.label,
                    "color": color(line.color),
                    "x": [rounded(line.x[axis]) for axis in AXES],
                    "y": rounded(line.y),
                }
                for line in chart.lines
                if not line.faint
            ],
        }
        for chart in charts
    }
