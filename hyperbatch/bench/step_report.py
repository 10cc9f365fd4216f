"""Formats the result of `bench step` as text."""

from __future__ import annotations

from typing import Any


def format_step(report: dict[str, Any]) -> str:
    setting = f"{report['model']}, {report['image_size']} px, {report['precision']}"
    lines = [f"step on {report['device']}, {setting} (commit {report['commit'] or 'unknown'})"]
    lines += [f"note: {note}" for note in report["notes"]]
    rows = report["rows"]
    if rows and "data" in rows[0]:
        return "\n".join(lines + _runs(rows))
    width = max(len(row["name"]) for row in rows)
    lines.append("images a second and ratios: higher is better; times, memory, set-up and kernels: lower is better")
    lines.append(
        f"  {'':<{width}} {'img/s':>9} {'p20 .. p80':>19} {'x best peer':>11} {'ms':>8} {'GiB':>6}"
        f" {'set-up s':>8} {'kernels':>8}"
    )
    lines += [_line(row, width) for row in rows]
    lines += [
        f"  {row['name']}: {made['regions']} blocks of {made['kinds']} kinds compiled in {made['seconds']:.1f} s "
        f"({made['cache_misses']} graphs; {made['cache_hits']} more were on the disk)"
        for row in rows
        if (made := row.get("compiled"))
    ]
    for title, clocks in report["clocks"].items():
        readings = [f"{name} {v['median']:.0f} ({v['min']:.0f} .. {v['max']:.0f})" for name, v in clocks.items()]
        lines += [f"  clocks, {title}: {', '.join(readings)}"] if readings else []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        lines += _families([row for row in rows if row["batch"] == batch], f"batch {batch}")
    lines += [
        f"  warning: {row['name']} had nans or skipped updates, so its speed is not that of training"
        for row in rows
        if row["skipped_updates"] or not row["finite"]
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any], width: int) -> str:
    memory = row["peak_memory_bytes"]
    return (
        f"  {row['name']:<{width}} {row['median']:>9,.0f} {row['p20']:>9,.0f} .. {row['p80']:>6,.0f}"
        f" {_number(row['ratio_to_best_peer'], '.3f'):>11} {row['ms_per_step']:>8.2f}"
        f" {_number(None if memory is None else memory / 2**30, '.1f'):>6} {row['set_up_s']:>8.1f}"
        f" {_number(row['kernels_per_step'], 'd'):>8}"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _families(rows: list[dict[str, Any]], title: str) -> list[str]:
    """Kernel time by family: our fastest candidate beside the fastest peer."""
    timed = [row for row in rows if row["kernel_ms"] and "ratio_to_fp32" not in row]
    sides = [[row for row in timed if row["peer"] == peer] for peer in (False, True)]
    best = [max(side, key=lambda row: row["median"]) for side in sides if side]
    if not best:
        return []
    names = dict.fromkeys(name for row in best for name in row["kernel_ms"])
    short = [row["name"].split(" / ")[-1] for row in best]
    lines = [f"  {title}: ms by kernel family{'':<8}" + "".join(f"{name:>28}" for name in short)]
    for name in names:
        lines.append(f"    {name:<34}" + "".join(f"{row['kernel_ms'].get(name, 0.0):>28.3f}" for row in best))
    idle = [row["ms_per_step"] - sum(row["kernel_ms"].values()) for row in best]
    lines.append(f"    {'step less kernels':<34}" + "".join(f"{ms:>28.3f}" for ms in idle))
    return lines


def _runs(rows: list[dict[str, Any]]) -> list[str]:
    width = max(len(row["name"]) for row in rows)
    lines = ["images a second and ratios: higher is better; waits for data: lower is better"]
    lines.append(f"  {'':<{width}} {'img/s':>9} {'p20 .. p80':>19} {'x synthetic':>11} {'waits':>7}  data, bottleneck")
    for row in rows:
        lines.append(
            f"  {row['name']:<{width}} {row['mean']:>9,.0f} {row['p20']:>9,.0f} .. {row['p80']:>6,.0f}"
            f" {row['ratio_to_synthetic']:>11.3f} {row['data_wait_fraction']:>7.1%}  {row['data']}, {row['bottleneck']}"
        )
        if row["ratio_to_mlperf_v4_h200"] is not None:
            lines.append(
                f"  {'':<{width}} {row['ratio_to_mlperf_v4_h200']:.3f} x MLPerf v4.0's H200 (7,950 per GPU of 8)"
            )
    return lines
