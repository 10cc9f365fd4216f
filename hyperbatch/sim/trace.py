"""A predicted step as a trace that opens in Perfetto, and as a picture: compute above, network below."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperbatch.errors import InputError

_WIDTH, _LEFT, _ROW, _BAR = 760, 130, 54, 16


def trace_events(values: Mapping[str, Any], *, process: int = 0) -> list[dict[str, Any]]:
    """Chrome trace events of one step, from `make_plan`'s answer; times in microseconds."""
    title = f"{values['recipe']} on {values['gpus']} x {values['cluster']}, {values['strategy']}"
    forward, backward = values["forward_s"], values["backward_s"]
    end = values["step_s"] - values["update_s"]
    spans = [("compute", "forward", 0.0, forward), ("compute", "backward", forward, forward + backward)]
    if values["exposed_comm_s"] > 0:
        spans.append(("compute", "waiting for gradients", forward + backward, end))
    spans.append(("compute", "update", end, values["step_s"]))
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}]
    for track, name in enumerate(("compute", "network")):
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}})
    for _, name, start, stop in spans:
        events.append(_slice(process, 0, name, start, stop, {}))
    for group in values["groups"]:
        args = {"bytes": group["bytes"], "tensors": len(group["parameters"]), "algorithm": group["algorithm"]}
        events.append(_slice(process, 1, f"group {group['index']}", group["start_s"], group["end_s"], args))
    return events


def write_trace(path: str | Path, *plans: Mapping[str, Any]) -> None:
    """Several plans beside each other, one process each: open the file in ui.perfetto.dev."""
    events = [event for index, plan in enumerate(plans) for event in trace_events(plan, process=index)]
    write_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def write_file(path: str | Path, text: str) -> None:
    """A file the user asked for; a path that cannot be written is their mistake."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def overlap_svg(*plans: Mapping[str, Any]) -> str:
    """Fujitsu's overlap picture: for each plan, compute and the groups on the network, to one scale."""
    longest = max(plan["step_s"] for plan in plans)
    height = _ROW * len(plans) + 30

    def x(seconds: float) -> float:
        return _LEFT + seconds / longest * (_WIDTH - _LEFT - 10)

    def bar(top: float, start: float, stop: float, color: str, title: str) -> str:
        return (
            f'<rect x="{x(start):.1f}" y="{top}" width="{max(0.5, x(stop) - x(start)):.1f}" height="{_BAR}" '
            f'fill="{color}" stroke="#fff" stroke-width="0.5"><title>{title}</title></rect>'
        )

    def text(left: float, top: float, content: str) -> str:
        return f'<text x="{left:.1f}" y="{top}">{content}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    ]
    for index, plan in enumerate(plans):
        top = 8 + index * _ROW
        forward, end = plan["forward_s"], plan["step_s"] - plan["update_s"]
        parts.append(text(4, top + 12, plan["strategy"]))
        parts.append(text(4, top + 28, f"exposed {plan['exposed_comm_s'] * 1e3:.2f} ms"))
        parts.append(bar(top, 0.0, forward, "#9ecae1", "forward"))
        parts.append(bar(top, forward, forward + plan["backward_s"], "#3182bd", "backward"))
        parts.append(bar(top, end, plan["step_s"], "#756bb1", "update"))
        for group in plan["groups"]:
            title = f"group {group['index']}: {group['bytes'] / 1e6:.2f} MB, {group['algorithm']}"
            parts.append(bar(top + _BAR + 3, group["start_s"], group["end_s"], "#e6550d", title))
    legend = "forward, backward (blue), update (violet); groups on the network (orange)"
    parts.append(text(_LEFT, height - 8, f"0 to {longest * 1e3:.1f} ms: {legend}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _slice(process: int, track: int, name: str, start_s: float, stop_s: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": track,
        "ts": start_s * 1e6,
        "dur": (stop_s - start_s) * 1e6,
        "args": args,
    }
