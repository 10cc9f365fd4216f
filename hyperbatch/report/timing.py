"""Where the time of a run and of one step went: stacked bars, and the step as a time line."""

from __future__ import annotations

from typing import Any

from hyperbatch.record import RunRecord
from hyperbatch.report import units
from hyperbatch.report.chart import ticks, time_unit
from hyperbatch.report.markup import Html, el, join
from hyperbatch.report.runs import Run
from hyperbatch.report.sections import card

# (field without _s, label, colour)
CLOCK = (
    ("init", "set-up", 7),
    ("train", "training", 5),
    ("capture", "preparing new shapes", 2),
    ("eval", "evaluation", 3),
    ("pause", "pauses (checkpoints)", 6),
)
STEP = (
    ("data_wait", "waiting for data", 6),
    ("forward", "forward", 0),
    ("backward", "backward", 3),
    ("exposed_comm", "exposed communication", 4),
    ("update", "update", 2),
)


def stacked_bar(parts: list[tuple[str, float, int]], longest_s: float | None = None) -> Html:
    """(label, seconds, colour) as one bar with its key; `longest_s` is what the full width stands for."""
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
    timing = record.timing
    if timing.get("step_s"):
        parts = [(label, timing.get(f"{name}_s") or 0.0, color) for name, label, color in STEP]
        blocks.append(
            el("div", el("h3", f"A typical step on rank 0: {units.duration(timing['step_s'])}"), stacked_bar(parts))
        )
    lead = "Exposed communication is what backward did not hide. The run's time counts training and evaluation."
    return card("Where the time went", lead, el("div", blocks, cls="split"), step_picture(timing))


def step_picture(timing: dict[str, Any]) -> Html | None:
    """One step as a time line: the compute row above, each group's all-reduce below it."""
    groups = timing.get("groups") or []
    if not groups or not timing.get("step_s"):
        return None
    width, left, right = 1060, 92, 8
    row = max(4.0, min(18.0, 240 / len(groups)))
    gap = 5 if row > 8 else 1
    step_s = max(timing["step_s"], *(group["end_s"] for group in groups))
    top, height = 26, 0.0

    def x_of(seconds: float) -> float:
        return left + max(0.0, seconds) / step_s * (width - left - right)

    marks, at = [], 0.0
    for name, label, color in STEP:
        length = timing.get(f"{name}_s") or 0.0
        if length > 0:
            shape = {"x": f"{x_of(at):.1f}", "width": f"{max(0.8, x_of(at + length) - x_of(at)):.1f}"}
            bar = el("rect", y=0, height=top - 6, rx=3, fill=f"var(--c{color})", **shape)
            marks.append(el("g", el("title", f"{label}: {units.duration(length)}"), bar))
        at += length
    marks.append(el("text", "compute", x=left - 10, y=14, text_anchor="end"))
    for position, group in enumerate(groups):
        y = top + position * (row + gap)
        height = y + row
        text = f"group {group['index']}, {group['algorithm']}, {units.size(group['bytes'])}"
        times = f"ready {units.duration(group['ready_s'])}, {units.duration(group['end_s'] - group['start_s'])} long"
        x, end = x_of(group["start_s"]), x_of(group["end_s"])
        ready = x_of(group["ready_s"])
        marks.append(
            el(
                "g",
                el("title", f"{text}: {times}"),
                el(
                    "line",
                    x1=f"{ready:.1f}",
                    x2=f"{x:.1f}",
                    y1=f"{y + row / 2:.1f}",
                    y2=f"{y + row / 2:.1f}",
                    stroke="var(--soft)",
                ),
                el(
                    "rect",
                    x=f"{x:.1f}",
                    y=f"{y:.1f}",
                    width=f"{max(1.0, end - x):.1f}",
                    height=f"{row:.1f}",
                    rx=2,
                    fill="var(--c1)",
                ),
            )
        )
        if row > 10:
            marks.append(el("text", f"group {group['index']}", x=left - 10, y=f"{y + row - 5:.1f}", text_anchor="end"))
            if end + 60 < width:
                marks.append(el("text", units.size(group["bytes"]), x=f"{end + 6:.1f}", y=f"{y + row - 5:.1f}"))
    base = height + 8
    marks.append(el("line", x1=left, x2=width - right, y1=f"{base:.1f}", y2=f"{base:.1f}", cls="base"))
    unit, scale = ("ms", 1e-3) if step_s < 2 else time_unit(step_s)
    inside = [tick for tick in ticks(0, step_s / scale, 8) if tick * scale <= step_s]
    for tick in inside:
        suffix = f" {unit}" if tick == inside[-1] else ""
        marks.append(
            el("text", f"{tick:g}{suffix}", x=f"{x_of(tick * scale):.1f}", y=f"{base + 16:.1f}", text_anchor="middle")
        )
    return el(
        "figure",
        el("figcaption", "Each group's all-reduce within that step"),
        el(
            "div",
            el(
                "svg",
                marks,
                viewBox=f"0 0 {width} {base + 22:.0f}",
                role="img",
                aria_label="time line of one step",
                style="min-width:640px",
            ),
            cls="scroll",
        ),
        el("p", "A thin line is a group that was ready and had to wait for the one before it.", cls="note"),
        style="margin-top:22px",
    )
