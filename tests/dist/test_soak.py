"""A handful of the soak's faults: runs go on by themselves and end with the bits of an undisturbed run."""

from __future__ import annotations

import random

import pytest
from injector import Fault

from benchmarks.soak import plans, same, summary, table, train

OPTIONS = {"nproc": 2, "by_rank": False, "arguments": ["--device", "cpu", "--epochs", "3", "--decay-epochs", "3"]}
FAULTS = [
    Fault("kill in set-up", 1, 0, 0.3),
    Fault("kill", 1, 15, 0.6),
    Fault("flipped checkpoint", 0, 34, 0.4),
    Fault("preempt", 0, 42, 0.1),
]


def test_a_run_that_is_hit_again_and_again_ends_as_if_nothing_had_happened(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "hit").mkdir()
    _, wanted = train(tmp_path / "plain", [], **OPTIONS)
    run, found = train(tmp_path / "hit", FAULTS, **OPTIONS)
    assert run["made"] == len(FAULTS)
    assert same(found, wanted)
    assert run["left_processes"] == 0
    assert run["left_files"] == []
    rows = {row["kind"]: row for row in run["faults"]}
    assert rows["preempt"]["lost_steps"] == 0
    assert 0 < rows["kill"]["lost_steps"] <= 10, "checkpoints are 10 steps apart"


def test_every_kind_comes_before_one_comes_again():
    kinds = ["kill", "exit", "full disk", "kill in set-up"]
    drawn = list(plans(10, 5, 2, kinds, random.Random(3)))
    assert [len(faults) for faults in drawn] == [5, 5]
    assert {fault.kind for fault in drawn[0]} == set(kinds)
    for faults in drawn:
        steps = [fault.step for fault in faults]
        assert steps == sorted(set(steps))
        ends_nothing = [fault.kind == "full disk" for fault in faults]
        assert ends_nothing == sorted(ends_nothing), "set-up is hit after a fault that ends an attempt"


@pytest.mark.parametrize("stop_s", [1.5, None])
def test_the_table_has_medians_and_the_longest(stop_s):
    rows = [
        {"kind": "kill", "stop_s": stop_s, "again_s": s, "lost_steps": 3, "bit_equal": True} for s in (2.0, 4.0, 9.0)
    ]
    kinds = summary(rows)
    assert kinds["kill"]["again_s"] == [4.0, 9.0]
    stop = "no stop" if stop_s is None else "1.5 (1.5) s"
    assert table({"kinds": kinds}).splitlines()[-1] == f"| kill | 3 | {stop} | 4.0 (9.0) s | 3 (3) | 3 of 3 |"
