"""Several runs side by side: one row each, and the fields in which they differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyperbatch.config import fields
from hyperbatch.report import sections, setup, timing, units
from hyperbatch.report.chart import color, dash
from hyperbatch.report.markup import Html, el, join, table
from hyperbatch.report.runs import Run

# (heading, field of the result, its format, the function that selects the best value)
COLUMNS: tuple[tuple[str, str, Callable[[Any], str], Callable[[Any], Any] | None], ...] = (
    ("time to target", "time_to_target_s", units.duration, min),
    ("top-1", "top1", units.percent, max),
    ("without TTA", "top1_plain", units.percent, None),
    ("top-5", "top5", units.percent, max),
    ("validation loss", "val_loss", units.number, min),
    ("img/s", "images_per_s", units.count, max),
    ("training", "train_s", units.duration, None),
    ("epochs", "epochs", lambda v: units.number(round(v, 2)), None),
    ("steps", "steps", units.count, None),
)
SOME_HAVE = ("top1_plain", "top5", "val_loss")  # fields without a column if no run has them


def swatch(index: int) -> Html:
    hollow = f"border:2px solid {color(index)};box-sizing:border-box"
    return el("span", cls="swatch", style=hollow if dash(index) else f"background:{color(index)}")


def comparison(runs: list[Run]) -> Html:
    results = [run.record.result for run in runs if run.record]
    known = {name for name in SOME_HAVE if any(getattr(result, name) is not None for result in results)}
    with_views = "top1_plain" in known
    columns = [column for column in COLUMNS if column[1] not in SOME_HAVE or column[1] in known]
    best = {}
    for _, name, _, choose in columns:
        values = [getattr(run.record.result, name) for run in runs if run.record]
        values = [value for value in values if value is not None and math.isfinite(value)]
        if choose and len(set(values)) > 1:
            best[name] = choose(values)
    rows = []
    for index, run in enumerate(runs):
        kind, pill, _ = sections.verdict(run)
        row: list[Any] = [join(swatch(index), run.name), el("span", pill, cls=f"pill {kind}")]
        for _, name, form, _ in columns:
            value = getattr(run.record.result, name) if run.record else None
            text = form(value) if value is not None else units.NONE
            row.append(el("span", text, cls="best") if value is not None and value == best.get(name) else text)
        row.append(units.count(run.record.world_size) if run.record else units.NONE)
        row.append(sections.hardware(run.record)[0] if run.record else units.NONE)
        rows.append(row)
    head = ["run", "outcome", *(head for head, *_ in columns), "ranks", "hardware"]
    return sections.card(
        f"{len(runs)} runs compared",
        join(
            "Times count training and evaluation, from the first training sample.",
            " TTA is test-time augmentation: the mean prediction over several views of each image."
            if with_views
            else "",
        ),
        table(head, rows, numeric=set(range(2, 3 + len(columns))), cls="compare stack"),
    )


def differences(runs: list[Run]) -> Html | None:
    """The config fields in which the runs differ, or None."""
    known = [run for run in runs if run.record]
    rows = []
    for spec in fields():
        if not spec.repeated:
            continue
        texts = [_value(run, spec.section, spec.name) for run in known]
        if len(set(texts)) > 1:
            rows.append([spec.name.replace("_", " "), *texts])
    recipes = [run.record.recipe for run in known if run.record]
    if len(set(recipes)) > 1:
        rows.insert(0, ["recipe", *recipes])
    if len(known) < 2:
        return None
    if not rows:
        return sections.card("What differs", "The runs have the same configuration.")
    head = ["field", *(join(swatch(runs.index(run)), run.name) for run in known)]
    return sections.card(
        "What differs", "Every other field is the same in all of them.", table(head, rows, cls="stack")
    )


def _value(run: Run, section: str, name: str) -> str:
    part = run.record.config.get(section) if run.record else None
    if run.record is None or not isinstance(part, dict) or name not in part:
        return units.NONE
    own = setup.own_count(run.record, section, name)
    return setup.field_text(part[name] if own is None else own)


def clocks(runs: list[Run]) -> Html | None:
    parts = {index: timing.clock_parts(run.record) for index, run in enumerate(runs) if run.record and run.record.clock}
    longest_s = max((sum(seconds for _, seconds, _ in part) for part in parts.values()), default=0.0)
    if not longest_s:
        return None
    blocks = [
        el("div", el("h3", swatch(index), runs[index].name), timing.stacked_bar(part, longest_s))
        for index, part in parts.items()
    ]
    return sections.card("Where the time went", None, *blocks)
