"""A handful of the soak's faults: runs go on by themselves and end with the bits of an undisturbed run."""

from __future__ import annotations

import json
import random

import pytest
import torch
from injector import Fault
from toy import same_bits

from benchmarks import soak, soak_runs
from benchmarks.soak import plans, summary, table
from benchmarks.soak_runs import small_disk, train

OPTIONS = {"nproc": 2, "by_rank": False, "arguments": ["--device", "cpu", "--epochs", "3", "--decay-epochs", "3"]}
FAULTS = [
    Fault("kill in set-up", 1, 0, 0.3),
    Fault("full disk", 0, 14, 0.0),  # until step 29: ranks are started again meanwhile
    Fault("kill", 1, 15, 0.6),
    Fault("flipped checkpoint", 0, 34, 0.4),
    Fault("preempt", 0, 42, 0.1),
]


def test_a_run_that_is_hit_again_and_again_ends_as_if_nothing_had_happened(tmp_path):
    with small_disk(tmp_path / "probe") as can_fill:
        faults = [fault for fault in FAULTS if can_fill or fault.kind != "full disk"]
    _, wanted = train(tmp_path / "plain", [], **OPTIONS)
    run, found = train(tmp_path / "hit", faults, **OPTIONS)
    assert run["made"] == len(faults)
    assert same_bits(found, wanted)
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


class Clock:
    """Instead of time."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


def played(clock, ends):
    """Instead of a run, which takes half a minute. ends: how the run in a folder of that name ends, if not well."""

    def train(folder, faults, *, deadline, **_):
        clock.now_s += 30
        if clock.now_s > deadline:
            raise soak_runs.OutOfTime
        rows = [{"kind": fault.kind, "stop_s": 1.0, "again_s": 2.0, "lost_steps": 0} for fault in faults]
        result = {"faults": rows, "planned": len(faults), "made": len(faults), "attempts": 1, "left_processes": 0}
        if ends.get(folder.name) == "lost":
            return result | {"error": "not at its end", "made": 0, "faults": []}, {}
        return result, {"weight": torch.full((2,), 2.0 if ends.get(folder.name) == "different" else 1.0)}

    return train


@pytest.fixture
def soaked(tmp_path, monkeypatch, capsys):
    """A soak of played runs: its exit code and what it prints."""

    def call(*words, ends=()):
        clock = Clock()
        monkeypatch.setattr(soak, "time", clock)
        monkeypatch.setattr(soak, "train", played(clock, dict(ends)))
        code = soak.main(["--out", str(tmp_path / "soak.json"), *words])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_a_soak_that_is_called_again_does_what_is_left(soaked):
    code, first = soaked("--faults", "10")
    assert (code, first["faults"], [run["number"] for run in first["runs"]]) == (0, 10, [0, 1])
    # A run that is lost or differs is told, kept, and stops nothing.
    ends = {"run0": "lost", "run2": "different", "run3": "lost"}  # run 0 is not done again
    code, second = soaked("--faults", "22", "--jobs", "3", ends=ends)
    assert code == 1
    assert [run["number"] for run in second["runs"]] == [0, 1, 2, 3, 4]
    assert second["rows"][:10] == first["rows"]
    assert (second["faults"], second["lost"]) == (10 + 5 + 0 + 2, 2)
    assert second["runs"][3]["error"] == "not at its end"
    with pytest.raises(SystemExit, match="is a soak with another seed"):
        soaked("--seed", "4")


@pytest.mark.parametrize(("minutes", "faults"), [(2.0, 15), (1.9, 10), (0.8, 0)])
def test_a_soak_ends_in_time(soaked, minutes, faults):
    """The undisturbed run comes first. One that would take too long is not begun, or not counted."""
    code, found = soaked("--faults", "30", "--minutes", str(minutes))
    assert (code, found["faults"], found["lost"]) == (0, faults, 0)


def test_a_run_that_gets_stuck_is_lost_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(soak_runs, "LIMIT_S", 0.0)
    run, found = train(tmp_path / "stuck", FAULTS, **OPTIONS)
    assert run["error"].startswith("nothing has happened for 0 s")
    assert (run["made"], run["left_processes"], found) == (0, 0, {})
