"""`hyperbatch watch RUN`: a live view of a run from its metrics.jsonl, from any terminal that sees the folder."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hyperbatch.errors import InputError, RunFailed
from hyperbatch.record import RunRecord, parse_metric_line
from hyperbatch.report import units
from hyperbatch.report.runs import check_folder, check_run
from hyperbatch.report.summary import summary

BARS = "▁▂▃▄▅▆▇█"
REFRESH_S = 0.5
CURVE_COLUMNS, LEFT_COLUMNS = 48, 33  # the longest curve; names, values and the space between them
BEGUN = ("record.json", "metrics.jsonl", ".lock")  # every run has one of them; the lock exists before the first step


class Follower:
    """Reads what was appended since the last call. Starts over if the file shrank, as when a run is restarted."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.steps: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []

    def look(self) -> None:
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                    self.steps.clear()
                    self.evals.clear()
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for text in whole.decode(errors="replace").splitlines():
            line = parse_metric_line(text)
            if line is not None:
                (self.evals if line["event"] == "eval" else self.steps).append(line)


def watch(folder: Path, *, once: bool = False, console: Console | None = None) -> None:
    """Follows a run until its record appears or Ctrl-C is pressed. `once` prints the current state and returns."""
    folder = Path(folder)
    if once:
        check_run(folder, BEGUN)
    check_folder(folder)
    if any(folder.iterdir()):  # an empty folder may belong to a run that has not started
        check_run(folder, (*BEGUN, "config.toml"))
    console = console or Console()
    follower = Follower(folder / "metrics.jsonl")
    follower.look()
    if once:
        console.print(view(folder, follower, console.width))
    else:
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(view(folder, follower, console.width), console=console) as live,
        ):
            while not finished(folder):
                time.sleep(REFRESH_S)
                if not folder.is_dir():
                    raise RunFailed(f"{folder} was deleted while it was watched")
                follower.look()
                live.update(view(folder, follower, console.width))
        if not console.is_terminal:
            console.print()  # without a terminal, rich does not end the last line
    if finished(folder):
        with contextlib.suppress(InputError):
            console.print(Text(summary(RunRecord.load(folder))), soft_wrap=True)  # as train prints it


def state(folder: Path) -> dict[str, Any]:
    """The values that `watch --once` shows: the last metrics, and the record if the run has ended."""
    check_run(folder, BEGUN)
    follower = Follower(folder / "metrics.jsonl")
    follower.look()
    done, record = finished(folder), None
    if done:
        with contextlib.suppress(InputError):
            record = RunRecord.load(folder).to_dict()
    last = {"step": follower.steps, "eval": follower.evals}
    return {
        "run": str(folder),
        "finished": done,
        **{name: lines[-1] if lines else None for name, lines in last.items()},
        "record": record,
    }


def finished(folder: Path) -> bool:
    """Whether the run has ended. A record that is older than the metrics is from an attempt before a resume."""
    record, metrics = folder / "record.json", folder / "metrics.jsonl"
    if not record.exists():
        return False
    return not metrics.exists() or record.stat().st_mtime_ns >= metrics.stat().st_mtime_ns


def view(folder: Path, follower: Follower, columns: int) -> Group:
    """columns: the width of the terminal, to which the curves are fitted."""
    steps, evals = follower.steps, follower.evals
    if not steps:
        return Group(Text(f"{folder}: no step yet", style="dim"))
    last, room = steps[-1], max(1, min(CURVE_COLUMNS, columns - LEFT_COLUMNS))
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="blue")
    rows = [
        ("loss", units.number(last.get("loss")), "loss"),
        ("learning rate", units.number(last.get("lr")), "lr"),
        ("global batch", units.count(last.get("global_batch")), "global_batch"),
        ("images/s", units.count(last.get("images_per_s")), "images_per_s"),
    ]
    for label, value, name in rows:
        table.add_row(label, value, spark([line.get(name) for line in steps], room))
    if evals:
        names = {"top1": "top-1", "top1_plain": "without TTA", "top5": "top-5", "val_loss": "validation loss"}
        for name in [name for name in names if name in evals[-1]]:
            form = units.number if name == "val_loss" else units.percent
            table.add_row(names[name], form(evals[-1][name]), spark([line.get(name) for line in evals], room))
    epoch, time_s = last.get("epoch") or 0.0, last.get("time_s")
    head = Text.assemble(
        (folder.resolve().name, "bold"), f"  step {last['step']:,}  epoch {epoch:.2f}  {units.duration(time_s)}"
    )
    return Group(head, table)


def spark(values: list[float | None], width: int = CURVE_COLUMNS) -> str:
    """Draws the last part of a curve as bars. A value that is not finite is a blank."""
    stride = -(-len(values) // width) or 1
    shown = [value if value is not None and math.isfinite(value) else None for value in values[::-stride][::-1]]
    finite = [value for value in shown if value is not None]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(" " if v is None else BARS[int((v - low) / span * (len(BARS) - 1))] for v in shown)
