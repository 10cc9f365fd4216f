"""docs/evidence.md from records/: `python -m benchmarks.evidence` writes the page and its pictures, and rewrites the
report and the table of points of each record.

A record is a folder `records/<date>_<name>/` that `hyperbatch sweep PLAN.toml --out` has filled: plan, rows,
environment, report. A README.md in the folder says what the numbers mean. records/questions.toml contains the questions
that they answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.questions import FILE, MISSED, OPEN, SHOWN, VERDICTS, Answer, Question, answered, read_questions
from benchmarks.wording import readable
from hyperbatch.recipes import all_recipes
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
    counted,
    found,
    interval_note,
    is_unconfirmed,
    points_of,
    progress,
    side_by_side,
)
from hyperbatch.sweep.values import key_of

ROOT = Path(__file__).parents[1]
HEAD = """# Evidence

This page lists what hyperbatch claims and what its recorded runs say about each claim. The speeds of single
parts are on another page: [docs/measured.md](measured.md).
"""
SUMMARIES = {
    SHOWN: "The runs support these claims",
    MISSED: "The runs contradict these claims",
    OPEN: "There are no runs yet for these claims, or too few to decide them",
}
PUBLISHED = "the published results that the other {} recipes are modelled on"
RULE = """A claim is **shown** if the whole 95 % confidence interval of the measured value is on the claimed side of the
goal, **missed** if the whole interval is on the other side, and **open** otherwise. A claim with several values is
shown if all of them are, and missed if one is. A difference, such as "LARS minus SGD", is the mean over pairs of runs
with the same seed, in percentage points of top-1 accuracy. n is the number of runs. The limit of half a point in the
claims of equal accuracy was chosen after the runs, unless the answer says otherwise. An interval tells how far seeds
move the mean on one set of test images; it is not widened for the number of comparisons on this page, and it says
nothing about other images. A value from another program is quoted from its log, and its verdict is set by hand.
"""
RECORDS = """## Records

A record is a folder under `records/`. It holds a plan, a row for every run that ended (failed runs and poor results
are kept), the environment and a report. [docs/sweep.md](sweep.md) describes plans. This command repeats one run of a
record:

```sh
hyperbatch sweep records/NAME/plan.toml --data DIR --row N
```

With `--out records/NAME` in place of `--row N`, the same command makes the runs that the record does not have yet.
`python -m benchmarks.evidence` writes this page from the records and from [questions.toml](../records/questions.toml).
"""
POINTS = "points.md"
SHORT = 8  # the most points of a record that the page shows; otherwise they are only on the record's own page


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    folder: Path
    plan: Plan
    rows: list[Row]
    points: list[PointResult]
    environments: list[dict[str, object]]
    again: int  # runs that failed first and were made again; only the later row counts

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def readable(self) -> list[PointResult]:
        return [readable(point) for point in self.points]


def load_record(folder: Path) -> Record:
    """Loads the rows unchanged, with the names that they were written with, because recipes may have changed since.

    They are in the order of the plan and not in the order in which several processes wrote them, because the first of
    equal points wins, here as in the sweep. The plan also decides whether a row confirms a search, because a point may
    have got rivals since, or a search more seeds.
    """
    environments = json.loads((folder / ENVIRONMENT).read_text())
    plan = load_plan(folder / PLAN)
    runs = {(*run.point.place, key_of(run.point.search), run.seed): run for run in plan.every_run}
    order: dict[Hashable, int] = {place: number for number, place in enumerate(runs)}
    rows: dict[Hashable, Row] = {}
    written = read_rows(folder)
    for row in latest(written):
        place = key_of(row.conditions), row.arm, key_of(row.search), row.seed
        if place in rows:
            raise ValueError(
                f"{folder / ROWS}: {row.title}, seed {row.seed}, is there with two configs ({rows[place].digest} and "
                f"{row.digest}); one mean of both would be wrong. Give {PLAN} the settings of one, and delete the other"
            )
        rows[place] = dataclasses.replace(row, confirms=runs[place].confirms if place in runs else row.confirms)
    made = [rows[place] for place in sorted(rows, key=lambda place: order.get(place, len(order)))]
    failed = {row.digest for row in written if row.error is not None}
    again = len(failed) - sum(row.error is not None for row in made)
    points = points_of(made)
    return Record(folder=folder, plan=plan, rows=made, points=points, environments=environments, again=again)


def load_records(root: Path) -> list[Record]:
    """Loads all records, the newest first."""
    return [load_record(path.parent) for path in sorted(root.glob(f"*/{ROWS}"), reverse=True)]


def write_all(root: Path = ROOT) -> dict[Path, str]:
    """Returns every file that the tool writes, with its text."""
    records = load_records(root / "records")
    files = {root / "docs" / "evidence.md": page(records, read_questions(root / "records" / FILE))}
    for record in records:
        files[record.folder / REPORT] = render_sweep(record.plan, record.points)
        files[record.folder / POINTS] = points_page(record)
        if charts := sweep_charts(record.readable):
            files[root / "docs" / "pictures" / picture_name(record)] = charts_picture(*charts)
    return files


def picture_name(record: Record) -> str:
    return f"evidence_{record.name}.svg"


def page(records: Sequence[Record], questions: Sequence[Question]) -> str:
    """Returns the page: the answers, then the records behind them in the same order, then the others, newest first."""
    by_name = {record.name: record for record in records}
    names = [question.record for question in questions if question.record]
    behind = [by_name[name] for name in dict.fromkeys(names)]
    others = [record for record in records if record not in behind]
    parts = [HEAD, *(summary(questions, by_name) if questions else []), RECORDS, index([*behind, *others])]
    parts.append(f"{interval_note()} {SEARCH_NOTE}\n")
    return "\n".join([*parts, *(section(record) for record in [*behind, *others])])


def summary(questions: Sequence[Question], records: Mapping[str, Record]) -> list[str]:
    """Returns a line for each question, in the order of the file, and one for published results."""
    answers = [answered(one, records[one.record].points if one.record else []) for one in questions]
    lines = [
        [answer.question.claim, f"**{answer.verdict}**", answer.question.answer, answer.figure, _source(answer)]
        for answer in answers
    ]
    published = [recipe.name for recipe in all_recipes().values() if recipe.published and not recipe.record]
    claim = PUBLISHED.format(len(published))
    nobody = "None of these recipes has been trained here. Tests resolve and check their configs."
    lines.append([f"{claim[0].upper()}{claim[1:]}", f"**{OPEN}**", nobody, "not run", "[recipes](recipes.md)"])
    shorts: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
    for answer in answers:
        shorts[answer.verdict].append(answer.question.short)
    shorts[OPEN].append(claim)
    parts = [
        f"- **{verdict.capitalize()} ({len(claims)}).** {SUMMARIES[verdict]}: {'; '.join(dict.fromkeys(claims))}."
        for verdict, claims in shorts.items()
    ]
    table = markdown(["claim", "verdict", "what the runs say", "measured", "source"], lines)
    return ["## Claims and answers\n", "\n".join(parts) + "\n", RULE, table]


def _source(answer: Answer) -> str:
    question = answer.question
    if question.record:
        return f"[{question.record}](#{question.record})"
    if path := question.file or question.plan:
        place = Path(path).relative_to("docs") if path.startswith("docs/") else Path("..") / path
        return f"[{Path(path).name}]({place})"
    return units.NONE


def index(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        failed = sum(row.error is not None for row in record.rows)
        runs = f"{len(record.rows)}" + (f", {failed} of them failed" if failed else "")
        lines.append([f"[{record.name}](#{record.name})", f"`{record.plan.recipe}`", runs, _devices(record)])
    return markdown(["record", "recipe", "runs", "device"], lines)


def section(record: Record) -> str:
    made, planned = progress(record.plan, record.points)
    left = planned - made
    failed = sum(row.error is not None for row in record.rows)
    done = f"{units.plural(len(record.rows), 'run')} of `{record.plan.recipe}`"
    done += f", {failed} of them failed" if failed else ""
    done += (
        f"; {units.plural(record.again, 'run')} failed at first and {_was(record.again)} made again"
        if record.again
        else ""
    )
    done += f"; {units.plural(left, 'run')} of the plan {'is' if left == 1 else 'are'} missing" if left > 0 else ""
    commits = list(dict.fromkeys(str(row.commit) for row in record.rows))
    commit = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    folder = f"../records/{record.name}"
    links = [f"[{name}]({folder}/{name})" for name in _files(record)]
    lines = [f"## {record.name}\n", f"{record.plan.about}\n" if record.plan.about else ""]
    lines += [f"{done}. Device: {_devices(record)}, {commit}. Files: {', '.join(links)}.\n"]
    points = record.readable
    if len(arms_of(points)) > 1:
        lines.append(comparison(points))
    if sweep_charts(points):
        lines.append(f"![{record.plan.name}](pictures/{picture_name(record)})\n")
    if len(points) <= SHORT:
        lines.append(markdown(*columns(points)))
    else:
        lines.append(f"[{POINTS}]({folder}/{POINTS}) lists all {len(points)} points, including those that failed.\n")
    if any(point.confirms for point in points):
        lines.append(f"{CONFIRM_NOTE}\n")
    return "\n".join(line for line in lines if line)


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def points_page(record: Record) -> str:
    """Returns a record's own page: every point, and every run that failed."""
    failed = [row for row in record.rows if row.error is not None]
    lines = [
        f"# {record.name}: all points\n",
        f"`python -m benchmarks.evidence` writes this page from {ROWS}. {interval_note()}\n",
    ]
    lines.append(markdown(*columns(record.readable)))
    if any(point.confirms for point in record.points):
        lines.append(f"{CONFIRM_NOTE}\n")
    if failed:
        rows = [[str(row.run), row.title, str(row.seed), str(row.error)] for row in failed]
        lines += ["## Failed runs\n", markdown(["run", "point", "seed", "error"], rows)]
    return "\n".join(lines)


def comparison(points: Sequence[PointResult]) -> str:
    """Returns a table with each arm at the best point of its own search."""

    def cells(here: Sequence[PointResult | None]) -> list[str]:
        return [units.NONE if point is None else _cell(point, points) for point in here]

    return markdown(*side_by_side(points, arms_of(points), cells))


def _cell(point: PointResult, points: Sequence[PointResult]) -> str:
    """Mean and interval, number of runs, the search's choice, and whether the same runs made that choice."""
    if not point.top1.n:
        return "every run failed"
    chosen = "not confirmed" if is_unconfirmed(point, points) else ""
    more = ", ".join(filter(None, [f"n = {counted(point)}", found(point), chosen]))
    return f"{accuracy(point.top1)} ({more})"


def _devices(record: Record) -> str:
    found = dict.fromkeys(f"{made.get('device')}, torch {made.get('torch')}" for made in record.environments)
    return "; ".join(found)


def _files(record: Record) -> list[str]:
    names = ("README.md", PLAN, ROWS, ENVIRONMENT, REPORT, POINTS)
    return [name for name in names if name in (REPORT, POINTS) or (record.folder / name).exists()]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write docs/evidence.md, its pictures, and the records' reports and tables anew."
    )
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the checkout [this one]")
    files = write_all(parser.parse_args().root)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(files)} files written")


if __name__ == "__main__":
    main()
