"""Rows, their statistics, and the report that is drawn from them."""

from __future__ import annotations

import fcntl
import json
import math
import re
import statistics
import xml.etree.ElementTree as xml
from concurrent.futures import ProcessPoolExecutor

import pytest

from hyperbatch.errors import InputError
from hyperbatch.report import units
from hyperbatch.sweep.charts import comparison_chart, search_charts, seeds_chart
from hyperbatch.sweep.page import render_sweep
from hyperbatch.sweep.plan import parse_plan
from hyperbatch.sweep.rows import Row, append_row, latest, note_environment, of_plan, read_rows
from hyperbatch.sweep.sharing import held
from hyperbatch.sweep.statistics import spread, t_probability, t_quantile
from hyperbatch.sweep.table import ACROSS, best_points, columns, format_points, points_of, seconds, side_by_side


def row(top1=0.9, *, arm="LARS", seed=0, error=None, conditions=None, search=None, digest="", **result):
    values = {"top1": top1, "train_s": 2.0, "reached": False, "epochs": 3.0, "steps": 10, **result}
    return Row(
        run=1,
        arm=arm,
        seed=seed,
        recipe="digits",
        digest=digest or f"{arm}{seed}{conditions}{search}",
        conditions=conditions or {},
        search=search or {},
        error=error,
        result=values,
        setup_s=0.5,
        wall_s=3.0,
        device="cpu",
        torch="2.13",
        command="hyperbatch train digits",
    )


# --- statistics


@pytest.mark.parametrize(
    ("degrees", "t"),
    # Student's table, two-sided 95 %; one and two degrees also have a formula: see below.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (24, 2.064), (29, 2.045), (120, 1.980)],
)
def test_quantiles_are_those_of_the_table(degrees, t):
    assert t_quantile(degrees, 0.95) == pytest.approx(t, abs=5e-4)


def test_probabilities_have_closed_forms_for_few_degrees():
    for t in (0.1, 1.0, 3.7, 50.0):
        assert t_probability(t, 1) == pytest.approx(2 / math.pi * math.atan(t), rel=1e-12)
        assert t_probability(t, 2) == pytest.approx(t / math.sqrt(2 + t * t), rel=1e-12)
        third = 2 / math.pi * (math.atan(t / math.sqrt(3)) + t * math.sqrt(3) / (3 + t * t))
        assert t_probability(t, 3) == pytest.approx(third, rel=1e-12)
    assert t_probability(1.959964, 100_001) == pytest.approx(0.95, abs=1e-5), "the normal distribution's"


def test_spread_of_values():
    values = spread([1.0, 2.0, 3.0, 4.0])
    assert (values.n, values.mean, values.low, values.high) == (4, 2.5, 1.0, 4.0)
    assert values.deviation == pytest.approx(math.sqrt(5 / 3))
    assert values.half_width == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, rel=1e-6)
    assert (spread([1.0]).mean, spread([1.0]).deviation, spread([1.0]).half_width) == (1.0, None, None)
    assert (spread([]).n, spread([]).mean) == (0, None)


# --- rows


def test_rows_come_back_flat_and_whole(tmp_path):
    made = row(search={"lr": 0.5}, top1_plain=0.89)
    append_row(tmp_path, made)
    values = json.loads((tmp_path / "rows.jsonl").read_text())
    assert (values["top1"], values["steps"], values["arm"], values["top1_plain"]) == (0.9, 10, "LARS", 0.89)
    assert "result" not in values
    assert read_rows(tmp_path) == [made]
    assert read_rows(tmp_path / "nowhere") == []


def test_a_torn_line_costs_its_own_row_only(tmp_path):
    append_row(tmp_path, row(seed=0))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"run": 2, "arm": "LA')
    append_row(tmp_path, row(seed=1))
    assert [found.seed for found in read_rows(tmp_path)] == [0, 1]


@pytest.mark.parametrize("line", ["[]", "3", "null", '"text"', "{}", '{"run": 2}', '{"run": 2, "arm": "\udcff'])
def test_a_line_that_is_no_row_is_left_out(tmp_path, line):
    append_row(tmp_path, row(seed=0))
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n")
    append_row(tmp_path, row(seed=1))
    assert [found.seed for found in read_rows(tmp_path)] == [0, 1]


def _append_many(folder, first):
    for seed in range(first, first + 40):
        append_row(folder, row(seed=seed, note="x" * 5000))


def test_processes_side_by_side_append_whole_lines(tmp_path):
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_append_many, [tmp_path] * 4, [0, 100, 200, 300]))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 160
    assert len({found.seed for found in read_rows(tmp_path)}) == 160


def test_of_a_run_made_twice_the_later_row_counts():
    first, second = row(error="diverged", digest="a"), row(0.8, digest="a")
    assert latest([first, row(digest="b"), second]) == [second, row(digest="b")]


def test_rows_follow_the_plan_as_it_is_now():
    plan = parse_plan({"recipe": "digits", "seeds": 3, "grid": {"lr": [0.5, 1.0]}}, name="new")
    old = [row(digest=run.digest, arm="old", seed=run.seed) for run in reversed(plan.runs[1:])]
    found = of_plan([*old, row(digest="of no run")], plan.runs)
    assert [(r.run, r.arm, r.search, r.conditions["lr"]) for r in found] == [
        (run.number, "new", {}, run.config.schedule.lr) for run in plan.runs[1:]
    ]


def test_one_command_at_a_time_fills_a_part(tmp_path):
    with held(tmp_path, (1, 2)):
        with pytest.raises(InputError, match="another sweep"), held(tmp_path, (1, 2)):
            pass
        with held(tmp_path, (2, 2)):
            pass
    with held(tmp_path, (1, 2)):
        pass


def test_commands_that_divide_the_runs_differently_do_not_share_a_folder(tmp_path):
    """Both would make most of the runs."""
    with (
        held(tmp_path, (1, 1)),
        pytest.raises(InputError, match="and the same N in all commands"),
        held(tmp_path, (2, 2)),
    ):
        pass
    with (
        held(tmp_path, (2, 2)),
        pytest.raises(InputError, match="and the same N in all commands"),
        held(tmp_path, (1, 12)),
    ):
        pass
    # A look at a lock that is left over is none that another one could meet.
    with (tmp_path / ".part-1-of-1.lock").open("a") as looked_at, held(tmp_path, (1, 2)):
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        with held(tmp_path, (2, 2)):
            pass
    with held(tmp_path, (1, 1)):
        pass


def test_environments_are_noted_once(tmp_path):
    for torch in ("2.11", "2.13", "2.11"):
        note_environment(tmp_path, {"torch": torch})
    assert json.loads((tmp_path / "environment.json").read_text()) == [{"torch": "2.11"}, {"torch": "2.13"}]


# --- the table


def rows_of_two_arms():
    """LARS and SGD at two batches, each over two rates of its own; SGD's second rate diverges."""
    found = []
    for batch in (256, 8192):
        for lr, base in ((1.0, 0.90), (2.0, 0.93)):
            for seed in range(4):
                top1 = base + seed * 0.001 - batch / 1e6
                found.append(row(top1, seed=seed, conditions={"global_batch": batch}, search={"lr": lr}, reached=True))
        for lr in (0.1, 0.2):
            for seed in range(2):
                place = {"arm": "SGD", "seed": seed, "conditions": {"global_batch": batch}, "search": {"lr": lr}}
                found.append(row(0.8 - batch / 1e5, **place, error="diverged" if lr == 0.2 else None))
    return found


def test_points_count_what_failed_and_leave_it_out_of_means():
    points = points_of(rows_of_two_arms())
    assert len(points) == 8
    by = {(point.arm, *point.settings.values()): point for point in points}
    lars, sgd = by["LARS", 256, 2.0], by["SGD", 256, 0.2]
    values = [0.93 + seed * 0.001 - 256 / 1e6 for seed in range(4)]
    assert lars.top1.mean == pytest.approx(statistics.fmean(values))
    assert lars.top1.deviation == pytest.approx(statistics.stdev(values))
    assert (lars.reached, lars.failed, lars.measures["train_s"].mean) == (4, 0, 2.0)
    assert (sgd.failed, sgd.top1.n, sgd.top1.mean) == (2, 0, None)
    best = best_points(points)
    assert {place: point.search["lr"] for place, point in best.items()} == {
        ((("global_batch", "256"),), "LARS"): 2.0,
        ((("global_batch", "8192"),), "LARS"): 2.0,
        ((("global_batch", "256"),), "SGD"): 0.1,
        ((("global_batch", "8192"),), "SGD"): 0.1,
    }
    json.dumps([point.to_dict() for point in points], allow_nan=False)


def test_the_table_has_a_line_a_point_and_a_column_for_other_accuracies():
    head, lines = columns(points_of([row(0.91, seed=0, top1_plain=0.90), row(0.93, seed=1, top1_plain=0.92)]))
    assert head[:3] == ["arm", "runs", "top-1"]
    line = dict(zip(head, lines[0], strict=True))
    assert line["top-1"] == "92.00 % ± 12.71 %", "of two values the interval is wide"
    assert line["top-1 without test-time augmentation"] == "91.00 % ± 12.71 %"
    assert line["runs"] == "2"
    assert "to target" not in head, "no run has a time to show there"
    assert not any("augmentation" in name for name in columns(points_of([row(top1_plain=None)]))[0])
    assert len(format_points(points_of(rows_of_two_arms())).splitlines()) == 9
    assert format_points([]) != ""


# --- the report


def test_an_interval_is_drawn_as_far_as_accuracies_go():
    """Of two seeds it is 12.7 deviations wide, and made the axis begin at - 100 %."""
    found = [row(top1, seed=seed, conditions={"lr": lr}) for lr in (1, 2) for seed, top1 in enumerate((0.2, 0.9))]
    chart = comparison_chart(points_of(found))
    assert (chart.bands[0].low, chart.bands[0].high) == ([0.0, 0.0], [1.0, 1.0])


def test_a_search_of_which_one_point_is_left_has_no_chart():
    found = [row(0.9, search={"lr": 1.0}), row(None, search={"lr": 2.0}, error="diverged")]
    assert search_charts(points_of(found)) == []


def test_many_arms_stand_below_each_other():
    """Side by side the last of them were beyond the edge of the page."""
    names = [f"arm {i}" for i in range(ACROSS + 1)]
    found = [row(0.9, arm=name, conditions={"global_batch": b}) for name in names for b in (256, 64)]
    cells = [units.NONE, "x"]
    for count, shape in ((ACROSS, (2, 1 + ACROSS)), (ACROSS + 1, (ACROSS + 1, 3))):
        few = points_of(r for r in found if r.arm in names[:count])
        head, rows = side_by_side(few, names[:count], lambda here: [cells[point is not None] for point in here])
        assert (len(rows), len(head), {len(line) for line in rows}) == (*shape, {shape[1]})
    assert head == ["arm", "global batch 64", "global batch 256"]
    assert rows[-1] == [names[-1], "x", "x"]


def test_an_arm_has_one_colour_in_every_chart():
    found = [
        row(0.9 + seed / 100, arm=arm, seed=seed, conditions={"lr": lr}, digest=f"{arm}{lr}{seed}")
        for arm in ("a", "b", "c")
        for lr in (1, 2)
        for seed in range(3)
    ]
    points = points_of(found)
    for chart in (comparison_chart(points), seeds_chart(points)):
        assert {
            line.label: line.color for line in chart.lines if line.label in ("a", "b", "c", "a, lr 1", "c, lr 1")
        } in (
            {"a": 0, "b": 1, "c": 2},
            {"a, lr 1": 0, "c, lr 1": 2},
        )
        assert len({line.color for line in chart.lines}) == len(chart.lines)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.76, 0.77], "0.765 s ± 0.064 s"),
        ([210.0, 250.0], "230 s ± 254 s"),
        ([12000.0, 12345.6], "12,173 s ± 2,196 s"),
        ([100.0, 115.68], "107.8 s ± 100 s"),  # 99.6, which rounds to three digits
        ([9999.7], "10,000 s"),
        ([3.0], "3 s"),
        ([], "–"),
    ],
)
def test_times_have_no_exponents(values, text):
    assert seconds(spread(values)) == text


def test_the_charts_compare_arms_at_their_best_and_show_each_search():
    points = points_of(rows_of_two_arms())
    compared = comparison_chart(points)
    assert compared is not None
    solid = {line.label: line for line in compared.lines if not line.faint}
    assert set(solid) == {"LARS", "SGD"}
    assert solid["LARS"].x == {"": [256.0, 8192.0]}
    assert solid["LARS"].y[0] > solid["SGD"].y[0] > 0.7
    [band] = compared.bands
    assert band.color == solid["LARS"].color, "LARS's interval; SGD's values are equal"
    assert band.low[0] < solid["LARS"].y[0] < band.high[0]
    assert [chart.title for chart in search_charts(points)] == [
        "Top-1 against lr at global batch 256",
        "Top-1 against lr at global batch 8192",
    ]
    seeds = seeds_chart(points)
    assert seeds is not None
    assert [line.label for line in seeds.lines] == ["LARS, global batch 256", "LARS, global batch 8192"]
    assert all(line.y == sorted(line.y) for line in seeds.lines)
    assert comparison_chart(points_of([row()])) is None


@pytest.mark.parametrize("rows", [[], [row()], [row(error="diverged")], rows_of_two_arms()], ids=len)
def test_the_report_is_well_formed_and_says_what_the_rows_say(rows):
    plan = parse_plan({"recipe": "digits", "about": "Why <this>?", "seeds": 40}, name="shown")
    page = render_sweep(plan, points_of(rows))
    # Well-formed, but for the style sheet and the two tags that HTML leaves open.
    body = re.sub(r"<style>.*?</style>", "", page.removeprefix("<!doctype html>\n"), flags=re.DOTALL)
    tree = xml.fromstring(body)
    text = " ".join("".join(tree.itertext()).split())
    assert "Why <this>?" in text
    assert f"{len(rows)} of 40 runs" in text
    assert "src=" not in page
    assert "href=" not in page
    if len(rows) > 2:
        assert "4 of 24 runs failed" in text
        assert "every run failed" not in text
        figures = [node for node in tree.iter() if node.tag.endswith("svg")]
        assert len(figures) == 4
        assert text.count("best point of its own search") == 1
    if rows and rows[0].error:
        assert "diverged" in text
