"""`simulate`: the fixed shape, physical bounds, scaling laws, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from hyperbatch.config import BatchPhase, CommConfig, Config, OptimConfig, ScheduleConfig, SizePhase
from hyperbatch.errors import InputError
from hyperbatch.plan.types import RankGrid
from hyperbatch.sim.sweep import format_simulation, simulate

LARGE = Config(
    recipe="large",
    optim=OptimConfig(precision="fp16"),
    schedule=ScheduleConfig(batch_phases=(BatchPhase(0, 86_016),)),
    comm=CommConfig(algorithm="torus"),
)


def test_shape() -> None:
    simulation = simulate(LARGE, cluster="abci", gpus=[512, 1024, 2048])
    values = json.loads(json.dumps(simulation.to_dict()))
    assert {"recipe", "cluster", "points"} <= set(values)
    assert [point["gpus"] for point in values["points"]] == [512, 1024, 2048]
    for point in values["points"]:
        assert {"grid", "algorithm", "step_s", "exposed_comm_s", "images_per_s", "efficiency", "epochs"} <= set(point)
        assert list(point["time_to_target_s"]) == ["low", "mid", "high"]
    assert format_simulation(simulation).count("\n") == 8


def test_bounds_that_no_prediction_may_break() -> None:
    for point in simulate(LARGE, cluster="abci", gpus=[8, 512, 2048]).to_dict()["points"]:
        time = point["time_to_target_s"]
        assert point["lower_bound_s"] < time["low"] < time["mid"] < time["high"]
        assert 0 < point["efficiency"] <= 1
        assert point["exposed_comm_s"] < point["step_s"] < point["slow_step_s"] * 1.0001
        parts = point["forward_s"] + point["backward_s"] + point["exposed_comm_s"] + point["update_s"]
        assert point["step_s"] == pytest.approx(parts)
        assert point["images_per_s"] == pytest.approx(point["global_batch"] / point["step_s"])


def test_strong_scaling_pays_less_and_less_and_weak_scaling_nearly_everything() -> None:
    strong = [p["images_per_s"] for p in simulate(LARGE, cluster="abci", gpus=[512, 1024, 2048]).to_dict()["points"]]
    gains = [after / before for before, after in pairwise(strong)]
    assert 1 < gains[1] < gains[0] < 2
    weak = simulate(LARGE, cluster="abci", gpus=[512, 2048], batch_per_rank=42).to_dict()["points"]
    assert weak[1]["global_batch"] == 42 * 2048
    assert 3 < weak[1]["images_per_s"] / weak[0]["images_per_s"] < 4, "rings of 512 nodes cost the rest"


def test_a_larger_batch_needs_more_epochs() -> None:
    small, large = (
        simulate(LARGE, cluster="abci", gpus=[512], global_batch=batch).to_dict()["points"][0]
        for batch in (8_192, 65_536)
    )
    assert small["epochs"] < large["epochs"] < 90


def test_batch_size_control_runs_both_phases() -> None:
    two = LARGE.override(batch_phases=(BatchPhase(0, 34_816), BatchPhase(45, 69_632)))
    point = simulate(two, cluster="abci", gpus=[1088]).to_dict()["points"][0]
    single = LARGE.override(batch_phases=(BatchPhase(0, 69_632),))
    one = simulate(single, cluster="abci", gpus=[1088]).to_dict()["points"][0]
    assert point["run"]["train_s"] > one["run"]["train_s"], "the small batch of the first half is less efficient"


def test_progressive_resizing_takes_each_part_at_its_size() -> None:
    """The time of a part is its share of a run that has its size from the start to the end."""
    sizes = ((0, 96), (30, 160), (60, 224))
    grows = LARGE.override(size_phases=tuple(SizePhase(*size) for size in sizes))
    point = simulate(grows, cluster="abci", gpus=[512]).points[0]
    assert [(span.epochs, span.image_size) for span in point.spans] == [(30, 96), (30, 160), (30, 224)]
    for span in point.spans:
        whole = simulate(LARGE.override(image_size=span.image_size), cluster="abci", gpus=[512]).points[0]
        assert span.train_s == pytest.approx(whole.run.train_s / 3)
        assert span.exposed_comm_s == whole.step.timing.exposed_comm_s
    assert point.run.train_s == pytest.approx(sum(span.train_s for span in point.spans))
    full = simulate(LARGE, cluster="abci", gpus=[512]).points[0]
    assert (point.image_size, point.step) == (224, full.step), "the part with most pixels"
    pixels = (96**2 + 160**2 + 224**2) / (3 * 224**2)
    assert point.lower_bound_s == pytest.approx(pixels * full.lower_bound_s, rel=0.01)
    assert point.run.eval_s == full.run.eval_s


def test_one_image_size_is_no_progressive_resizing() -> None:
    same = LARGE.override(size_phases=(SizePhase(0, 224), SizePhase(45, 224)))
    assert simulate(same, cluster="abci", gpus=[512]) == simulate(LARGE, cluster="abci", gpus=[512])


def test_image_sizes_keep_their_shares_of_a_longer_run_and_batch_phases_their_epochs() -> None:
    grows = LARGE.override(
        batch_phases=(BatchPhase(0, 8_192), BatchPhase(30, 16_384)), size_phases=(SizePhase(0, 128), SizePhase(45, 224))
    )
    point = simulate(grows, cluster="abci", gpus=[512], global_batch=32_768).points[0]
    assert point.run.epochs > 90
    small, large = point.spans[0], point.spans[-1]
    assert (small.epochs, small.image_size, small.global_batch) == (30, 128, 32_768)
    assert (large.image_size, large.global_batch) == (224, 65_536)
    assert large.epochs == pytest.approx(point.run.epochs / 2)
    assert sum(span.epochs for span in point.spans) == pytest.approx(point.run.epochs)


def test_batch_and_size_may_change_in_the_same_epoch() -> None:
    """In a longer run the batch changes before the size: there are parts that the recipe does not have."""
    both = LARGE.override(
        epochs=20,
        batch_phases=(BatchPhase(0, 8_192), BatchPhase(10, 16_384)),
        size_phases=(SizePhase(0, 128), SizePhase(10, 224)),
    )
    point = simulate(both, cluster="abci", gpus=[512], global_batch=32_768).points[0]
    parts = [(span.global_batch, span.image_size) for span in point.spans]
    assert parts == [(32_768, 128), (65_536, 128), (65_536, 224)]


def test_a_second_table_lists_the_parts_of_a_run_that_changes() -> None:
    grows = LARGE.override(size_phases=(SizePhase(0, 96), SizePhase(45, 224)))
    text = format_simulation(simulate(grows, cluster="abci", gpus=[512, 1024]))
    parts = [line.split()[:3] for line in text.splitlines()[-4:]]
    assert parts == [["512", "45.0", "96"], ["512", "45.0", "224"], ["1,024", "45.0", "96"], ["1,024", "45.0", "224"]]


def test_energy_and_cost_follow_time() -> None:
    point = simulate(LARGE, cluster="cloud_h200_efa", gpus=[512]).to_dict()["points"][0]
    hours = point["time_to_target_s"]["mid"] / 3600
    assert point["energy_kwh"] == pytest.approx(64 * 10.2 * hours)
    assert point["cost_usd"] == pytest.approx(512 * 7.9 * hours)
    assert simulate(LARGE, cluster="abci", gpus=[512]).to_dict()["points"][0]["cost_usd"] is None


def test_you_et_al_s_five_seconds() -> None:
    """90 epochs on a machine of 2e17 single-precision operations a second: 2.8e18 operations, 14 s; their 1e18, 5 s."""
    from hyperbatch.plan.clusters import load_cluster
    from hyperbatch.sim.sweep import lower_bound

    cluster = load_cluster("stampede2_knl")
    ranks = round(2e17 / cluster.device.peak_flop_per_s["fp32"])
    bound = lower_bound(cluster, LARGE.override(precision="fp32"), ranks, 90)
    assert bound == pytest.approx(90 * 1_281_167 * 24.3e9 / 2e17, rel=0.01)


def test_the_grid_is_the_one_train_would_use() -> None:
    def grid(gpus: int, config: Config = LARGE, asked: str | None = None) -> str:
        return simulate(config, cluster="abci", gpus=[gpus], grid=asked, batch_per_rank=8).to_dict()["points"][0][
            "grid"
        ]

    assert [grid(n) for n in (1, 2, 4, 8, 2048)] == ["1x1", "1x2", "1x4", "2x4", "512x4"]
    assert grid(2046) == "1x2046", "hosts of different sizes are one row"
    assert grid(16, LARGE.override(grid="2x8")) == "2x8"
    assert grid(32, LARGE.override(grid="2x8")) == "8x4", "the recipe's grid is for another size"
    assert grid(2048, asked="32x64") == "32x64"


def test_fujitsu_s_seventy_seconds() -> None:
    """The whole command of the record: 70.4 s were measured."""
    point = simulate("fujitsu_resnet50", gpus=[2048]).to_dict()["points"][0]
    assert (point["grid"], point["strategy"], point["global_batch"]) == ("512x4", "cubic", 86_016)
    assert point["time_to_target_s"]["low"] < 70.4 < point["time_to_target_s"]["high"]
    assert point["time_to_target_s"]["mid"] == pytest.approx(70.4, rel=0.15)


def test_any_world_size_and_up_to_65536() -> None:
    sizes = [1, 3, 7, 2053, 4216, 65_536]
    points = simulate(LARGE, cluster="dgx_h100", gpus=sizes, batch_per_rank=16).to_dict()["points"]
    assert [point["gpus"] for point in points] == sizes
    for point in points:
        rows, columns = map(int, point["grid"].split("x"))
        assert rows * columns == point["gpus"]


def test_every_recipe_can_be_simulated() -> None:
    from hyperbatch.recipes import all_recipes

    for name, recipe in all_recipes().items():
        if recipe.config().model.model.startswith("timm/"):
            continue  # timm may be absent: its models are built to be simulated (tests/unit/test_tracing.py)
        point = simulate(name, gpus=[recipe.ranks]).to_dict()["points"][0]
        assert point["step_s"] > 0, name


def test_zero_gpus() -> None:
    with pytest.raises(InputError, match="--gpus 0: must be at least 1"):
        simulate(LARGE, cluster="abci", gpus=[0])


def test_what_a_caller_from_python_gives() -> None:
    """One number of GPUs, numpy's numbers, a RankGrid; and what is no recipe."""
    expect = simulate(LARGE, cluster="abci", gpus=[512], grid="128x4").to_dict()
    for gpus in (512, np.array([512]), range(512, 513)):
        found = simulate(LARGE, cluster="abci", gpus=gpus, grid=RankGrid(128, 4)).to_dict()
        assert json.loads(json.dumps(found)) == json.loads(json.dumps(expect))
    with pytest.raises(InputError, match=r"--gpus '8': must be a whole number"):
        simulate(LARGE, cluster="abci", gpus="8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="recipe is 3; give the name of a recipe or of a model, or a Config"):
        simulate(3, cluster="abci")  # pyright: ignore[reportArgumentType]


def test_more_gpus_than_anything_can_be_said_of() -> None:
    with pytest.raises(InputError, match="is too large to predict"):
        simulate(LARGE, gpus=[999_999_999])


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys, hyperbatch.sim.sweep, hyperbatch.plan.planner as p\n"
        "hyperbatch.sim.sweep.simulate('digits', gpus=[2])\n"
        "p.make_plan('digits')\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_an_interval_without_an_end_is_told_in_a_word() -> None:
    values = simulate("mlperf_resnet50", cluster="dgx_h100", gpus=[65_536], batch_per_rank=1024)
    row = format_simulation(values).splitlines()[3].split("  ")
    assert [cell.strip() for cell in row].count("years") == 1


def test_energy_of_a_short_run_is_not_zero() -> None:
    assert format_simulation(simulate("digits")).splitlines()[3].endswith("  <0.1")
