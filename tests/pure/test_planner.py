"""`make_plan`: the fixed shape, the choices it makes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hyperbatch.config import BatchPhase, CommConfig, Config, ModelConfig, OptimConfig, ScheduleConfig
from hyperbatch.errors import InputError
from hyperbatch.plan.inventory import tensors
from hyperbatch.plan.planner import format_plan, make_plan
from hyperbatch.plan.workload import largest_batch
from hyperbatch.sim.clusters import load_cluster


def config(batch: int = 86_016, *, model: str = "resnet50", precision: str = "fp16", **comm: object) -> Config:
    return Config(
        recipe="test",
        model=ModelConfig(model=model),
        optim=OptimConfig(precision=precision),
        schedule=ScheduleConfig(batch_phases=(BatchPhase(0, batch),)),
        comm=CommConfig(**comm),  # pyright: ignore[reportArgumentType]
    )


def test_shape_and_coverage() -> None:
    values = json.loads(json.dumps(make_plan(config(), cluster="abci", gpus=2048)))
    assert {"grid", "algorithm", "groups", "step_s", "exposed_comm_s"} <= set(values)
    assert {"index", "parameters", "bytes", "algorithm"} <= set(values["groups"][0])
    specs = {spec.name: spec for spec in tensors("resnet50", dtype="float16")}
    planned = [name for group in values["groups"] for name in group["parameters"]]
    assert sorted(planned) == sorted(specs)
    for group in values["groups"]:
        assert group["bytes"] == sum(specs[name].nbytes for name in group["parameters"])
        assert group["ready_s"] <= group["start_s"] <= group["end_s"]
    assert values["batch_per_rank"] * 2048 == values["global_batch"] == 86_016
    assert "grid 32x64" in format_plan(values)


@pytest.mark.parametrize("gpus", [1, 2, 7, 512, 2048, 2053])
@pytest.mark.parametrize("model", ["resnet50", "alexnet_bn"])
def test_optimal_is_never_worse(gpus: int, model: str) -> None:
    values = make_plan(config(gpus * 32, model=model), cluster="abci", gpus=gpus)
    best = min(row["step_s"] for row in values["strategies"].values())
    assert values["step_s"] <= best * (1 + 1e-9)
    assert values["step_s"] <= min(row["step_s"] for row in values["algorithms"].values()) * (1 + 1e-9)


def exposed_of(hop_s: float) -> dict[str, float]:
    cluster = load_cluster("abci")
    network = replace(cluster.network, inter=replace(cluster.network.inter, latency_s=hop_s))
    values = make_plan(config(), cluster=replace(cluster, network=network), gpus=2048, grid="512x4", algorithm="torus")
    return {name: row["exposed_comm_s"] for name, row in values["strategies"].items()}


def test_variable_groups_beat_equal_groups_on_2048_v100() -> None:
    """Fujitsu's picture. Sized groups always win; their cubic rule does where the exchange fills backward."""
    exposed = exposed_of(4e-6)
    assert exposed["optimal"] < exposed["equal"] < exposed["single"]
    assert exposed["cubic"] < 0.75 * exposed["single"]
    busier = exposed_of(6e-6)
    assert busier["optimal"] < busier["cubic"] < 0.9 * busier["equal"]


def test_one_gpu_has_no_communication() -> None:
    values = make_plan(config(64), cluster="abci", gpus=1)
    assert values["exposed_comm_s"] == 0
    assert values["grid"] == "1x1"


def test_given_choices_are_kept() -> None:
    values = make_plan(config(), cluster="abci", gpus=2048, grid="512x4", algorithm="hierarchical", strategy="equal")
    assert (values["grid"], values["algorithm"], values["strategy"]) == ("512x4", "hierarchical", "equal")
    assert {group["algorithm"] for group in values["groups"]} == {"hierarchical"}


def test_sixteen_bits_on_the_wire_halve_what_is_sent() -> None:
    slow = config(8 * 256, precision="fp32")
    plain, half = (
        make_plan(c, cluster="facebook_p100", gpus=256, strategy="single", algorithm="flat")
        for c in (slow, slow.override(wire_dtype="fp16"))
    )
    network = load_cluster("facebook_p100").network
    sent = sum(group["bytes"] for group in plain["groups"])
    assert plain["exposed_comm_s"] - half["exposed_comm_s"] == pytest.approx(
        sent / 2 * 2 * 255 / 256 / network.node_bytes_per_s, rel=0.05
    )
    assert any("--wire-dtype fp16" in note for note in make_plan(slow, cluster="facebook_p100", gpus=256)["notes"])


def test_a_batch_that_does_not_fit_is_accumulated() -> None:
    values = make_plan(config(4096), cluster="abci", gpus=2)
    assert values["accumulation"] > 1
    assert values["batch_per_rank"] <= largest_batch(load_cluster("abci"), config())
    assert values["batch_per_rank"] * values["accumulation"] * 2 == 4096


def test_bad_requests_are_refused() -> None:
    for message, options in (
        ("--gpus 0", {"gpus": 0}),
        ("grid 3x5 holds 15 ranks, but there are 16", {"gpus": 16, "grid": "3x5"}),
        ("cannot be divided", {"gpus": 48, "global_batch": 1000}),
        ("not both", {"gpus": 8, "global_batch": 1000, "batch_per_rank": 3}),
        ("--batch-per-rank 0", {"gpus": 8, "batch_per_rank": 0}),
        ("unknown cluster", {"gpus": 8, "cluster": "nowhere"}),
    ):
        with pytest.raises(InputError, match=message):
            make_plan(config(256), **{"cluster": "abci", **options})  # pyright: ignore[reportArgumentType]


def test_the_recipe_s_own_batch_is_moved_to_one_that_divides() -> None:
    values = make_plan(config(1000), cluster="abci", gpus=48)
    assert values["global_batch"] == 21 * 48
    assert "does not divide over 48 ranks" in values["notes"][0]


def test_a_sharded_update_is_shorter_and_sends_as_much() -> None:
    plain = make_plan(config(), cluster="abci", gpus=2048, algorithm="torus", strategy="single")
    sharded = make_plan(config(sharded_update=True), cluster="abci", gpus=2048, algorithm="torus", strategy="single")
    assert sharded["update_s"] < plain["update_s"] / 1000
    assert sharded["exposed_comm_s"] == pytest.approx(plain["exposed_comm_s"], rel=0.15)
