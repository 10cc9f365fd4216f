"""Line charts as inline SVG, which need no script, print well and open from a file.

A chart of a run has one group of marks per x axis (time, epochs, steps); the page shows one group at a time. The script
only adds the cross-hair, and reads the same points from the page's data block. report/picture.py draws the same charts
into separate files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hyperbatch.report import units
from hyperbatch.report.markup import Html, el, join
from hyperbatch.report.runs import AXES

WIDTH, HEIGHT = 540, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 14, 30
COLORS = 8
MOST_LABELS = 8  # the most labels of a logarithmic axis

Scale = Callable[[float], float]


@dataclass(kw_only=True, slots=True)
class Line:
    """One curve of one run. `faint` is the raw data behind a smoothed curve; `texts` are labels beside its points."""

    label: str
    color: int
    x: dict[str, list[float]]
    y: list[float]
    faint: bool = False
    stairs: bool = False
    dots: bool = False
    texts: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Band:
    """The range in which a curve may lie, in the colour of the curve."""

    color: int
    x: dict[str, list[float]]
    low: list[float]
    high: list[float]


@dataclass(kw_only=True, slots=True)
class Chart:
    key: str
    title: str
    form: str  # how values are written: percent, number or count
    lines: list[Line]
    bands: list[Band] = field(default_factory=list)
    about: str = ""  # a sentence that says what the chart shows
    from_zero: bool = True
    ceiling: float | None = None
    target: float | None = None
    axes: tuple[str, ...] = tuple(AXES)
    log_x: bool = False
    log_y: bool = False
    notes: list[str] = field(default_factory=list)


def color(index: int) -> str:
    return f"var(--c{index % COLORS})"


def dash(index: int) -> str | None:
    """The dashes of lines beyond the number of colours, which repeat a colour. Swatches of dashed lines are hollow."""
    return None if index < COLORS else "7 4" if index < 2 * COLORS else "2 3"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-30):  # a single value gets a range around it
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
    """The middle 99 % of all drawn values, so that one extreme first step does not flatten the rest."""
    drawn = [*(line.y for line in chart.lines), *(y for band in chart.bands for y in (band.low, band.high))]
    values = sorted(v for y in drawn for v in y if math.isfinite(v))
    if not values:
        return 0.0, chart.ceiling or 1.0
    trim = len(values) // 200
    low, high = values[trim], values[-1 - trim]
    if chart.target is not None:
        low, high = min(low, chart.target), max(high, chart.target)
    if chart.from_zero and not chart.log_y:
        low = min(0.0, low)
    return low, high


def draw(chart: Chart) -> Html:
    """Returns the chart's figure, or a sentence if there is nothing to draw."""
    if not any(math.isfinite(v) for line in chart.lines for v in line.y):
        body = el("p", "Nothing was recorded.", cls="empty")
    else:
        body = el(
            "svg",
            marks(chart),
            el("g", cls="hover"),
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            aria_label=f"{chart.title}: {in_words(chart)}",
            data_key=chart.key,
            data_right=",".join(f"{_longest(chart, axis):.6g}" for axis in chart.axes),
            data_y=",".join(f"{tick:.6g}" for tick in (_y_ticks(chart)[0], _y_ticks(chart)[-1])),
        )
    notes = [el("p", note, cls="note") for note in filter(None, [*chart.notes, said(chart)])]
    caption = el("figcaption", el("span", chart.title), el("span", cls="read"))
    return el("figure", caption, el("div", body), notes)


def said(chart: Chart) -> str:
    """The text about the chart: its own sentence, and which of its axes are logarithmic."""
    bent = [name for name, log in (("x", chart.log_x), ("y", chart.log_y)) if log]
    scale = f"Logarithmic {' and '.join(bent)} {'axes' if len(bent) > 1 else 'axis'}." if bent else ""
    return " ".join(filter(None, [chart.about, scale]))


def marks(chart: Chart) -> list[Html]:
    """Draws the inside of the chart's picture, WIDTH by HEIGHT: grid, axes and curves."""
    y_ticks = _y_ticks(chart)
    named = labelled(y_ticks) if chart.log_y else y_ticks
    y_of = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, log=chart.log_y)
    form = {"percent": lambda v: units.percent(v, 1), "number": units.number, "count": units.count}[chart.form]
    grid = [
        [
            el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y_of(tick):.1f}", y2=f"{y_of(tick):.1f}", cls="grid"),
            el("text", form(tick), x=LEFT - 8, y=f"{y_of(tick) + 4:.1f}", text_anchor="end") if tick in named else None,
        ]
        for tick in y_ticks
    ]
    if chart.target is not None:
        y = y_of(chart.target)
        grid.append(
            [
                el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", cls="target"),
                el("text", f"target {units.percent(chart.target)}", x=LEFT + 6, y=f"{y + 15:.1f}", cls="target"),
            ]
        )
    clip = el(
        "clipPath",
        el("rect", x=LEFT - 5, y=0, width=WIDTH - LEFT + 5, height=HEIGHT - BOTTOM + 4),
        id=f"clip-{chart.key}",
    )
    several = len(chart.axes) > 1  # the page shows one of the axes
    axes = [el("g", _axis(chart, axis, y_of), cls=f"axis {axis}" if several else None) for axis in chart.axes]
    return [el("defs", clip), join(*grid), *axes]


def _scale(low: float, high: float, start: float, end: float, *, log: bool) -> Scale:
    """Returns a function that maps a value to a place between `start` and `end`. `low` is at `start`."""
    bend = math.log if log else float

    def place(value: float) -> float:
        if log and value <= 0:
            return start
        span = bend(high) - bend(low)
        return start + (bend(value) - bend(low)) / span * (end - start) if span else (start + end) / 2

    return place


def _y_ticks(chart: Chart) -> list[float]:
    low, high = y_range(chart)
    found = log_ticks(low, high) if chart.log_y else ticks(low, high)
    return [tick for tick in found if chart.ceiling is None or tick <= chart.ceiling + 1e-9]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from at or below `low` to at or above `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{n}e{power}") for power in powers for n in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low * 1.0001)
    last = min(i for i, step in enumerate(steps) if step >= high * 0.9999)
    return steps[first : max(last, first + 1) + 1]


def labelled(log: list[float]) -> list[float]:
    """The logarithmic ticks that have room for a number: all of them, or only the powers of ten."""
    tens = [tick for tick in log if abs(math.log10(tick) - round(math.log10(tick))) < 1e-9]
    return log if len(log) <= MOST_LABELS or len(tens) < 2 else tens


def _longest(chart: Chart, axis: str) -> float:
    return max((v for line in chart.lines for v in line.x[axis] if math.isfinite(v)), default=1.0) or 1.0


def in_words(chart: Chart) -> str:
    """Describes the curves for readers who cannot see them."""
    form = {"percent": units.percent, "number": units.number, "count": units.count}[chart.form]
    parts = []
    for line in chart.lines:
        finite = [v for v in line.y if math.isfinite(v)]
        if finite and not line.faint:
            parts.append(f"{line.label} from {form(finite[0])} to {form(finite[-1])}")
    return "; ".join(parts)


def _axis(chart: Chart, axis: str, y_of: Scale) -> list[Html]:
    """Draws the x ticks and the curves for one axis.

    A logarithmic axis of counts (GPUs, images) has ticks at the counts that occur; other axes have ticks at round
    numbers.
    """
    longest = _longest(chart, axis)
    unit, scale = time_unit(longest) if axis == "time" else ("", 1.0)
    every, least = [], 0.0
    if chart.log_x:
        known = sorted({v for line in chart.lines for v in line.x[axis]})
        counts = all(float(v).is_integer() for v in known)
        every = known if counts else log_ticks(known[0], known[-1])
        least, longest = every[0], every[-1]
        inside = every[:: -(-len(every) // MOST_LABELS)] if counts else labelled(every)
    else:
        inside = [tick for tick in ticks(0, longest / scale, 6) if tick * scale <= longest * 1.0001]
    x_of = _scale(least, longest, LEFT, WIDTH - RIGHT, log=chart.log_x)
    drawn = []
    for tick in every:
        place = f"{x_of(tick):.1f}"
        drawn.append(el("line", x1=place, x2=place, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, cls="base"))
    for tick in inside:
        # The last tick also shows the unit.
        suffix = f" {unit or AXES.get(axis, axis)}" if tick == inside[-1] else ""
        near_edge = x_of(tick * scale) > WIDTH - RIGHT - 40 and suffix
        drawn.append(
            el(
                "text",
                f"{tick:,g}{suffix}",
                x=f"{WIDTH - 2 if near_edge else x_of(tick * scale):.1f}",
                y=HEIGHT - 10,
                text_anchor="end" if near_edge else "middle",
            )
        )
    drawn.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, cls="base"))
    curves = [_area(band, axis, x_of, y_of) for band in chart.bands]
    curves += [_curve(line, axis, x_of, y_of) for line in chart.lines]
    if chart.target is not None:
        curves += [_ring(line, axis, chart.target, x_of, y_of) for line in chart.lines]
    texts = _texts(chart.lines, axis, x_of, y_of)
    return [*drawn, el("g", curves, clip_path=f"url(#clip-{chart.key})"), *texts]


def _area(band: Band, axis: str, x_of: Scale, y_of: Scale) -> Html:
    there = [(x, y) for x, y in zip(band.x[axis], band.high, strict=True) if math.isfinite(y)]
    back = [(x, y) for x, y in zip(band.x[axis], band.low, strict=True) if math.isfinite(y)][::-1]
    points = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in (*there, *back))
    return el("path", d=f"M{points}Z" if points else "", cls="band", fill=color(band.color))


def _texts(lines: list[Line], axis: str, x_of: Scale, y_of: Scale) -> list[Html]:
    """Places texts beside their points: above or below, right or left, or not at all if they would overlap others."""
    out: list[Html] = []
    taken: list[tuple[float, float, float]] = []  # left and right end, and base line
    for line in lines:
        for text, x_value, y_value in zip(line.texts, line.x[axis], line.y, strict=False):
            wide = 7 * len(text)  # estimated width
            for side, below in ((1, False), (1, True), (-1, True), (-1, False)):
                left = x_of(x_value) + (8 if side > 0 else -8 - wide)
                base = y_of(y_value) + (16 if below else -6)
                clear = all(left + wide < a or b < left or abs(base - y) > 13 for a, b, y in taken)
                if clear and left >= LEFT and left + wide <= WIDTH and TOP - 8 <= base <= HEIGHT - BOTTOM:
                    taken.append((left, left + wide, base))
                    out.append(el("text", text, x=f"{left:.1f}", y=f"{base:.1f}", cls="ink"))
                    break
    return out


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
    return [el("path", d="".join(parts), cls=cls, stroke=color(line.color), stroke_dasharray=dash(line.color)), *dots]


def _ring(line: Line, axis: str, target: float, x_of: Scale, y_of: Scale) -> Html | None:
    """Draws a ring where the curve first reaches the target."""
    first = next((i for i, value in enumerate(line.y) if value >= target), None)
    if first is None:
        return None
    return el("circle", cx=f"{x_of(line.x[axis][first]):.1f}", cy=f"{y_of(line.y[first]):.1f}", r=6.5, cls="reached")


def hover_data(charts: list[Chart]) -> dict[str, object]:
    """The data that the cross-hair reads: the curves of each chart that are not faint, with five digits."""

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
