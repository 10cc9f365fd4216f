"""docs/evidence.md is what the records say, and every record can be read and continued."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml

import pytest

from benchmarks import evidence
from hyperbatch.sweep.rows import Row, append_row, read_rows

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
    for row in rows:
        assert row.digest
        assert row.commit
        assert row.command.startswith(f"hyperbatch train {row.recipe} ")
        assert (row.error is None) == (row.top1 is not None)
    assert json.loads((folder / "environment.json").read_text())


def test_a_row_of_a_later_run_is_on_the_page(tmp_path):
    folder = tmp_path / "records" / "2030-01-01_new"
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text('recipe = "digits"\nabout = "Newer."\n[grid]\nlr = [0.5, 1.0]\n')
    (folder / "environment.json").write_text('[{"device": "chip", "torch": "3"}]')
    for lr, top1, error in ((0.5, 0.25, None), (1.0, None, "the loss became nan")):
        place = {"conditions": {"lr": lr}, "digest": str(lr), "error": error, "result": {"top1": top1, "train_s": 2.5}}
        append_row(folder, Row(run=1, arm="plan", seed=0, recipe="digits", commit="abc", **place))
    files = evidence.write_all(tmp_path)
    page = files[tmp_path / "docs" / "evidence.md"]
    assert "2 runs of `digits`, 1 of them failed. Made on chip, torch 3, commit abc." in page
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
    assert "75.00 % ± 63.53 % (lr 2) | every run failed |" in page
    assert "| lars | 2 | 1 | 60.00 % |" in page
    assert "| lars | 1 | 1 | 99.00 % | – | – | 2 s | best of an earlier search |" in page
    assert "7 runs of `digits`, 2 of them failed; 1 of the plan are still to be made." in page
    assert "had no part in the selection" in page
