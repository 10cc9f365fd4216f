"""A heat map of the trust ratios over the run, with a row for each layer in the order of the network."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from hyperbatch.report import units
from hyperbatch.report.markup import Html, el, table
from hyperbatch.report.runs import Run
from hyperbatch.report.sections import card, folded

COLUMNS = 64  # the most columns
LEVELS = 12  # colours, --h0 to --h11


def trust_ratios(run: Run, number: int = 0) -> Html | None:
    """number: the run's number on its page."""
    history = moments(run)
    ratios = last_ratios(run, history)
    if not ratios:
        return None
    adapted, shown = _adapted(ratios), _adapted(ratios) or ratios
    rows = {name: [_ratio(moment, name) for moment in history] or [shown[name]] for name in shown}
    lead = (
        f"Factor of the learning rate for each layer: from {min(shown.values()):.3g} to "
        f"{max(shown.values()):.3g} over {units.plural(len(shown), 'layer')} at the last step"
        + (
            f"; {units.plural(len(ratios) - len(adapted), 'tensor')} of norms and biases have a factor of 1."
            if adapted and len(adapted) < len(ratios)
            else "."
        )
    )
    values = table(["parameter", "ratio"], [[name, f"{value:.5g}"] for name, value in ratios.items()], numeric={1})
    return card("Trust ratios", lead, _heat_map(rows, shown, history, number, lead), folded("all values", values))


def last_ratios(run: Run, history: list[dict[str, Any]]) -> dict[str, float]:
    last = _known(run.record.trust_ratios if run.record else {})
    return last or (_known(history[-1]["trust_ratios"]) if history else {})


def _adapted(ratios: dict[str, float]) -> dict[str, float]:
    """The ratios other than 1. Norms and biases have a ratio of 1, that is, the unchanged learning rate."""
    return {name: value for name, value in ratios.items() if value != 1.0}


def moments(run: Run) -> list[dict[str, Any]]:
    """The lines of layers.jsonl that are drawn, evenly spaced over the run and including the last one."""
    lines = [line for line in run.layers if isinstance(line.get("trust_ratios"), dict)]
    stride = -(-len(lines) // COLUMNS) or 1
    return lines[::-stride][::-1]


def heat_data(run: Run) -> dict[str, Any] | None:
    """The data for the pointer: the position of each column on each x axis, and all values."""
    history = moments(run)
    if not history:
        return None
    ratios = last_ratios(run, history)
    return {
        "x": [[_number(moment.get(key)) for moment in history] for key in ("time_s", "epoch", "step")],
        "rows": {name: [_number(_ratio(moment, name)) for moment in history] for name in _adapted(ratios) or ratios},
    }


def _known(ratios: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in ratios.items()
        if isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    }


def _ratio(moment: dict[str, Any], name: str) -> float:
    return _known(moment["trust_ratios"]).get(name, math.nan)


def _number(value: Any) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


def _heat_map(
    rows: dict[str, list[float]], last: dict[str, float], history: list[dict[str, Any]], number: int, words: str
) -> Html:
    drawn = [value for values in rows.values() for value in values if math.isfinite(value)]
    low, high = min(drawn), max(drawn)
    columns = max(1, len(history))
    marks = _cells(rows, low, high)
    picture = el(
        "div",
        el(
            "svg",
            marks,
            viewBox=f"0 0 {columns} {len(rows)}",
            preserveAspectRatio="none",
            role="img",
            aria_label=words,
            data_heat=number,
        ),
        el("div", cls="cursor", hidden=""),
        cls="cells",
    )
    return el(
        "div",
        el("div", [el("span", name, title=name) for name in rows], cls="names"),
        picture,
        el("div", [el("span", f"{value:.3g}") for value in last.values()], cls="values"),
        _ends(history),
        _scale_key(low, high),
        cls="heat",
        style=f"--rows:{len(rows)}",
    )


def _cells(rows: dict[str, list[float]], low: float, high: float) -> list[Html]:
    """Draws one path for each colour. Neighbouring cells of one colour are one rectangle."""
    span = math.log(high / low) or 1.0
    paths: dict[int, list[str]] = {}
    for y, values in enumerate(rows.values()):
        levels = [
            min(LEVELS - 1, int(math.log(value / low) / span * LEVELS)) if math.isfinite(value) else -1
            for value in values
        ]
        x = 0
        for level, same in groupby(levels):
            width = len(list(same))
            if level >= 0:
                paths.setdefault(level, []).append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    return [el("path", d="".join(parts), fill=f"var(--h{level})") for level, parts in sorted(paths.items())]


def _ends(history: list[dict[str, Any]]) -> Html:
    """The labels under the map: its first and last column on the selected x axis."""
    if not history:
        return el("div", el("span", "at the last step"), cls="ends")
    forms = {
        "time": lambda moment: units.duration(moment.get("time_s")),
        "epoch": lambda moment: f"epoch {units.number(round(moment.get('epoch') or 0.0, 2))}",
        "step": lambda moment: f"step {units.count(moment['step'])}",
    }
    return el(
        "div",
        [
            el("span", el("span", form(history[0])), el("span", form(history[-1])), cls=f"axis {axis}")
            for axis, form in forms.items()
        ],
        cls="ends",
    )


def _scale_key(low: float, high: float) -> Html:
    middle = math.sqrt(low * high)
    return el(
        "div",
        el("span", f"{low:.2g}"),
        el("span", [el("i", style=f"background:var(--h{level})") for level in range(LEVELS)], cls="ramp"),
        el("span", f"{high:.2g}"),
        el("span", f"logarithmic scale, {middle:.2g} in the middle; the last value is on the right", cls="note"),
        cls="scale",
    )
