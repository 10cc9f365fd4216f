"""The mean step of each rank, the slowest rank by name, and the readings of its device."""

from __future__ import annotations

import statistics
from typing import Any

from hyperbatch.plan.types import StepTiming
from hyperbatch.report import units
from hyperbatch.report.markup import Html, el, table
from hyperbatch.report.runs import Run
from hyperbatch.report.sections import card, folded
from hyperbatch.report.timing import fitting, part_key, step_bars

MOST_BARS = 16
OWN = ("data_wait_s", "forward_s", "backward_s", "update_s")  # work that does not depend on other ranks


def ranks(run: Run) -> Html | None:
    rows = [row for row in (run.record.ranks if run.record else []) if isinstance(row, dict) and "rank" in row]
    if len(rows) < 2:
        return None
    timed = {int(row["rank"]): _timing(row) for row in rows if row.get("step_s")}
    return card(
        "Ranks",
        _lead(timed, {int(row["rank"]): str(row.get("host", "")) for row in rows}) if timed else None,
        _bars(timed) if timed else None,
        _table(rows) if len(rows) <= MOST_BARS else folded(f"all {len(rows)} ranks", _table(rows)),
    )


def _timing(row: dict[str, Any]) -> StepTiming:
    """The rest of a step beside the rank's own work is communication, or waiting for a slower rank."""
    own = {name: float(row.get(name) or 0.0) for name in OWN}
    step_s = float(row["step_s"])
    return StepTiming.from_dict(own | {"step_s": step_s, "exposed_comm_s": max(0.0, step_s - sum(own.values()))})


def own_s(timing: StepTiming) -> float:
    return sum(getattr(timing, name) for name in OWN)


def _lead(timed: dict[int, StepTiming], hosts: dict[int, str]) -> str:
    slowest = max(timed, key=lambda rank: own_s(timed[rank]))
    usual_s = statistics.median_low(own_s(timing) for timing in timed.values())
    where = f" (host {hosts[slowest]})" if hosts.get(slowest) else ""
    more_s = own_s(timed[slowest]) - usual_s
    text = (
        f"Rank {slowest}{where} is the slowest: its own work takes {units.duration(own_s(timed[slowest]))} of each step"
    )
    text += f", {units.duration(more_s)} longer than the median rank" if more_s > 0 else ""
    return f"{text}. Faster ranks wait for it, which counts as exposed communication. Means over the whole run."


def _bars(timed: dict[int, StepTiming]) -> Html:
    by_work = sorted(timed, key=lambda rank: own_s(timed[rank]), reverse=True)
    shown = {f"rank {rank}": timed[rank] for rank in sorted(by_work[:MOST_BARS])}
    title = "Mean step of each rank" if len(timed) <= MOST_BARS else f"The {MOST_BARS} slowest ranks: mean step"
    picture = fitting(lambda width: step_bars(shown, width), title)
    return el("figure", el("figcaption", title), picture, part_key(shown.values()))


def _table(rows: list[dict[str, Any]]) -> Html:
    head = ["rank", "host", "device", "step", "own work", "peak memory", "utilisation", "clock"]
    lines = []
    for row in rows:
        timing = _timing(row) if row.get("step_s") else None
        lines.append(
            [
                row["rank"],
                row.get("host", units.NONE),
                row.get("device", units.NONE),
                units.duration(timing.step_s if timing else None),
                units.duration(own_s(timing) if timing else None),
                memory(row),
                units.percent(row.get("utilisation"), 0),
                clock(row),
            ]
        )
    used = [0, *(i for i in range(1, len(head)) if any(line[i] != units.NONE for line in lines))]
    numeric = {place for place, i in enumerate(used) if i > 2}
    return table([head[i] for i in used], [[line[i] for i in used] for line in lines], numeric=numeric, cls="stack")


def memory(row: dict[str, Any]) -> str:
    """The peak memory of a rank, and the memory of its device."""
    peak, total = row.get("memory_peak_bytes"), row.get("memory_bytes")
    if not peak:
        return units.NONE
    return units.size(peak) + (f" of {units.size(total)}" if total else "")


def clock(row: dict[str, Any]) -> str:
    if not row.get("clock_mhz"):
        return units.NONE
    return f"{units.count(round(row['clock_mhz']))} MHz (least {units.count(row.get('clock_least_mhz'))})"


def device_tile(run: Run) -> tuple[str, str, str] | None:
    """The peak memory of the rank that needed most, with the readings of its device."""
    rows = [row for row in (run.record.ranks if run.record else []) if isinstance(row, dict)]
    rows = [row for row in rows if row.get("memory_peak_bytes")]
    if not rows:
        return None
    most = max(rows, key=lambda row: row["memory_peak_bytes"])
    total = most.get("memory_bytes")
    notes = [
        f"of {units.size(total)}" if total else "",
        f"{units.percent(most['utilisation'], 0)} utilisation" if most.get("utilisation") is not None else "",
        f"{units.count(round(most['clock_mhz']))} MHz" if most.get("clock_mhz") else "",
        "per rank at most" if len(rows) > 1 else "",
    ]
    return "peak memory", units.size(most["memory_peak_bytes"]), ", ".join(filter(None, notes))
