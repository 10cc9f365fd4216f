"""The memory of a step, and that everyone finds the same batch in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hyperbatch import preview
from hyperbatch.config import Config, SizePhase
from hyperbatch.plan import fit
from hyperbatch.plan.clusters import load_cluster
from hyperbatch.plan.planner import make_plan
from hyperbatch.plan.workload import largest_batch, step_memory
from hyperbatch.sim.sweep import simulate

RESNET50 = Config().override(precision="fp16")


def test_memory_of_a_step() -> None:
    fp32, fp16 = (step_memory(RESNET50.override(precision=name), 256) for name in ("fp32", "fp16"))
    parameters = 25_557_032
    assert fp32.masters == 0
    assert fp32.weights == fp32.gradients == fp32.momentum == 4 * parameters
    assert 0.99 * 4 * parameters < fp16.masters < 4 * parameters, "masters of the 16-bit weights only"
    # Measured with fused batch norm on an H200 in fp16: 11.2 GiB at batch 256, library workspaces included.
    assert fp16.total / 2**30 == pytest.approx(11.2, rel=0.1)
    values = fp16.to_dict()
    assert values.pop("total") == fp16.total == sum(values.values())
    half = step_memory(RESNET50, 128)
    assert half.activations * 2 == fp16.activations
    assert half.weights == fp16.weights


def test_parameters_and_their_state_take_as_much_in_16_bit_as_in_32() -> None:
    fixed = {name: step_memory(RESNET50.override(precision=name), 0).total for name in ("fp16", "bf16", "fp32", "fp64")}
    assert fixed["fp16"] == fixed["bf16"] == fixed["fp32"] == 12 * 25_557_032
    assert fixed["fp64"] == 2 * fixed["fp32"]


def test_lamb_keeps_a_second_moment() -> None:
    lars, lamb = (step_memory(RESNET50.override(optimizer=name), 8) for name in ("lars", "lamb"))
    assert lamb.momentum == 2 * lars.momentum
    assert lamb.total - lars.total == lars.momentum


def test_products_of_muon_take_memory_in_a_step_and_none_in_a_checkpoint() -> None:
    lars, muon = (step_memory(RESNET50.override(optimizer=name), 8) for name in ("lars", "muon"))
    assert muon.total - lars.total == lars.momentum
    assert muon.stored == lars.stored


def test_a_step_of_the_batch_that_fits_fits_and_one_more_sample_does_not() -> None:
    memory, fixed, sample = 16 * 2**30, 3 * 10**8, 4 * 10**7
    batch = fit.fitting_batch(memory, fixed, sample)
    assert fixed + fit.HEADROOM * sample * batch <= fit.USABLE * memory < fixed + fit.HEADROOM * sample * (batch + 1)
    assert fit.fitting_batch(1000, fixed, sample) == 1, "a run that cannot fit at all is left to fail by itself"
    assert fit.fitting_batch(memory, fixed, sample, usable=1, headroom=1) == int((memory - fixed) / sample)


def test_peaks_at_two_batches_give_what_is_fixed_and_what_grows() -> None:
    assert fit.split_peaks((8, 300 + 8 * 40), (32, 300 + 32 * 40)) == (300, 40)
    # torch's own step of ResNet-50 in fp16 on an H200 (benchmarks/step_h200.json): the table is within 2 % of it.
    fixed, sample = fit.split_peaks((42, int(2.03 * 2**30)), (400, int(16.67 * 2**30)))
    table = step_memory(RESNET50, 1).activations
    assert sample == pytest.approx(table, rel=0.02)
    assert fixed == pytest.approx(step_memory(RESNET50, 0).total, rel=0.2)


@pytest.mark.parametrize("cluster", ["abci", "facebook_p100", "dgx_h100"])
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16"},
        {"precision": "fp32", "optimizer": "lamb"},
        {"model": "resnet152", "precision": "bf16", "image_size": 288},
        {"model": "alexnet_bn"},
    ],
)
def test_simulate_plan_and_dry_run_find_the_same_batch(cluster: str, changes: dict, monkeypatch) -> None:
    memory_bytes = load_cluster(cluster).device.memory_bytes
    monkeypatch.setattr(preview, "device_memory_bytes", lambda *, on_gpu: int(memory_bytes))
    config = Config().override(**changes)
    largest = largest_batch(config, memory_bytes)
    assert largest is not None
    config = config.override(global_batch=2 * 4 * largest)  # on two ranks, four micro-steps of the largest each
    found = {
        "dry run": preview.preview(config, 2).phases[0],
        "plan": make_plan(config, cluster=cluster, gpus=2).phase,
        "simulate": simulate(config, cluster=cluster, gpus=[2]).points[0].phase,
    }
    assert {name: (phase.batch_per_rank, phase.accumulation) for name, phase in found.items()} == dict.fromkeys(
        found, (largest, 4)
    )


@pytest.mark.parametrize(("device", "available"), [("cuda", 16 << 20), ("cpu", 5)])
def test_a_dry_run_on_the_cpu_has_the_hosts_memory(monkeypatch, device: str, available: int) -> None:
    monkeypatch.setattr(preview, "count_gpus", lambda: 1)
    monkeypatch.setattr(preview, "host_memory_bytes", lambda: 5)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.run", lambda *_, **options: SimpleNamespace(stdout="16\n"))
    config = Config().override(device=device, accumulate=1, dataset="digits", model="resnet8", global_batch=2)
    assert preview.preview(config, 1).memory_bytes_available == available


def test_a_v100_holds_204_images() -> None:
    assert largest_batch(RESNET50, load_cluster("abci").device.memory_bytes) == 204


def test_what_fits_are_the_largest_images_of_the_run():
    memory_bytes = load_cluster("abci").device.memory_bytes
    grows = RESNET50.override(image_size=128, size_phases=(SizePhase(2, 192), SizePhase(4, 160)))
    assert largest_batch(grows, memory_bytes) == largest_batch(RESNET50.override(image_size=192), memory_bytes)
    shrinks = RESNET50.override(size_phases=(SizePhase(0, 128),))
    assert largest_batch(shrinks, memory_bytes) == largest_batch(RESNET50, memory_bytes)
