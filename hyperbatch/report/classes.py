"""The last evaluation by class: the classes with the lowest accuracy, and the most frequent confusions."""

from __future__ import annotations

from typing import Any

from hyperbatch.report import units
from hyperbatch.report.markup import Html, el, join, table
from hyperbatch.report.runs import Run
from hyperbatch.report.sections import card, folded

SHOWN = 10  # number of classes in the short tables


def by_class(run: Run) -> Html | None:
    record = run.record
    if record is None or not record.classes or not record.by_class:
        return None
    names, samples, right = record.classes, record.by_class.get("samples") or [], record.by_class.get("right") or []
    if not len(names) == len(samples) == len(right):
        return None
    rows = [
        [name, _bar(hits / seen), units.percent(hits / seen), units.count(seen)]
        for hits, seen, name in sorted(zip(right, samples, names, strict=True), key=lambda row: row[0] / max(1, row[1]))
        if seen
    ]
    confusions = [
        [names[label], names[answer], units.count(count), units.percent(count / max(1, samples[label]))]
        for label, answer, count in record.by_class.get("confusions") or []
    ]
    head = ["class", "", "right", "images"]
    worst = table(head, rows[:SHOWN], numeric={2, 3})
    parts: list[Any] = [el("div", el("h3", "Recognised worst"), worst)]
    if confusions:
        columns = ["images of", "taken for", "images", "of the class"]
        found = table(columns, confusions[:SHOWN], numeric={2, 3})
        parts.append(el("div", el("h3", "Most frequent confusions"), found))
    more = folded(f"all {len(rows)} classes", table(head, rows, numeric={2, 3})) if len(rows) > SHOWN else None
    lead = f"The last evaluation by class; {len(names):,} classes in all."
    return card("Classes", lead, el("div", join(*parts), cls="pair"), more)


def _bar(share: float) -> Html:
    return el("span", el("span", style=f"width:{share * 100:.1f}%"), cls="mini")
