"""docs/evidence.md is what the records say, and every record can be read and continued."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml

import pytest

from benchmarks import evidence
from benchmarks.questions import FILE, MISSED, OPEN, SHOWN, Figure, find_point, judge, read_questions
from hyperbatch.recipes import all_recipes
from hyperbatch.sweep.plan import load_plan
from hyperbatch.sweep.rows import Row, append_row, read_rows
from hyperbatch.sweep.table import columns, points_of

RECORDS = sorted(path.parent for path in (evidence.ROOT / "records").glob("*/rows.jsonl"))


def test_the_page_pictures_and_reports_are_up_to_date():
    stale = [
        str(path.relative_to(evidence.ROOT))
        for path, text in evidence.write_all().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run python -m benchmarks.evidence"


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_record_is_whole(folder):
    assert {"plan.toml", "rows.jsonl", "environment.json", "report.html", "README.md"} <= {
        p.name for p in folder.iterdir()
    }
    rows = read_rows(folder)
    assert len(rows) == len((folder / "rows.jsonl").read_text().splitlines()), "no torn line"
    planned = {run.digest for run in load_plan(folder / "plan.toml").every_run}
    for row in rows:
        assert row.digest in planned, "if a recipe has changed, the plan must state what it was"
        assert row.commit
        assert row.command.startswith(f"hyperbatch train {row.recipe} ")
        assert (row.error is None) == (row.top1 is not None)
    assert json.loads((folder / "environment.json").read_text())


def test_a_row_of_a_later_run_is_on_the_page(tmp_path):
    folder = tmp_path / "records" / "2030-01-01_new"
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text('recipe = "digits"\nabout = "Newer."\n[grid]\nlr = [0.5, 0.7, 1.0]\n')
    (folder / "environment.json").write_text('[{"device": "chip", "torch": "3"}]')
    for lr, top1, error in ((0.5, 0.25, None), (0.7, 0.5, None), (1.0, None, "the loss became nan")):
        place = {"conditions": {"lr": lr}, "digest": str(lr), "error": error, "result": {"top1": top1, "train_s": 2.5}}
        append_row(folder, Row(run=1, arm="plan", seed=0, recipe="digits", commit="abc", **place))
    files = evidence.write_all(tmp_path)
    page = files[tmp_path / "docs" / "evidence.md"]
    assert "3 runs of `digits`, 1 of them failed. Device: chip, torch 3, commit abc." in page
    assert "| plan | 0.5 | 1 | 25.00 % |" in page
    assert "| plan | 1 | 0 + 1 failed |" in page
    xml.fromstring(files[tmp_path / "docs" / "pictures" / "evidence_2030-01-01_new.svg"])
    assert "the loss became nan" in files[folder / "report.html"]


def test_a_confirmed_search_is_shown_with_its_fresh_seeds(tmp_path):
    folder = tmp_path / "records" / "2030-01-01_new"
    folder.mkdir(parents=True)
    arms = "".join(f'[[arms]]\nname = "{arm}"\noptimizer = "{arm}"\ngrid.lr = [1, 2]\n' for arm in ("lars", "sgd"))
    (folder / "plan.toml").write_text(f'recipe = "digits"\nconfirm = 3\n{arms}')
    (folder / "environment.json").write_text('[{"device": "chip", "torch": "3"}]')
    # The rate of 1 was alone at first, so that its second seed was an ordinary run.
    made = [(1, 0, 0.5, False), (1, 1, 0.99, False), (2, 0, 0.6, False), (2, 1, 0.7, True), (2, 2, 0.8, True)]
    for lr, seed, top1, fresh in made:
        place = {"arm": "lars", "search": {"lr": lr}, "seed": seed, "confirms": fresh, "digest": f"{lr} {seed}"}
        append_row(folder, Row(run=1, recipe="digits", commit="abc", result={"top1": top1, "train_s": 2}, **place))
    for lr in (1, 2):
        place = {"arm": "sgd", "search": {"lr": lr}, "seed": 0, "digest": f"sgd {lr}", "error": "diverged"}
        append_row(folder, Row(run=1, recipe="digits", commit="abc", **place))
    page = evidence.write_all(tmp_path)[tmp_path / "docs" / "evidence.md"]
    assert "75.00 % ± 63.53 % (n = 2, learning rate 2) | every run failed |" in page
    assert "| lars | 2 | 1 | 60.00 % |" in page
    assert "| lars | 1 | 1 | 99.00 % | – | – | 2 s | best of an earlier search |" in page
    assert "7 runs of `digits`, 2 of them failed; 1 run of the plan is missing." in page
    assert "had no part in the selection" in page


def written(tmp_path, plan, rows):
    """A record with these rows, which are (search, seed, top-1, confirms)."""
    folder = tmp_path / "records" / "2030-01-01_new"
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(plan)
    (folder / "environment.json").write_text('[{"device": "chip", "torch": "3"}]')
    for search, seed, top1, fresh in rows:
        place = {
            "arm": "plan",
            "search": search,
            "seed": seed,
            "confirms": fresh,
            "digest": f"{len(read_rows(folder))}",
        }
        append_row(folder, Row(run=1, recipe="digits", commit="abc", result={"top1": top1, "train_s": 2}, **place))
    return folder


def test_the_first_of_equal_points_is_that_of_the_plan(tmp_path):
    """Processes side by side wrote the second one first; the sweep confirmed the first."""
    one, two = {"lr": 0.5}, {"lr": 0.7}
    plan = 'recipe = "digits"\nconfirm = 2\n[[arms]]\nname = "plan"\ngrid.lr = [0.5, 0.7]\n'
    rows = [(two, 0, 0.9, False), (one, 0, 0.9, False), (one, 1, 0.7, True), (one, 2, 0.8, True)]
    record = evidence.load_record(written(tmp_path, plan, rows))
    assert find_point(record.points, "plan", None).top1.mean == pytest.approx(0.75)
    assert "best of an earlier search" not in evidence.write_all(tmp_path)[record.folder / "points.md"]


def test_two_configs_of_one_point_are_not_one_mean(tmp_path):
    """The recipe changed after the first run, and the sweep was continued."""
    folder = written(tmp_path, 'recipe = "digits"\nseeds = 1\n', [({}, 0, 0.9, False), ({}, 0, 0.5, False)])
    with pytest.raises(ValueError, match=r"plan, seed 0, is there with two configs \(0 and 1\)"):
        evidence.load_record(folder)


def test_a_failure_that_was_repaired_is_told(tmp_path):
    """--retry-failed: the later row of the run counts."""
    folder = written(tmp_path, 'recipe = "digits"\nseeds = 2\n', [({}, 0, 0.9, False)])
    place = {"arm": "plan", "seed": 1, "digest": "b", "recipe": "digits", "commit": "abc"}
    append_row(folder, Row(run=2, error="the loss became nan", **place))
    append_row(folder, Row(run=2, result={"top1": 0.8, "train_s": 2}, **place))
    page = evidence.write_all(tmp_path)[tmp_path / "docs" / "evidence.md"]
    assert "2 runs of `digits`; 1 run failed at first and was made again. Device" in page


def test_a_long_table_has_a_page_of_its_own_with_what_failed(tmp_path):
    folder = tmp_path / "records" / "2030-01-01_new"
    folder.mkdir(parents=True)
    rates = [i + 1 for i in range(evidence.SHORT + 1)]
    arms = "".join(f'[[arms]]\nname = "{arm}"\noptimizer = "{arm}"\ngrid.lr = {rates}\n' for arm in ("lars", "sgd"))
    (folder / "plan.toml").write_text(f'recipe = "digits"\n{arms}')
    (folder / "environment.json").write_text('[{"device": "chip", "torch": "3"}]')
    for lr in rates:
        place = {"arm": "lars", "search": {"lr": lr}, "seed": 0, "digest": str(lr)}
        failure = {"error": "the loss became nan"} if lr == rates[-1] else {"result": {"top1": lr / 100, "train_s": 2}}
        append_row(folder, Row(run=lr, recipe="digits", commit="abc", **place, **failure))
    files = evidence.write_all(tmp_path)
    page, points = files[tmp_path / "docs" / "evidence.md"], files[folder / "points.md"]
    assert f"[{evidence.POINTS}](../records/2030-01-01_new/points.md)" in page
    assert "| lars | 1 | 1 | 1.00 % |" not in page
    assert all(f"| lars | {lr} | 1 | {lr}.00 % |" in points for lr in rates[:-1])
    assert "| 9 | lars, lr 9 | 0 | the loss became nan |" in points
    place = {"arm": "sgd", "search": {"lr": 1}, "seed": 0, "digest": "sgd", "result": {"top1": 0.5, "train_s": 2}}
    append_row(folder, Row(run=10, recipe="digits", commit="abc", **place))
    page = evidence.write_all(tmp_path)[tmp_path / "docs" / "evidence.md"]
    assert "| 8.00 % (n = 1, learning rate 8, not confirmed) | 50.00 % (n = 1, learning rate 1) |" in page


# --- the claims at the beginning of the page


def test_what_questions_name_is_there():
    for question in read_questions(evidence.ROOT / "records" / FILE):
        assert question.record is None or (evidence.ROOT / "records" / question.record) in RECORDS
        assert question.plan is None or (evidence.ROOT / question.plan).exists()
        if question.quote is not None:
            assert question.quote in " ".join((evidence.ROOT / str(question.file)).read_text().split())
        assert not re.search(r"\d ?(%|points?\b|s\b)", question.answer), "figures come from the rows"


def test_the_summary_names_every_claim_once():
    page = (evidence.ROOT / "docs" / "evidence.md").read_text()
    summary = page.partition("\n## Claims and answers\n")[2].partition("\n| claim |")[0]
    for question in read_questions(evidence.ROOT / "records" / FILE):
        assert summary.count(f"{question.short};") + summary.count(f"{question.short}.") == 1, question.short


def test_a_claim_of_our_own_has_an_answer():
    page = (evidence.ROOT / "docs" / "evidence.md").read_text()
    answers = page.partition("\n## Claims and answers\n")[2].partition("\n## ")[0]
    assert page.index("## Claims and answers") < 500, "on the first screen"
    for name, recipe in all_recipes().items():
        if recipe.record or not recipe.published:
            assert f"| `{name}`" in answers
    assert all(f"**{verdict}**" in answers for verdict in (SHOWN, MISSED, OPEN))


def points(**arms):
    """Of accuracies in percent, by seed."""
    return some(**{arm: [(top1, None) for top1 in accuracies] for arm, accuracies in arms.items()})


@pytest.mark.parametrize(
    ("bound", "verdict"),
    [
        ({"at_least": 0.87}, SHOWN),
        ({"at_least": 0.89}, OPEN),
        ({"at_least": 0.91}, OPEN),
        ({"at_least": 0.93}, MISSED),
        ({"at_most": 0.93}, SHOWN),
        ({"at_most": 0.90}, OPEN),
        ({"at_most": 0.87}, MISSED),
        ({"each": True, "at_least": 0.89}, SHOWN),
        ({"each": True, "at_least": 0.90}, MISSED),
    ],
)
def test_the_interval_decides(bound, verdict):
    """Of 89, 90 and 91 the mean is 90, the deviation 1, and Student's t 4.303: 90 ± 2.48."""
    text, found = judge(Figure(**bound), points(a=[89, 90, 91]))
    assert found == verdict
    assert text == ("89.00 % to 91.00 % (n = 3)" if "each" in bound else "90.00 % ± 2.48 % (n = 3)")


def test_one_run_decides_nothing():
    assert judge(Figure(at_least=0.5), points(a=[90])) == ("90.00 % (n = 1)", OPEN)


def some(**arms):
    """(top-1 in percent or None for a failed run, time to the target or None) of each run."""
    return points_of(
        Row(
            run=1,
            arm=arm,
            seed=seed,
            digest=f"{arm}{seed}",
            recipe="digits",
            result={} if top1 is None else {"top1": top1 / 100, "time_to_target_s": seconds},
            error="the loss became nan" if top1 is None else None,
        )
        for arm, runs in arms.items()
        for seed, (top1, seconds) in enumerate(runs)
    )


def test_each_run_counts_also_one_without_a_value():
    fast = Figure(each=True, measure="time_to_target_s", at_most=10)
    assert judge(fast, some(a=[(99, 4), (98, 5)])) == ("4.0 s to 5.0 s (n = 2)", SHOWN)
    assert judge(fast, some(a=[(99, 4), (98, None)])) == ("4.0 s to 4.0 s (n = 1 of 2)", MISSED)
    accurate = Figure(each=True, at_least=0.9)
    assert judge(accurate, some(a=[(99, 4), (None, None)])) == ("99.00 % to 99.00 % (n = 1, 1 failed)", MISSED)


def test_a_difference_says_how_many_runs_failed():
    both = some(a=[(91, 1), (None, None)], b=[(90, 1), (None, None)])
    assert (
        judge(Figure(arm="a", against={"arm": "b"}, at_least=0), both)[0]
        == "a minus b: +1.00 points (1 pair, 2 failed)"
    )
    both = some(a=[(91, 1), (93, 1), (None, None)], b=[(90, 1), (90, 1), (90, 1)])
    assert "(n = 2 and 3, 1 failed)" in judge(Figure(arm="a", against={"arm": "b"}, at_least=0), both)[0]


def test_a_time_to_the_target_says_of_how_many_runs_it_is():
    head, rows = columns(some(a=[(99, 4), (99, 6), (98, None)], b=[(99, 4), (99, 6), (None, None)], c=[(98, None)]))
    assert [row[head.index("to target")].partition("(")[2] for row in rows] == ["2 of 3 runs)", "", ""]


def test_differences_are_by_pairs_where_seeds_are_the_same():
    """1, 2 and 3 points: 2 ± 4.303 / sqrt(3)."""
    both = points(a=[91, 72, 53], b=[90, 70, 50])
    figure = Figure(arm="a", against={"arm": "b"}, at_least=-0.01)
    assert judge(figure, both) == ("a minus b: +2.00 ± 2.48 points (3 pairs)", SHOWN)
    assert judge(Figure(arm="a", against={"arm": "b"}, at_least=0.0), both)[1] == OPEN
    assert judge(Figure(arm="b", against={"arm": "a"}, at_least=0.05), both)[1] == MISSED
    for margin, verdict in ((0.05, SHOWN), (0.04, OPEN)):
        assert judge(Figure(arm="a", against={"arm": "b"}, within=margin), both)[1] == verdict
    far = points(a=[91, 92, 93], b=[80, 81, 82])
    assert judge(Figure(arm="a", against={"arm": "b"}, within=0.05), far) == (
        "a minus b: +11.00 ± 0.00 points (3 pairs)",
        MISSED,
    )


def test_conditions_are_in_the_words_of_the_field():
    rows = [
        Row(run=1, arm=arm, seed=0, digest=f"{arm}{where}", recipe="digits", conditions=where, result={"top1": 0.5})
        for arm in ("LARS", "SGD")
        for where in ({"batch_phases": "0:1433"}, {"nproc": 1}, {"nproc": 4})
    ]
    both = points_of(rows)
    found = judge(Figure(arm="LARS", when={"batch_phases": "0:1433"}, against={"arm": "SGD"}, at_least=0), both)
    assert found[0] == "LARS minus SGD, batch 1,433: +0.00 points (1 pair)"
    found = judge(Figure(arm="LARS", when={"nproc": 4}, against={"when": {"nproc": 1}}, at_least=0), both)
    assert found[0] == "LARS, 4 ranks minus 1 rank: +0.00 points (1 pair)"


def test_differences_of_other_seeds_are_by_welch():
    """Variances of 1 and 5/3 over 3 and 4 runs: 1/3 + 5/12, 4.96 degrees, of which 4 are taken: t = 2.776."""
    text, _ = judge(Figure(arm="a", against={"arm": "b"}, at_least=0.0), points(a=[89, 90, 91], b=[80, 81, 82, 83]))
    assert text == "a minus b: +8.50 ± 2.40 points (n = 3 and 4)"


def test_a_figure_must_be_of_one_point():
    with pytest.raises(ValueError, match="2 points are of arm None"):
        find_point(points(a=[1], b=[2]), None, None)
    with pytest.raises(ValueError, match="a figure has one of at_least, at_most, within"):
        judge(Figure(), points(a=[1, 2]))
