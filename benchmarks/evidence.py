"""docs/evidence.md from records/: `python -m benchmarks.evidence` writes the page, its pictures and each report anew.

A record is a folder `records/<date>_<name>/` that `hyperbatch sweep PLAN.toml --out` has filled: plan, rows,
environment, report. A README.md beside them says what the numbers mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperbatch.report import units
from hyperbatch.report.picture import charts_picture
from hyperbatch.sweep.charts import sweep_charts
from hyperbatch.sweep.page import render_sweep
from hyperbatch.sweep.plan import Plan, load_plan
from hyperbatch.sweep.rows import ENVIRONMENT, PLAN, REPORT, ROWS, Row, latest, read_rows
from hyperbatch.sweep.table import (
    CONFIRM_NOTE,
    SEARCH_NOTE,
    PointResult,
    accuracy,
    arms_of,
    columns,
    compared,
    found,
    interval_note,
    points_of,
    progress,
)
from hyperbatch.sweep.values import key_of

ROOT = Path(__file__).parents[1]
HEAD = """# Evidence

What was trained here, with every row behind it. `python -m benchmarks.evidence` writes this page from the folders under
`records/`; each holds its plan, its rows as they were written when a run ended (failed and worse ones, too), the
environment and a report. [docs/sweep.md](sweep.md) describes the plans. One run of a record is made again by

```sh
hyperbatch sweep records/NAME/plan.toml --data DIR --row N
```

and a record goes on growing by the same command with `--out records/NAME` in place of `--row N`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    folder: Path
    plan: Plan
    rows: list[Row]
    points: list[PointResult]
    environments: list[dict[str, object]]

    @property
    def name(self) -> str:
        return self.folder.name


def load_record(folder: Path) -> Record:
    """Rows as they are, under the names that they were written with: recipes may have changed since.

    Whether a row confirms a search is the plan's to say: a point may have got rivals since, or a search more seeds.
    """
    environments = json.loads((folder / ENVIRONMENT).read_text())
    plan = load_plan(folder / PLAN)
    known = {(*run.point.place, key_of(run.point.search), run.seed): run.confirms for run in plan.every_run}
    rows = []
    for row in latest(read_rows(folder)):
        place = key_of(row.conditions), row.arm, key_of(row.search), row.seed
        rows.append(dataclasses.replace(row, confirms=known.get(place, row.confirms)))
    return Record(folder=folder, plan=plan, rows=rows, points=points_of(rows), environments=environments)


def load_records(root: Path) -> list[Record]:
    """The newest first."""
    return [load_record(path.parent) for path in sorted(root.glob(f"*/{ROWS}"), reverse=True)]


def write_all(root: Path = ROOT) -> dict[Path, str]:
    """Every file that the tool writes, with its text."""
    records = load_records(root / "records")
    files = {root / "docs" / "evidence.md": page(records)}
    for record in records:
        files[record.folder / REPORT] = render_sweep(record.plan, record.points)
        if charts := sweep_charts(record.points):
            files[root / "docs" / "pictures" / picture_name(record)] = charts_picture(*charts)
    return files


def picture_name(record: Record) -> str:
    return f"evidence_{record.name}.svg"


def page(records: Sequence[Record]) -> str:
    listed = [
        [f"[{record.name}](#{record.name})", f"`{record.plan.recipe}`", str(len(record.rows)), _devices(record)]
        for record in records
    ]
    parts = [HEAD, markdown(["record", "recipe", "runs", "made on"], listed), f"{interval_note()} {SEARCH_NOTE}\n"]
    return "\n".join([*parts, *(section(record) for record in records)])


def section(record: Record) -> str:
    failed = sum(row.error is not None for row in record.rows)
    made, planned = progress(record.plan, record.points)
    left = planned - made
    done = f"{units.plural(len(record.rows), 'run')} of `{record.plan.recipe}`"
    done += f", {failed} of them failed" if failed else ""
    done += f"; {left} of the plan are still to be made" if left > 0 else ""
    commits = ", ".join(dict.fromkeys(str(row.commit) for row in record.rows))
    links = [f"[{name}](../records/{record.name}/{name})" for name in _files(record)]
    lines = [f"## {record.name}\n", f"{record.plan.about}\n" if record.plan.about else ""]
    lines += [f"{done}. Made on {_devices(record)}, commit {commits}. Files: {', '.join(links)}.\n"]
    if len(arms_of(record.points)) > 1:
        lines.append(comparison(record.points))
    if sweep_charts(record.points):
        lines.append(f"![{record.plan.name}](pictures/{picture_name(record)})\n")
    lines.append(markdown(*columns(record.points)))
    if any(point.confirms for point in record.points):
        lines.append(f"{CONFIRM_NOTE}\n")
    return "\n".join(line for line in lines if line)


def comparison(points: Sequence[PointResult]) -> str:
    """Conditions down, arms across, each arm at the best point of its own search."""
    names, lines = compared(points)
    rows = [[*values, *(units.NONE if point is None else _cell(point) for point in here)] for values, here in lines]
    return markdown([*(name.replace("_", " ") for name in names), *arms_of(points)], rows)


def _cell(point: PointResult) -> str:
    if not point.top1.n:
        return "every run failed"
    return accuracy(point.top1) + (f" ({found(point)})" if point.search else "")


def _devices(record: Record) -> str:
    found = dict.fromkeys(f"{made.get('device')}, torch {made.get('torch')}" for made in record.environments)
    return "; ".join(found)


def _files(record: Record) -> list[str]:
    names = ("README.md", PLAN, ROWS, ENVIRONMENT, REPORT)
    return [name for name in names if name == REPORT or (record.folder / name).exists()]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/evidence.md, its pictures and the records' reports anew.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the checkout [this one]")
    files = write_all(parser.parse_args().root)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(files)} files written")


if __name__ == "__main__":
    main()
