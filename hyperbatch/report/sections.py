"""The parts of a report about one run, each from what its record holds; a part without data is left out."""

from __future__ import annotations

import math
import shlex
from typing import Any

from hyperbatch.config import fields, format_value
from hyperbatch.recipes import all_recipes
from hyperbatch.record import RunRecord
from hyperbatch.report import units
from hyperbatch.report.chart import ticks, time_unit
from hyperbatch.report.markup import Html, el, join, table
from hyperbatch.report.runs import Run

CLOCK = (
    ("init", "set-up", 7),
    ("train", "training", 5),
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
# Where a run stands and what it was called say nothing about how to do it again.
NOT_REPRODUCED = {"out", "resume"}


def card(title: str, lead: Any, *body: Any, long: bool = False) -> Html:
    return el(
        "section",
        el("h2", title),
        el("p", lead, cls="lead") if lead else None,
        *body,
        cls="card long" if long else "card",
    )


def verdict(run: Run) -> tuple[str, str, str]:
    """(kind of the pill, its text, the one big line)."""
    if run.record is None:
        best = run.best_top1
        return "bad", "no record", f"{units.percent(best)} so far" if best is not None else "Not finished"
    result = run.record.result
    if run.record.error:
        return "bad", "failed", f"Failed after {units.plural(result.steps, 'step')}"
    if result.reached and result.target_top1 is not None:
        took = units.duration(result.time_to_target_s)
        return "good", f"reached {units.percent(result.target_top1)} top-1", f"{took} to target"
    if result.top1 is None:
        return "plain", "not evaluated", f"{units.plural(result.steps, 'step')} trained"
    if result.target_top1 is None:
        return "plain", "no target set", f"{units.percent(result.top1)} top-1"
    return "warn", f"missed {units.percent(result.target_top1)}", f"{units.percent(result.top1)} top-1"


def headline(run: Run) -> Html:
    kind, pill, big = verdict(run)
    return join(
        el("span", pill, cls=f"pill {kind}"),
        el("p", big, cls="big"),
        el("p", "on ", ", ".join(filter(None, hardware(run.record))), cls="lead") if run.record else None,
        el("div", [_tile(*tile) for tile in _tiles(run)], cls="tiles"),
    )


def _tile(label: str, value: str, more: str = "") -> Html:
    return el(
        "div",
        el("div", label, cls="label"),
        el("div", value, cls="value"),
        el("div", more, cls="more") if more else None,
        cls="tile",
    )


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    if run.record is None:
        return [("steps written", units.count(len(run.steps["step"])), "in metrics.jsonl")]
    record, result, best = run.record, run.record.result, run.best_top1
    better = best is not None and result.top1 is not None and best > result.top1
    batches = [phase["global_batch"] for phase in record.phases if "global_batch" in phase]
    per_rank = result.images_per_s / max(1, record.world_size)
    exchange = f"{record.grid} grid, {_config(record, 'comm', 'algorithm')} all-reduce"
    evaluation = record.clock.get("eval_s")
    return [
        ("top-1 accuracy", units.percent(result.top1), f"best {units.percent(best)}" if better else ""),
        ("throughput", f"{units.count(result.images_per_s)} img/s", f"{units.count(per_rank)} per rank"),
        (
            "training",
            units.duration(result.train_s),
            f"and {units.duration(evaluation)} evaluation" if evaluation else "",
        ),
        ("trained for", f"{units.number(round(result.epochs, 2))} epochs", units.plural(result.steps, "step")),
        ("ranks", units.count(record.world_size), exchange if record.world_size > 1 else "no exchange"),
        ("global batch", " → ".join(units.count(b) for b in batches) or units.NONE, ""),
    ]


def hardware(record: RunRecord) -> tuple[str, str]:
    env = record.environment
    device = str(env.get("device") or env.get("device_type") or "unknown")
    if env.get("device_type") == "cpu":
        return "CPU", units.plural(env.get("cores") or 0, "core") + ("" if device == "cpu" else f" ({device})")
    return f"{record.world_size} × {device}" if record.world_size > 1 else device, f"CUDA {env['cuda']}" if env.get(
        "cuda"
    ) else ""


def _config(record: RunRecord, section: str, name: str) -> Any:
    part = record.config.get(section)
    return part.get(name) if isinstance(part, dict) else None


def alerts(run: Run) -> Html:
    out = []
    if run.problem:
        out.append(el("p", run.problem, cls="alert bad"))
    if run.record and run.record.error:
        out.append(el("p", run.record.error, cls="alert bad"))
    if run.first_bad_step is not None:
        out.append(el("p", f"The loss was not a number from step {run.first_bad_step:,} on.", cls="alert bad"))
    out += [el("p", warning, cls="alert warn") for warning in (run.record.warnings if run.record else [])]
    return join(*out)


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


def groups(run: Run) -> Html | None:
    plan = run.record.plan if run.record else {}
    items = plan.get("groups") or []
    if not items or run.record is None:
        return None
    total = sum(group["bytes"] for group in items) or 1
    default = _config(run.record, "comm", "algorithm") or units.NONE
    rows = []
    for group in items:
        names = list(group["parameters"])
        ends = f"{names[0]} … {names[-1]}" if len(names) > 1 else "".join(names)
        share = el("span", el("span", style=f"width:{group['bytes'] / total * 100:.1f}%"), cls="mini")
        rows.append(
            [
                group["index"],
                ends,
                len(names),
                join(share, units.size(group["bytes"])),
                group.get("dtype", units.NONE),
                group.get("algorithm") or default,
            ]
        )
    tensors = sum(len(group["parameters"]) for group in items)
    lead = (
        f"{units.plural(tensors, 'tensor')}, {units.size(total)}, in {units.plural(len(items), 'group')} by the "
        f"{plan.get('strategy', 'unknown')} strategy, in the order in which backward finishes them."
    )
    body = table(["group", "tensors", "count", "bytes", "precision", "all-reduce"], rows, numeric={2, 3})
    return card("Gradient groups", lead, body if len(rows) <= 24 else _folded(f"all {len(rows)} groups", body))


def _folded(text: str, body: Html) -> Html:
    return el("details", el("summary", text), body)


def trust_ratios(run: Run) -> Html | None:
    ratios = {
        name: value
        for name, value in (run.record.trust_ratios if run.record else {}).items()
        if isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    }
    if not ratios:
        return None
    adapted = {name: value for name, value in ratios.items() if value != 1.0}
    shown = adapted or ratios
    low = math.floor(math.log10(min(shown.values())) - 1e-9)
    high = max(low + 1, math.ceil(math.log10(max(shown.values())) + 1e-9))
    width, height, left, top, bottom = 1060, 210, 64, 10, 26

    def y_of(value: float) -> float:
        return height - bottom - (math.log10(value) - low) / (high - low) * (height - top - bottom)

    marks = []
    for power in range(low, high + 1):
        y = f"{y_of(10.0**power):.1f}"
        marks.append(el("line", x1=left, x2=width, y1=y, y2=y, cls="grid"))
        marks.append(el("text", f"{10.0**power:g}", x=left - 8, y=f"{float(y) + 4:.1f}", text_anchor="end"))
    stride = (width - left) / len(shown)
    for position, (name, value) in enumerate(shown.items()):
        x = f"{left + (position + 0.5) * stride:.1f}"
        marks.append(
            el(
                "g",
                el("title", f"{name}: {value:.4g}"),
                el("line", x1=x, x2=x, y1=height - bottom, y2=f"{y_of(value):.1f}", stroke="var(--c0)", opacity=0.35),
                el(
                    "circle", cx=x, cy=f"{y_of(value):.1f}", r=f"{max(2.0, min(4.5, stride / 3)):.1f}", fill="var(--c0)"
                ),
            )
        )
    names = list(shown)
    marks.append(el("text", names[0], x=left, y=height - 8))
    if len(names) > 1:
        marks.append(el("text", names[-1], x=width, y=height - 8, text_anchor="end"))
    lead = (
        f"How much of the learning rate each layer was given at the last step: from {min(shown.values()):.3g} to "
        f"{max(shown.values()):.3g} over {units.plural(len(shown), 'layer')}"
        + (
            f"; {units.plural(len(ratios) - len(adapted), 'tensor')} of norms and biases take it whole."
            if adapted and len(adapted) < len(ratios)
            else "."
        )
    )
    svg = el("svg", marks, viewBox=f"0 0 {width} {height}", role="img", aria_label=lead, style="min-width:640px")
    values = table(["parameter", "ratio"], [[name, f"{value:.5g}"] for name, value in ratios.items()], numeric={1})
    return card("Trust ratios", lead, el("div", svg, cls="scroll"), _folded("all values", values))


def phases(run: Run) -> Html | None:
    if run.record is None or not run.record.phases:
        return None
    rows = []
    for phase in run.record.phases:
        done = phase.get("first_step") or 0  # steps done when the phase began
        logged = [epoch for step, epoch in zip(run.steps["step"], run.steps["epoch"], strict=True) if step <= done]
        rows.append(
            [
                units.count(done),
                units.number(round(logged[-1], 2)) if logged else "0",
                units.count(phase.get("global_batch")),
                units.count(phase.get("batch_per_rank")),
                units.count(phase.get("accumulation")),
            ]
        )
    lead = "Batch-size control as it was carried out. Global batch = batch per rank × micro-steps × ranks."
    head = ["after step", "epoch", "global batch", "batch per rank", "micro-steps"]
    return card("Batch phases", lead, table(head, rows, numeric=set(range(5)), cls="tight"))


def changed_fields(record: RunRecord) -> dict[str, tuple[Any, Any]] | None:
    """Field -> (recipe's value, this run's) where they differ; None when the recipe is not one of ours.

    Only built-in recipes are looked up: drawing a report never imports code that a run's folder names.
    """
    recipe = all_recipes().get(record.recipe)
    if recipe is None:
        return None
    usual = recipe.config().to_dict()
    changed = {}
    for spec in fields():
        here = record.config.get(spec.section)
        if not isinstance(here, dict) or spec.name not in here:
            continue
        before, now = usual[spec.section][spec.name], spec.coerce(here[spec.name])
        chosen = spec.name == "nproc" and before == 0  # left to the launcher, which wrote down what it found
        if spec.coerce(before) != now and not chosen:
            changed[spec.name] = (before, now)
    return changed


def config(run: Run) -> Html | None:
    if run.record is None or not run.record.config:
        return None
    known = {spec.name: spec for spec in fields()}
    changed = changed_fields(run.record)
    parts = []
    for section, values in run.record.config.items():
        if not isinstance(values, dict):
            continue
        rows = []
        for name, value in values.items():
            spec = known.get(name)
            text = format_value(_tuples(value)) or "none"
            differs = bool(changed) and name in changed and name not in NOT_REPRODUCED
            usual = (
                el("small", f" (recipe {format_value(_tuples(changed[name][0])) or 'none'})")
                if differs and changed
                else None
            )
            label = el("span", name.replace("_", " "), title=spec.help if spec else None)
            rows.append(el("div", label, el("b", text, usual), cls="changed" if differs else None))
        parts.append(el("section", el("h3", section), rows))
    marked = [name for name in changed or {} if name not in NOT_REPRODUCED]
    lead = f"Recipe {run.record.recipe}. " + (
        "" if changed is None else "Highlighted: what this run changed." if marked else "Nothing was changed."
    )
    return card("Configuration", lead, el("div", parts, cls="config"), long=True)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def command(record: RunRecord) -> str:
    """The command that does this run again, as far as the record tells."""
    words = ["hyperbatch", "train", record.recipe]
    changed = changed_fields(record)
    flags = {spec.name: spec.flag for spec in fields()}
    for name, (_, value) in (changed or {}).items():
        if name not in NOT_REPRODUCED:
            words += [flags[name], format_value(value)]
    if record.world_size > 1 and "--nproc" not in words:
        words += ["--nproc", str(record.world_size)]
    return shlex.join(words)


def reproduce(run: Run) -> Html | None:
    record = run.record
    if record is None:
        return None
    environment = [
        [name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else value]
        for name, value in record.environment.items()
        if value not in (None, "")
    ]
    launcher = record.environment.get("launcher")
    note = None
    if changed_fields(record) is None:
        note = f"{record.recipe} is not a built-in recipe: the command assumes that it still gives the values above."
    elif record.world_size > 1 and launcher in ("torchrun", "slurm", "openmpi", "mpi"):
        note = f"This run was started by {launcher}; on several hosts start {record.world_size} ranks the same way."
    return card(
        "How to run it again",
        "The same seed on as many ranks gives the same result, bit for bit (on GPUs with --deterministic).",
        el("pre", command(record)),
        el("p", note, cls="note") if note else None,
        el("h3", "Environment") if environment else None,
        table([], environment) if environment else None,
    )
