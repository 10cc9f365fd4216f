"""`benchmarks.shared_gpu` fills a sweep's folder from ranks in one process group; here they talk through gloo."""

from __future__ import annotations

import pytest
import torch

from benchmarks import shared_gpu
from benchmarks.shared_gpu import sweep_ranks
from hyperbatch.sweep.plan import load_plan
from hyperbatch.sweep.rows import Row, append_row, read_rows

PLAN = """
name = "few"
recipe = "digits"
seeds = 2
[fixed]
batch_phases = "0:64"
max_steps = 2
warmup_epochs = 0
device = "cpu"
[grid]
nproc = [2]
[[arms]]
name = "per rank"
[[arms]]
name = "grouped"
bn_group_ranks = 2
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL's own runs are in tests/gpu")
def test_ranks_train_the_runs_of_a_plan_in_turn(tmp_path, capfd):
    plan, folder = tmp_path / "few.toml", tmp_path / "out"
    plan.write_text(PLAN)
    assert "no run has ended yet" in sweep_ranks(plan, folder, until_s=0)
    table = sweep_ranks(plan, folder)
    rows = read_rows(folder)
    assert [(row.arm, row.seed) for row in rows] == [(arm, seed) for arm in ("per rank", "grouped") for seed in (0, 1)]
    assert all(row.error is None and row.result["steps"] == 2 for row in rows)
    assert len({row.result["top1"] for row in rows}) > 1
    assert "4 of 4 runs done" in table
    before = (folder / "rows.jsonl").read_text()
    sweep_ranks(plan, folder)
    assert (folder / "rows.jsonl").read_text() == before, "what is there is not made again"
    assert (folder / "report.html").exists()
    assert (folder / "environment.json").exists()


def test_a_search_is_confirmed_once_its_rows_are_there(tmp_path, monkeypatch):
    """Ranks that invent their results: which runs are they asked for?"""
    plan, folder, asked = tmp_path / "few.toml", tmp_path / "out", []
    plan.write_text(PLAN.replace("seeds = 2", "confirm = 2").partition("[[arms]]")[0] + "[[arms]]\ngrid.lr = [0.5, 1]")
    runs = {run.number: run for run in load_plan(plan).every_run}

    def spawn(_main, args, nprocs):
        assert nprocs == 2
        asked.append(args[5])
        for run in map(runs.get, args[5]):
            result = {"top1": run.config.schedule.lr / 2}
            place = {"seed": run.seed, "digest": run.digest, "recipe": "digits"}
            append_row(folder, Row(run=run.number, arm="arm 1", result=result, **place))

    monkeypatch.setattr(shared_gpu.processes, "spawn", spawn)
    assert "4 of 4 runs done" in sweep_ranks(plan, folder)
    assert asked == [[1, 2], [5, 6]]
    sweep_ranks(plan, folder)
    assert len(asked) == 2
