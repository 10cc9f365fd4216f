"""Plans that wait for a GPU: each expands to the runs that its first line states, and every arm takes a step here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hyperbatch.config import BatchPhase, SizePhase
from hyperbatch.engine.session import Session
from hyperbatch.sweep.plan import load_plan

ROOT = Path(__file__).parents[2]
WAITING = sorted((ROOT / "benchmarks" / "plans").glob("*.toml"))
ALL = [*WAITING, *sorted((ROOT / "records").glob("*/plan.toml"))]
# A whitening network cannot be exchanged for a small one; tests/dist/test_speedrun.py trains those.
EXCHANGEABLE = [path for path in WAITING if not load_plan(path).runs[0].config.model.whiten_samples]


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_plans_can_be_read(path):
    plan = load_plan(path)
    assert plan.about, "a record begins with what it is to show"
    assert path.parent.name.endswith(f"_{plan.name}") or path.stem == plan.name


@pytest.mark.parametrize("path", WAITING, ids=lambda path: path.stem)
def test_a_plan_states_its_runs_and_its_cost(path):
    comment = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    stated = re.match(r"(\d+) runs(?: that search and (\d+) that confirm)?\. (One H200|Two CPU cores)", comment)
    assert stated is not None
    plan = load_plan(path)
    assert (int(stated[1]), int(stated[2] or 0)) == (len(plan.runs), plan.count - len(plan.runs))
    cost = r"[\d,]+ s( in all| and|,|\.|;| with )" if stated[3] == "One H200" else r"\d+ minutes"
    assert re.search(cost, comment), "seconds of a GPU, or minutes of a CPU"


@pytest.mark.parametrize("path", EXCHANGEABLE, ids=lambda path: path.stem)
def test_every_arm_takes_a_step_of_a_small_network(path):
    """In fp32 on one CPU rank, on four small images; the rest of the config is the arm's own."""
    arms = {run.point.arm: run.config for run in load_plan(path).runs}
    with Session() as session:
        for arm, config in arms.items():
            small = config.override(
                model="resnet8",
                dataset="synthetic",
                train_samples=8,
                eval_samples=2,
                batch_phases=(BatchPhase(0, 4),),
                image_size=8,
                size_phases=tuple(SizePhase(epoch, size // 8) for epoch, size in config.data.size_phases),
                precision="fp32",
                device="cpu",
                nproc=1,
                bn_group_ranks=1,
                max_steps=1,
                final_eval=False,
            )
            assert session.run(small).result.steps == 1, arm
