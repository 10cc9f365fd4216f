"""Where the time of a run and of one step went: stacked bars, and time lines of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from hyperbatch.plan.types import StepTiming
from hyperbatch.record import RunRecord
from hyperbatch.report import units
from hyperbatch.report.chart import Scale, ticks, time_unit
from hyperbatch.report.markup import Html, el, join
from hyperbatch.report.predicted import predicted_step
from hyperbatch.report.runs import Run
from hyperbatch.report.sections import card

# (name of the field without _s, label, colour)
CLOCK = (
    ("init", "set-up", 7),
    ("train", "training", 5),
    ("capture", "preparing new shapes", 2),
    ("eval", "evaluation", 3),
    ("pause", "pauses (checkpoints)", 6),
)
# part of a StepTiming -> (label, colour)
STEP = {
    "data_wait": ("waiting for data", 6),
    "forward": ("forward", 0),
    "backward": ("backward", 3),
    "exposed_comm": ("exposed communication", 4),
    "update": ("update", 2),
}
GROUP_COLOR = 1
WIDTH, NARROW, LEFT, RIGHT = 860, 350, 92, 8  # widths of a time line and of a narrow one for phones; margins


def stacked_bar(parts: list[tuple[str, float, int]], longest_s: float | None = None) -> Html:
    """Draws (label, seconds, colour) as one bar with its key. `longest_s`: the time that the full width represents."""
    total = sum(seconds for _, seconds, _ in parts) or 1.0
    bar = [
        el(
            "span",
            style=f"flex:{seconds / total:.5f};background:var(--c{color})",
            title=f"{label}: {units.duration(seconds)}",
        )
        for label, seconds, color in parts
        if seconds > 0
    ]
    key = [
        el(
            "span",
            el("i", style=f"background:var(--c{color})"),
            f"{label} ",
            el("b", units.duration(seconds)),
            f" {units.percent(seconds / total, 1 if seconds / total < 0.1 else 0)}",
        )
        for label, seconds, color in parts
        if seconds > 0
    ]
    width = 100 if longest_s is None else 100 * total / longest_s
    return join(el("div", bar, cls="bar", style=f"width:{width:.2f}%"), el("div", key, cls="key"))


def clock_parts(record: RunRecord) -> list[tuple[str, float, int]]:
    return [(label, record.clock.get(f"{name}_s") or 0.0, color) for name, label, color in CLOCK]


def where_time_went(run: Run) -> Html | None:
    record = run.record
    if record is None or not (record.clock or record.timing):
        return None
    blocks = []
    if record.clock:
        parts = clock_parts(record)
        blocks.append(
            el("div", el("h3", f"The whole run: {units.duration(sum(s for _, s, _ in parts))}"), stacked_bar(parts))
        )
    picture, alone = None, record.world_size == 1
    if record.timing.get("step_s"):
        measured = StepTiming.from_dict(record.timing)
        if alone:  # nothing is exchanged: what follows backward copies gradients
            backward_s = measured.backward_s + measured.exposed_comm_s
            measured = replace(measured, backward_s=backward_s, exposed_comm_s=0.0)
        steps = {"measured on rank 0": measured}
        if found := predicted_step(record):
            steps = {f"predicted for {found[0]}": found[1], **steps}
        longest_s = max(timing.step_s for timing in steps.values())
        titles = [f"A typical step, {name}: {units.duration(timing.step_s)}" for name, timing in steps.items()]
        bars = [stacked_bar(step_parts(timing), longest_s) for timing in steps.values()]
        note = el("p", _compared(found[0], found[1], measured), cls="note") if found else None
        heads = [el("h3", title) for title in titles]
        blocks.append(el("div", [part for pair in zip(heads, bars, strict=True) for part in pair], note))
        picture = None if alone else step_picture(steps)
    lead = "" if alone else "Exposed communication does not overlap with backward. "
    lead += "The time of the run is training plus evaluation."
    return card("Where the time went", lead, el("div", blocks, cls="split"), picture)


def step_parts(timing: StepTiming) -> list[tuple[str, float, int]]:
    return [(STEP[name][0], end_s - start_s, STEP[name][1]) for name, start_s, end_s in timing.parts()]


def _compared(cluster: str, predicted: StepTiming, measured: StepTiming) -> str:
    ratio = measured.step_s / predicted.step_s
    return (
        f"The measured step takes {ratio:.2f} times as long as the planner predicts from the machine file {cluster} "
        f"for this model, batch and exchange. The command hyperbatch profile measures a machine file of your own."
    )


def step_picture(steps: Mapping[str, StepTiming]) -> Html | None:
    """Draws steps as time lines with one scale. None if nothing is exchanged."""
    if not any(timing.groups for timing in steps.values()):
        return None
    titled = steps if len(steps) > 1 else {"": next(iter(steps.values()))}
    return el(
        "figure",
        el("figcaption", "Each group's all-reduce within a step"),
        fitting(lambda width: timeline(titled, width), f"time lines of a step: {', '.join(steps)}"),
        el("p", "A thin line is a group that was ready and had to wait for the one before it.", cls="note"),
        style="margin-top:22px",
    )


def fitting(draw: Callable[[int], tuple[list[Html], float]], words: str) -> Html:
    """Draws the same picture for a wide and a narrow window. The style sheet shows the one that fits."""
    drawn = []
    for width, cls in ((WIDTH, "for-wide"), (NARROW, "for-narrow")):
        marks, height = draw(width)
        drawn.append(el("svg", marks, viewBox=f"0 0 {width} {height:.0f}", role="img", aria_label=words, cls=cls))
    return join(*drawn)


def step_bars(
    steps: Mapping[str, StepTiming], width: int = WIDTH, longest_s: float | None = None
) -> tuple[list[Html], float]:
    """Draws steps as stacked bars below each other with one scale, and returns the bars and their height.

    The names are on the left. `longest_s`: the time that the full width represents.
    """
    longest_s = longest_s or max(timing.step_s for timing in steps.values())
    left, right = LEFT, 64  # room for the names, and for the seconds
    marks = []
    for row, (name, timing) in enumerate(steps.items()):
        y, x = row * 22, float(left)
        marks.append(el("text", name, x=left - 10, y=y + 13, text_anchor="end"))
        for part, start_s, end_s in timing.parts():
            label, color = STEP[part]
            part_width = (end_s - start_s) / longest_s * (width - left - right)
            bar = el("rect", x=f"{x:.1f}", y=y, width=f"{part_width:.1f}", height=16, fill=f"var(--c{color})")
            marks.append(el("g", el("title", f"{name}, {label}: {units.duration(end_s - start_s)}"), bar))
            x += part_width
        marks.append(el("text", units.duration(timing.step_s), x=f"{x + 6:.1f}", y=y + 13, cls="ink"))
    return marks, len(steps) * 22


def part_names(steps: Iterable[StepTiming]) -> list[tuple[str, int]]:
    """(label, colour) of each part that the steps have."""
    shown = {name for timing in steps for name, _, _ in timing.parts()}
    return [names for part, names in STEP.items() if part in shown]


def part_key(steps: Iterable[StepTiming]) -> Html:
    colors = [(el("i", style=f"background:var(--c{color})"), label) for label, color in part_names(steps)]
    return el("div", [el("span", *entry) for entry in colors], cls="key")


def timeline(steps: Mapping[str, StepTiming], width: int = WIDTH) -> tuple[list[Html], float]:
    """Draws steps with one scale, compute above and each group's all-reduce below. Returns the marks and the height.

    The names are used as titles. A single step may have an empty one.
    """
    longest_s = max(end for timing in steps.values() for end in (timing.step_s, *(g.end_s for g in timing.groups)))

    def x_of(seconds: float) -> float:
        return LEFT + max(0.0, seconds) / longest_s * (width - LEFT - RIGHT)

    marks, top = [], 0.0
    for title, timing in steps.items():
        if title:
            exposed = f"{title}: exposed communication {units.duration(timing.exposed_comm_s)}"
            marks.append(el("text", exposed, x=LEFT if width == WIDTH else 0, y=f"{top + 12:.1f}", cls="ink"))
            top += 18
        marks += _compute(timing, top, x_of)
        drawn, top = _groups(timing, top + 26, x_of, width)
        marks += drawn
        top += 8
    marks.append(el("line", x1=LEFT, x2=width - RIGHT, y1=f"{top:.1f}", y2=f"{top:.1f}", cls="base"))
    unit, scale = ("ms", 1e-3) if longest_s < 2 else time_unit(longest_s)
    inside = [tick for tick in ticks(0, longest_s / scale, 8 if width == WIDTH else 4) if tick * scale <= longest_s]
    for tick in inside:
        suffix = f" {unit}" if tick == inside[-1] else ""
        place = f"{x_of(tick * scale):.1f}"
        near_edge = x_of(tick * scale) > width - RIGHT - 20
        anchor = {"x": width, "text_anchor": "end"} if near_edge else {"x": place, "text_anchor": "middle"}
        marks.append(el("text", f"{tick:g}{suffix}", y=f"{top + 16:.1f}", **anchor))
    return marks, top + 22


def _compute(timing: StepTiming, top: float, x_of: Scale) -> list[Html]:
    marks = [el("text", "compute", x=LEFT - 10, y=f"{top + 14:.1f}", text_anchor="end")]
    for name, start_s, end_s in timing.parts():
        label, color = STEP[name]
        shape = {"x": f"{x_of(start_s):.1f}", "width": f"{max(0.8, x_of(end_s) - x_of(start_s)):.1f}"}
        bar = el("rect", y=f"{top:.1f}", height=20, rx=3, fill=f"var(--c{color})", **shape)
        marks.append(el("g", el("title", f"{label}: {units.duration(end_s - start_s)}"), bar))
    return marks


def _groups(timing: StepTiming, top: float, x_of: Scale, width: int) -> tuple[list[Html], float]:
    """Draws a row for each group, and returns the last row's end. If there are many, rows are thin and unlabelled."""
    row = max(4.0, min(18.0, 240 / max(1, len(timing.groups))))
    gap = 5 if row > 8 else 1
    marks, bottom = [], top
    for position, group in enumerate(timing.groups):
        y = top + position * (row + gap)
        bottom = y + row
        text = f"group {group.index}, {group.algorithm}, {units.size(group.bytes)}"
        times = f"ready {units.duration(group.ready_s)}, {units.duration(group.end_s - group.start_s)} long"
        ready, x, end = x_of(group.ready_s), x_of(group.start_s), x_of(group.end_s)
        middle = f"{y + row / 2:.1f}"
        waited = el("line", x1=f"{ready:.1f}", x2=f"{x:.1f}", y1=middle, y2=middle, stroke="var(--soft)")
        shape = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{max(1.0, end - x):.1f}", "height": f"{row:.1f}"}
        bar = el("rect", rx=2, fill=f"var(--c{GROUP_COLOR})", **shape)
        marks.append(el("g", el("title", f"{text}: {times}"), waited, bar))
        if row > 10:
            base = f"{y + row - 5:.1f}"
            marks.append(el("text", f"group {group.index}", x=LEFT - 10, y=base, text_anchor="end"))
            if end + 60 < width:
                marks.append(el("text", units.size(group.bytes), x=f"{end + 6:.1f}", y=base))
            elif min(ready, x) - 66 > LEFT:  # there is no room behind the bar, but before it
                marks.append(
                    el("text", units.size(group.bytes), x=f"{min(ready, x) - 6:.1f}", y=base, text_anchor="end")
                )
    return marks, bottom
