"""`confirm` in plans: which runs follow a search, who makes them, what the table says of them. Nothing is trained."""

from __future__ import annotations

import tomllib
from concurrent.futures import ProcessPoolExecutor

import pytest

from hyperbatch import cli
from hyperbatch.sweep.charts import comparison_chart, search_charts, seeds_chart
from hyperbatch.sweep.command import format_sweep, result_of
from hyperbatch.sweep.missing import MissingRuns, confirming
from hyperbatch.sweep.page import render_sweep
from hyperbatch.sweep.plan import parse_plan
from hyperbatch.sweep.rows import Row, append_row, of_plan, read_rows
from hyperbatch.sweep.sharing import claimed, others_search, searching
from hyperbatch.sweep.table import best_points, columns, points_of, progress

PLAN = """
recipe = "digits"
confirm = 3
[grid]
global_batch = [32, 64]
[[arms]]
name = "LARS"
grid.lr = [0.5, 1, 2]
[[arms]]
name = "SGD"
optimizer = "sgd"
[[arms]]
name = "LARS"
when.global_batch = [64]
grid.lr = [4]
"""
SEARCHED = """
recipe = "digits"
confirm = 2
[[arms]]
name = "LARS"
grid.lr = [0.5, 1, 2]
"""


def parsed(text):
    return parse_plan(tomllib.loads(text), name="plan")


def made(run, top1, error=None):
    return Row(
        run=run.number,
        arm=run.point.arm,
        conditions=run.point.conditions,
        search=run.point.search,
        seed=run.seed,
        confirms=run.confirms,
        digest=run.digest,
        recipe="digits",
        error=error,
        result={"top1": top1, "train_s": 1.0, "reached": False},
    )


def rows_of(runs, accuracies):
    """None is a run that failed."""
    return [
        made(run, top1, None if top1 is not None else "diverged") for run, top1 in zip(runs, accuracies, strict=True)
    ]


def fill(plan, folder, top1_of, *, most=100, part=(1, 1), retry_failed=False):
    """A command that invents its results; the runs that it made."""
    runs = []
    steps = iter(MissingRuns(plan, folder, part=part, retry_failed=retry_failed))
    for run in steps:
        assert run is not None, "alone there is nobody to wait for"
        if len(runs) == most:
            break
        runs.append(run)
        [row] = rows_of([run], [top1_of(run)])
        append_row(folder, row)
    steps.close()
    return runs


def by_rate(best):
    """Accuracy falls with the distance from the best rate; fresh seeds are a little worse."""
    return lambda run: 0.9 - abs(run.config.schedule.lr - best) / 10 - run.seed / 1000


def lr_and_seed(runs):
    return [(run.config.schedule.lr, run.seed) for run in runs]


# --- the plan


def test_what_confirm_adds_is_numbered_behind_all_other_runs():
    plan, without = parsed(PLAN), parsed(PLAN.replace("confirm = 3", ""))
    assert [(run.number, run.digest) for run in plan.runs if run.number <= 9] == [
        (run.number, run.digest) for run in without.runs
    ]
    assert (len(without.runs), without.count, without.searches) == (9, 9, ())
    assert sorted(run.number for run in plan.every_run) == list(range(1, len(plan.every_run) + 1))
    assert (len(plan.runs), plan.count) == (9 + 2 * 3, 9 + 2 * 3 + 2 * 3)


def test_blocks_of_one_name_share_a_search_and_a_point_without_a_rival_has_more_seeds():
    plan = parsed(PLAN)
    small, large = plan.searches
    assert [run.config.schedule.lr for run in small.runs] == [0.5, 1, 2]
    assert [run.config.schedule.lr for run in large.runs] == [0.5, 1, 2, 4]
    assert small.seeds == large.seeds == (1, 2, 3)
    assert len(large.fresh) == 4 * 3
    alone = [run for run in plan.runs if run.point.arm == "SGD"]
    assert [(run.config.global_batch, run.seed, run.confirms) for run in alone] == [
        (batch, seed, False) for batch in (32, 64) for seed in range(4)
    ]
    assert [run.number for run in alone] == [7, 10, 11, 12, 8, 13, 14, 15]


def test_a_confirmation_comes_directly_behind_its_search():
    plan = parsed(PLAN)
    shown = [step.title if hasattr(step, "fresh") else step.number for step in plan.in_order()]
    assert shown[:5] == [1, 2, 3, "LARS, global batch 32", 4]
    assert shown[-2:] == [9, "LARS, global batch 64"], "its last run is in the second block"


@pytest.mark.parametrize(
    ("lines", "seeds"),
    [
        ("seeds = 2\nconfirm = 3", (2, 3, 4)),
        ("seeds = [1, 7]\nconfirm = 3", (0, 2, 3)),
        ("confirm = [9, 4]", (9, 4)),
        ("confirm = 5\n[[arms]]\nconfirm = 1", (1,)),
    ],
)
def test_fresh_seeds_are_those_that_the_search_has_not(lines, seeds):
    arm = "" if "[[arms]]" in lines else "[[arms]]\n"
    [search] = parsed(f'recipe = "digits"\n{lines}\n{arm}grid.lr = [1, 2]').searches
    assert search.seeds == seeds


@pytest.mark.parametrize("lines", ["confirm = 0", "confirm = []", "confirm = 2\n[[arms]]\nconfirm = 0"])
def test_it_can_be_left_out(lines):
    arm = "" if "[[arms]]" in lines else "[[arms]]\n"
    plan = parsed(f'recipe = "digits"\n{lines}\n{arm}grid.lr = [1, 2]')
    assert (plan.searches, plan.count) == ((), 2)


def test_seeds_of_a_point_without_a_rival_may_be_named_twice():
    plan = parsed('recipe = "digits"\nseeds = 3\nconfirm = [1, 2, 3, 4]')
    assert [run.seed for run in plan.runs] == [0, 1, 2, 3, 4]


def test_dry_run_says_what_is_known(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text(f"seeds = 2\n{SEARCHED}")
    assert cli.main(["sweep", str(path), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "plan: 8 runs of digits" in text
    last = "LARS: the best of these 3 points is repeated with 2 seeds (2, 3); numbers 7 to 12, 2 for each point"
    assert text.splitlines()[-1].strip() == last


# --- the best point


@pytest.mark.parametrize(
    ("accuracies", "lr"),
    [
        ([0.7, 0.8, 0.8, 0.8, 0.7, 0.7], 1),
        ([0.8, 0.8, 0.7, 0.9, 0.8, 0.8], 0.5),  # all equal: the first
        ([None, None, None, 0.1, 0.2, None], 2),  # of seeds that ended
        ([None, None, 0.0, None, None, None], 1),  # whatever it reached
    ],
)
def test_the_best_point_has_the_highest_mean(accuracies, lr):
    [search] = parsed(SEARCHED.replace("confirm = 2", "seeds = 2\nconfirm = 2")).searches
    rows = rows_of(search.runs, accuracies)
    assert lr_and_seed(confirming(search, rows) or []) == [(lr, 2), (lr, 3)]
    assert confirming(search, rows[:-1]) is None, "a run is missing"
    assert confirming(search, rows_of(search.runs, [None] * 6)) == [], "nothing to confirm"


# --- what is made


def test_one_command_searches_and_confirms_and_goes_on_where_it_stopped(tmp_path):
    plan = parsed(PLAN)
    (tmp_path / "whole").mkdir()
    whole = fill(plan, tmp_path / "whole", by_rate(1))
    assert lr_and_seed(whole[:6]) == [(0.5, 0), (1, 0), (2, 0), (1, 1), (1, 2), (1, 3)]
    assert len(whole) == plan.count
    (tmp_path / "parts").mkdir()
    parts = []
    while some := fill(plan, tmp_path / "parts", by_rate(1), most=4):
        parts += some
    assert [run.digest for run in parts] == [run.digest for run in whole]
    rows = read_rows(tmp_path / "parts")
    assert [row.confirms for row in rows] == [run.confirms for run in whole]
    assert sum(row.confirms for row in rows) == 6


def test_a_wider_search_may_have_another_best_point_and_keeps_the_rows_of_the_first(tmp_path):
    assert len(fill(parsed(SEARCHED), tmp_path, by_rate(4))) == 5
    wider = parsed(SEARCHED.replace("[0.5, 1, 2]", "[0.5, 1, 2, 4]"))
    result = result_of(wider, tmp_path)
    assert (result.done, result.planned) == (5, 6), "the first is the best as far as is known"
    assert lr_and_seed(fill(wider, tmp_path, by_rate(4), most=1)) == [(4, 0)]
    result = result_of(wider, tmp_path)
    assert (result.done, result.planned) == (4, 6)
    best = best_points(result.points)[(), "LARS"]
    assert (best.search, best.confirms) == ({"lr": 4.0}, None)
    assert lr_and_seed(fill(wider, tmp_path, by_rate(4))) == [(4, 1), (4, 2)]
    result = result_of(wider, tmp_path)
    assert (result.done, result.planned, len(result.rows)) == (6, 6, 8)
    head, lines = columns(result.points)
    shown = [(line[head.index("lr")], line[head.index("runs")], line[head.index("confirms")]) for line in lines]
    assert ("2", "2", "best of an earlier search") in shown
    assert ("4", "2", "best of 4 points with 1 seed each") in shown
    assert best_points(result.points)[(), "LARS"].search == {"lr": 4.0}
    assert "6 of 6 runs done" in format_sweep(result)
    assert fill(wider, tmp_path, by_rate(4)) == []
    # Numbers follow from the plan alone, and each is one run.
    assert len({row.run for row in result.rows}) == 8


def test_a_search_that_failed_has_nothing_to_confirm(tmp_path):
    plan = parsed(SEARCHED)
    assert len(fill(plan, tmp_path, lambda run: None)) == 3
    assert progress(plan, points_of(of_plan(read_rows(tmp_path), plan.every_run))) == (3, 3)
    assert fill(plan, tmp_path, by_rate(1)) == []
    assert len(fill(plan, tmp_path, by_rate(1), retry_failed=True)) == 5


def test_failed_runs_are_made_again_once_in_search_and_confirmation(tmp_path):
    plan, values = parsed(SEARCHED), by_rate(1)
    fill(plan, tmp_path, lambda run: None if run.config.schedule.lr == 2 or run.seed == 2 else values(run))
    again = fill(plan, tmp_path, lambda run: None, retry_failed=True)
    assert lr_and_seed(again) == [(2, 0), (1, 2)]
    assert lr_and_seed(fill(plan, tmp_path, by_rate(2), retry_failed=True)) == [(2, 0), (1, 2)]


# --- by several commands


def test_a_part_waits_for_the_search_of_others_and_then_both_confirm(tmp_path):
    """Interleaved by hand: the first part is through with its own runs while the second one is at work."""
    plan = parsed(SEARCHED)
    first, second = (iter(MissingRuns(plan, tmp_path, part=(k, 2), retry_failed=False)) for k in (1, 2))

    def make(steps):
        run = next(steps)
        if run is not None:
            append_row(tmp_path, made(run, by_rate(1)(run)))
        return run and lr_and_seed([run])[0]

    assert make(second) == (1, 0)
    assert [make(first), make(first)] == [(0.5, 0), (2, 0)]
    assert make(first) == (1, 1), "complete: nobody has to end first"
    assert make(second) == (1, 2), "the other seed"
    assert [next(first, "end"), next(second, "end")] == ["end", "end"]


def test_a_part_waits_only_as_long_as_somebody_searches(tmp_path):
    plan = parsed(SEARCHED)
    steps = iter(MissingRuns(plan, tmp_path, part=(1, 2), retry_failed=False))
    with searching(tmp_path):
        for run in (next(steps), next(steps)):
            append_row(tmp_path, made(run, 0.5))
        assert [next(steps), next(steps)] == [None, None]
    assert next(steps, "end") == "end", "the second part never came"
    # Later, alone: what is left of the search, and all of the confirmation.
    assert lr_and_seed(fill(plan, tmp_path, by_rate(1), part=(2, 2))) == [(1, 0), (1, 1), (1, 2)]


def test_failures_that_others_make_again_are_waited_for(tmp_path):
    plan = parsed(SEARCHED)
    for row in rows_of(plan.runs, [0.5, None, 0.4]):
        append_row(tmp_path, row)
    steps = iter(MissingRuns(plan, tmp_path, part=(1, 2), retry_failed=True))
    with searching(tmp_path):
        assert next(steps) is None
        append_row(tmp_path, made(plan.runs[1], 0.9))
        assert lr_and_seed([next(steps)]) == [(1, 1)], "it is the best now"
    steps.close()


def _claim(folder):
    with claimed(folder, "0123456789ab") as free, claimed(folder, "0123456789ac") as other:
        return free, other


def test_a_run_is_claimed_by_one_process_and_free_when_that_ends(tmp_path):
    with ProcessPoolExecutor(1) as pool:
        with claimed(tmp_path, "0123456789ab") as free:
            assert free
            assert pool.submit(_claim, tmp_path).result() == (False, True)
        assert pool.submit(_claim, tmp_path).result() == (True, True)


def test_who_searches_is_seen_by_others(tmp_path):
    assert not others_search(tmp_path)
    with searching(tmp_path), searching(tmp_path):
        assert others_search(tmp_path)
    assert not others_search(tmp_path)


# --- table and report


@pytest.fixture
def points(tmp_path):
    plan = parsed(PLAN)
    fill(plan, tmp_path, by_rate(1))
    return points_of(of_plan(read_rows(tmp_path), plan.every_run))


def test_a_confirmed_point_has_the_mean_of_its_fresh_seeds_alone(points):
    here = [point for point in points if point.place == ((("global_batch", "32"),), "LARS")]
    assert [(point.search["lr"], point.top1.n, point.confirms is not None) for point in here] == [
        (0.5, 1, False),
        (1.0, 1, False),
        (2.0, 1, False),
        (1.0, 3, True),
    ]
    assert here[-1].top1.mean == pytest.approx(0.9 - 0.002)
    assert here[-1].top1.deviation == pytest.approx(0.001)
    assert best_points(points)[here[-1].place] is here[-1]
    assert here[-1].to_dict()["confirms"] == {"points": 3, "fewest_seeds": 1, "most_seeds": 1, "stands": True}
    alone = best_points(points)[(("global_batch", "32"),), "SGD"]
    assert (alone.top1.n, alone.confirms) == (4, None), "nothing was chosen, so every seed counts"


def test_charts_show_the_search_by_its_own_seeds_and_the_arms_by_fresh_ones(points):
    for chart in search_charts(points):
        assert chart.lines[0].y[1] == pytest.approx(0.9)
    compared = comparison_chart(points)
    assert compared is not None
    assert {line.label: line.y for line in compared.lines}["LARS"] == pytest.approx([0.898, 0.898])
    seeds = seeds_chart(points)
    assert seeds is not None
    assert [len(line.y) for line in seeds.lines] == [3, 3, 4, 4]


def test_the_report_says_what_was_searched_and_which_runs_confirm(points):
    plan = parsed(PLAN)
    page = render_sweep(plan, points)
    assert f"{plan.count} of {plan.count} runs" in page
    assert "lr 1, 3 fresh seeds" in page
    assert "best of 4 points with 1 seed each" in page
    assert "had no part in the selection" in page
    assert page.count("LARS, global batch 32, lr 1, confirms") == 3
    without = render_sweep(plan, [point for point in points if point.confirms is None])
    assert "confirms" not in without
    assert "is biased upwards" in without
