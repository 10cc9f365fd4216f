"""What verbs print for people: tables whose numbers have a unit, and benches that say which direction is better."""

from __future__ import annotations

import json
import re

import pytest

from hyperbatch.bench.harness import Candidate, format_table, rows
from hyperbatch.cli import main
from hyperbatch.comm.doctor import CollectiveCheck
from hyperbatch.data.pack import DataInfo, PackReport, SplitInfo
from hyperbatch.data.texts import format_info, format_pack, format_verify
from hyperbatch.data.verify import VerifyReport
from hyperbatch.engine.doctor import Check, Diagnosis, format_doctor
from hyperbatch.tables import text_table


def cells(line):
    return re.split(r"\s{2,}", line.strip())


def test_words_start_and_numbers_end_below_each_other():
    assert text_table(("name", "MB", "s"), [("a", "1.5", 10), ("longer", "20.25", None)]) == [
        "name       MB   s",
        "a         1.5  10",
        "longer  20.25   -",
    ]
    assert text_table(("a", "b"), []) == ["a  b"]


def test_a_data_set_is_a_row_for_each_split():
    train = SplitInfo(samples=12_000, bytes=1_500_000_000, mean_bytes=125_000.0, samples_per_class=(900, 1300))
    val = SplitInfo(
        samples=500,
        bytes=62_000_000,
        mean_bytes=124_000.0,
        samples_per_class=(50, 50),
        median_width=500,
        median_height=375,
        unreadable=2,
    )
    names = [f"class{i}" for i in range(12)]
    lines = format_info(
        DataInfo(kind="folder", classes=12, class_names=names, splits={"train": train, "val": val})
    ).splitlines()
    assert lines[0] == f"folder, 12 classes: {', '.join(names[:10])}, ..."
    assert cells(lines[2])[:4] == ["split", "images", "MB", "kB per image"]
    assert cells(lines[3]) == ["train", "12,000", "1,500.0", "125.0", "900", "1,300", "-", "-", "-"]
    assert cells(lines[4]) == ["val", "500", "62.0", "124.0", "50", "50", "500", "375", "2"]
    unread = format_info(DataInfo(kind="folder", classes=12, class_names=names, splits={"train": train})).splitlines()
    assert cells(unread[2])[-1] == "largest class", "a column of which nothing is known is left out"
    assert cells(unread[3])[-1] == "1,300"


def test_verification_says_ok_or_what_is_wrong():
    good = VerifyReport(ok=True, samples=1, bytes=2_000_000, problem_count=0, problems=[], notes=["an old set"])
    assert format_verify(good) == "ok: 1 sample, 2.0 MB, no problem found\nnote: an old set"
    bad = VerifyReport(ok=False, samples=9, bytes=500_000, problem_count=3, problems=["a", "b"], notes=[])
    assert format_verify(bad).splitlines() == ["NOT ok: 3 problems in 9 samples, 0.5 MB", "  a", "  b", "  and 1 more"]


def test_packing_is_told_in_sentences():
    plain = PackReport(resumed_shards=0, samples=10, bytes=1_000_000, shards=1, unreadable=0, skipped=0)
    assert format_pack(plain) == "packed 10 samples, 1.0 MB, in 1 shard"
    full = PackReport(
        resumed_shards=1, samples=10, bytes=1, shards=2, unreadable=1, skipped=3, skipped_list="/x/skipped.txt"
    )
    lines = format_pack(full).splitlines()
    assert lines[1] == "  1 shard had been written before"
    assert lines[3] == "warning: 3 samples left out; they are listed in /x/skipped.txt"


def test_doctor_is_a_table():
    checks = (Check("python", True, "3.12"), Check("network", False, "no route"))
    lines = format_doctor(Diagnosis(checks=checks, collectives=())).splitlines()
    assert [line.split() for line in lines] == [
        ["check", "found"],
        ["ok", "python", "3.12"],
        ["NO", "network", "no", "route"],
    ]
    sizes = {"bytes": 8 << 20, "median": 0.0075, "p20": 0.007, "p80": 0.008, "gb_per_s": 1.125}
    torus = CollectiveCheck(name="", algorithm="torus", grid="2x1", dtype="float32", correct=False, **sizes)
    lines = format_doctor(Diagnosis(checks=checks, collectives=(torus,))).splitlines()
    assert cells(lines[-2]) == ["all-reduce", "grid", "dtype", "result", "MB", "median ms", "GB/s"]
    assert cells(lines[-1]) == ["torus", "2x1", "float32", "WRONG", "8.389", "7.50", "1.12"]


@pytest.mark.parametrize(("higher", "word"), [(True, "higher"), (False, "lower")])
def test_a_bench_says_which_direction_is_better(higher, word):
    candidates = [Candidate(name=name, run=lambda: None, peer=name == "theirs") for name in ("ours", "theirs")]
    samples = {"ours": [22222.0, 22222.0], "theirs": [11111.0, 11111.0]}
    table = rows(candidates, samples, unit="images/s", higher_is_better=higher)
    assert [row["better"] for row in table] == [word, word]
    other = rows(candidates[:1], samples, unit="ms")
    text = format_table({"bench": "x", "device": "CPU", "commit": None, "rows": table + other})
    lines = text.splitlines()
    assert cells(lines[2]) == [
        f"images/s, {word} is better",
        "median images/s",
        "p20 images/s",
        "p80 images/s",
        "ratio to best peer",
    ]
    assert cells(lines[3]) == ["ours", "22,222", "22,222", "22,222", "2.000"]
    assert lines[6].startswith("ms, lower is better")
    assert cells(lines[7]) == ["ours", "22,222", "22,222", "22,222", "-"]


def test_each_simulated_time_has_a_fitting_unit(capsys):
    command = ["simulate", "resnet50", "--cluster", "dgx_a100", "--gpus", "1,8,8192"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    titles, body = cells(lines[2]), [cells(line) for line in lines[3:6]]
    assert titles[-5:] == ["to target", "low", "high", "at best", "kWh"]
    assert all(len(row) == len(titles) for row in body)
    assert all(re.fullmatch(r"[\d.,]+( ms| s| min| h)?|\d+x\d+|[a-z]+", cell) for row in body for cell in row)
    assert main([*command, "--json"]) == 0
    slow, mid, fast = (point["time_to_target_s"]["mid"] for point in json.loads(capsys.readouterr().out)["points"])
    place = titles.index("to target")
    assert [row[place] for row in body] == [f"{slow / 3600:.1f} h", f"{mid / 60:.1f} min", f"{fast:.1f} s"]
