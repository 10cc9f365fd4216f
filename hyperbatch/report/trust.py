"""The trust ratio LARS gave each layer, on a logarithmic scale in the order of the network."""

from __future__ import annotations

import math

from hyperbatch.report import units
from hyperbatch.report.markup import Html, el, table
from hyperbatch.report.runs import Run
from hyperbatch.report.sections import card, folded


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
    return card("Trust ratios", lead, el("div", svg, cls="scroll"), folded("all values", values))
