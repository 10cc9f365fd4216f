"""`benchmarks.shared_gpu` fills a sweep's folder from ranks in one process group; here they talk through gloo."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shared_gpu import sweep_ranks
from hyperbatch.sweep.rows import read_rows

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
