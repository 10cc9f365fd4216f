"""`hyperbatch profile`: what it measures on a CPU comes back as the layers of `simulate --cluster FILE`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from hyperbatch.config import BatchPhase, Config, DataConfig, ModelConfig, ScheduleConfig
from hyperbatch.engine.profile import format_profile, profile, step_profile
from hyperbatch.errors import InputError
from hyperbatch.plan.clusters import load_cluster
from hyperbatch.plan.compute import layer_times
from hyperbatch.sim.sweep import simulate

CONFIG = Config(
    recipe="tiny",
    model=ModelConfig(model="resnet8"),
    data=DataConfig(image_size=32, classes=10),
    schedule=ScheduleConfig(batch_phases=(BatchPhase(0, 8),)),
)


def test_a_profile_is_a_machine_file_with_ready_times(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    answer = profile("resnet8", device="cpu", output=path, batches=(2, 4), rounds=1)
    values = json.loads(json.dumps(answer.to_dict()))
    assert set(values["images_per_s"]) == {"2", "4"}
    assert set(values["layers"][0]) == {"layer", "forward_s", "backward_s"}
    assert values["layers"][0]["layer"] == "conv1"
    assert "conv1" in format_profile(answer)

    cluster = load_cluster(path)
    small, large = cluster.device.profiles
    assert (small.batch_per_device, large.batch_per_device) == (2, 4)
    assert len(small.layers) == len(small.forward_s) == len(small.backward_s)
    assert all(seconds >= 0 for seconds in (*small.forward_s, *small.backward_s))
    for steps, point in zip(cluster.device.profiles, cluster.device.measured, strict=True):
        step_s = point.batch_per_device / point.images_per_s_per_device
        assert 0 < sum(steps.forward_s) + sum(steps.backward_s) < step_s, "the update is not in the layers"

    times = layer_times(cluster, "resnet8", 4, "fp32", classes=10, image_size=32)
    assert [time.backward_s for time in times] == list(large.backward_s)
    point = simulate(CONFIG, cluster=str(path), gpus=[2]).points[0].to_dict()
    assert point["forward_s"] == pytest.approx(sum(large.forward_s)), "4 images on each of 2 ranks, as measured"


def test_short_steps_are_measured_for_a_while(monkeypatch) -> None:
    """The median of three steps of some milliseconds is that of what else the cores did."""
    steps = []
    medians = statistics.median
    monkeypatch.setattr(statistics, "median", lambda values: steps.append(len(values)) or medians(values))
    options = {"image_size": 8, "classes": 10, "precision": "fp32", "device": torch.device("cpu")}
    step_profile("resnet8", 1, rounds=3, least_s=0.1, **options)
    assert steps[0] > 3
    step_profile("resnet8", 1, rounds=3, **options)
    assert steps[-1] == 3


def test_requests_it_cannot_serve(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    for message, model, options in (
        ("resnet9", "resnet9", {}),
        ("positive numbers", "resnet8", {"batches": (0, 2)}),
        ("--output", "resnet8", {"output": tmp_path / "nowhere" / "here.toml"}),
    ):
        with pytest.raises(InputError, match=message):
            profile(model, **{"output": path, **options})  # pyright: ignore[reportArgumentType]
    assert not path.exists()
