"""LARS, LAMB and AdamW on DTensors (FSDP2's fully_shard, tensor parallelism) against the same model on one rank."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp_files
import torch.distributed.checkpoint.state_dict as dcp
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hyperbatch.arena import Arena
from hyperbatch.errors import InputError
from hyperbatch.optim import LAMB, LARS, Muon, param_groups

STEPS = 4
OPTIMIZERS = {
    "lr_inside": (LARS, {"lr": 0.3, "trust_coefficient": 0.1}),
    "rescaled": (LARS, {"lr": 0.3, "trust_coefficient": 0.1, "momentum_rule": "rescaled", "nesterov": True}),
    "lr_outside": (LARS, {"lr": 0.3, "trust_coefficient": 0.1, "momentum_rule": "lr_outside", "foreach": True}),
    "lamb": (LAMB, {"lr": 0.05}),
    "adamw": (LAMB, {"lr": 0.05, "eps": 1e-8}),
}


class Net(nn.Module):
    """Norms, and sizes that 2 and 4 ranks cannot share evenly; `scale` leaves some ranks without any element."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 5, 3)
        self.norm = nn.GroupNorm(1, 5)
        self.up = nn.Linear(45, width)
        self.scale = nn.Parameter(torch.full((1, width), 1.5))
        self.down = nn.Linear(width, 3)
        self.layer_norm = nn.LayerNorm(3)
        self.double()  # sums in another order differ in the 16th digit

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.layer_norm(self.down(torch.tanh(self.up(x)) * self.scale))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        torch.manual_seed(step)  # the same batch on every rank: its mean over ranks is itself
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] / (1 + step)
        optimizer.zero_grad()
        model(torch.randn(6, 1, 5, 5).double()).pow(2).mul(torch.arange(3)).sum().backward()
        optimizer.step()


def build(model: nn.Module, name: str) -> LARS | LAMB:
    kind, options = OPTIMIZERS[name]
    groups = param_groups(model, 0.05, layer_decay=0.8, lr=options["lr"])  # three layers of weights and of others
    assert len(groups) == 6
    if name == "adamw":
        groups = [{**group, "adapt": False} for group in groups]
    optimizer = kind(groups, **options)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(model: nn.Module, optimizer: LARS | LAMB, plain: nn.Module, expected: LARS | LAMB) -> None:
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(whole(a), b, name)
        for key, value in optimizer.state[a].items() if a.requires_grad else ():
            close(whole(value), expected.state[b][key], f"{key} of {name}")
    norms, expected_norms = optimizer.layer_norms(), expected.layer_norms()
    assert norms.keys() == expected_norms.keys()
    for name, values in norms.items():
        assert values == pytest.approx(expected_norms[name], rel=1e-10, nan_ok=True), name


def close(a: Tensor, b: Tensor, name: str, *, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def fsdp(rank: int, world_size: int, kind: str = "cpu") -> None:
    mesh = init_device_mesh(kind, (world_size,))
    torch.set_default_device(kind)
    for name in OPTIMIZERS:
        plain, model = Net(), Net()
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
        expected, optimizer = build(plain, name), build(model, name)
        for one, its in ((plain, expected), (model, optimizer)):
            train(one, its)
        assert not torch.equal(plain.up.weight, Net().up.weight)
        compare(model, optimizer, plain, expected)


@pytest.mark.parametrize("world_size", [2, 4])
def test_fully_sharded_equals_one_rank(world_size: int) -> None:
    run_ranks(world_size, fsdp, world_size)


def mixed_precision(rank: int, world_size: int) -> None:
    """Forward and backward in bf16, weights and the sum of gradients in fp32: as a cast of all weights in one rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name in ("lr_inside", "lamb", "adamw"):
        plain, model = Net().float(), Net().float()
        fully_shard(model.up, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        expected, optimizer = build(plain, name), build(model, name)
        for step in range(3):
            x = torch.randn(6, 1, 5, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
            cast = {key: param.bfloat16() for key, param in plain.named_parameters()}
            for its, output in (
                (expected, torch.func.functional_call(plain, cast, x)),
                (optimizer, model(x)),
            ):
                its.zero_grad()
                output.float().pow(2).mul(torch.arange(3)).sum().backward()
                its.step()
        for (key, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert a.dtype == torch.float32
            assert "master" not in optimizer.state[a]
            close(whole(a), b, f"{name}, {key}", rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mixed_precision_policy_equals_one_rank(world_size: int) -> None:
    run_ranks(world_size, mixed_precision, world_size)


def tensor_parallel(rank: int, shape: tuple[int, ...]) -> None:
    """Columns, then rows; what is left of the model is replicated, or sharded over the mesh's other dimension."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    for name in OPTIMIZERS:
        plain, model = Net(8), Net(8)
        for one in (plain, model):  # one number for all columns, and so for a part of them, too
            one.scale = nn.Parameter(one.scale.data[:, :1], requires_grad=False)
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if len(shape) == 2:
            fully_shard(model, mesh=mesh["data"])
        expected, optimizer = build(plain, name), build(model, name)
        for one, its in ((plain, expected), (model, optimizer)):
            train(one, its)
        compare(model, optimizer, plain, expected)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_tensor_parallel_equals_one_rank(shape: tuple[int, ...]) -> None:
    run_ranks(2 ** len(shape), tensor_parallel, shape)


def spoil_one_part(rank: int) -> None:
    """An inf in one rank's part, or one that only one rank was told of, stops every rank."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("lr_inside", "lamb"):
        model = Net().to(torch.bfloat16)
        fully_shard(model, mesh=mesh)
        optimizer = build(model, name)
        train_dtype(model, optimizer)
        before = [whole(p).clone() for p in model.parameters()]
        masters = [whole(optimizer.state[p]["master"]).clone() for p in model.parameters()]
        model.up.weight.grad.to_local()[:1] *= torch.inf if rank == 1 else 1.0
        optimizer.step()
        assert optimizer.last_found_inf == 1
        for p in model.parameters():
            p.grad.to_local().fill_(1.0)
        optimizer.found_inf = torch.tensor(float(rank == 0))
        optimizer.step()
        del optimizer.found_inf
        assert optimizer.skipped_steps == 2
        assert all(torch.equal(whole(p), old) for p, old in zip(model.parameters(), before, strict=True))
        optimizer.step()
        assert optimizer.skipped_steps == 2
        after = [whole(optimizer.state[p]["master"]) for p in model.parameters()]
        assert not any(torch.equal(a, b) for a, b in zip(after, masters, strict=True))
        assert all(torch.equal(whole(p), m.bfloat16()) for p, m in zip(model.parameters(), after, strict=True))


def train_dtype(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 1, 5, 5, dtype=torch.bfloat16)).float().mul(torch.arange(3.0)).sum().backward()
    optimizer.step()


def test_an_inf_in_one_part_skips_the_step_on_all_ranks() -> None:
    run_ranks(2, spoil_one_part)


def refuse(rank: int) -> None:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"fused=True, but .* DTensors"):
        LARS(model.parameters(), lr=0.1, fused=True)
    for kind in (LARS, LAMB):
        with pytest.raises(ValueError, match=r"foreach=False .* DTensor"):
            kind(model.parameters(), lr=0.1, foreach=False)
    with pytest.raises(ValueError, match="Muon needs whole matrices and does not support DTensor parameters"):
        Muon(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="an arena does not support DTensor parameters"):
        Arena(model, [name for name, _ in model.named_parameters()])


def test_muon_the_arena_and_the_fused_and_reference_paths_refuse() -> None:
    run_ranks(2, refuse)


def sharded(name: str, world_size: int) -> tuple[nn.Module, LARS | LAMB]:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model, build(model, name)


def save_files(rank: int, folder: Path) -> None:
    for name in CHECKPOINTED:
        model, optimizer = sharded(name, 4)
        train(model, optimizer)
        weights, state = dcp.get_state_dict(model, optimizer)
        dcp_files.save({"model": weights, "optimizer": state}, checkpoint_id=folder / name)


def load_files(rank: int, folder: Path) -> None:
    for name in CHECKPOINTED:
        plain = Net()
        expected = build(plain, name)
        train(plain, expected)
        model, optimizer = sharded(name, 2)
        weights, state = dcp.get_state_dict(model, optimizer)
        dcp_files.load({"model": weights, "optimizer": state}, checkpoint_id=folder / name)
        dcp.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        assert [group["step"] for group in optimizer.param_groups if "step" in group] == [
            group["step"] for group in expected.param_groups if "step" in group
        ]
        for one, its in ((plain, expected), (model, optimizer)):
            train(one, its, steps=2)
        compare(model, optimizer, plain, expected)


CHECKPOINTED = ("rescaled", "lamb", "adamw")


def test_files_of_four_ranks_continue_on_two(tmp_path: Path) -> None:
    run_ranks(4, save_files, tmp_path)
    run_ranks(2, load_files, tmp_path)


def checkpoint(rank: int) -> None:
    """Through torch.distributed.checkpoint's state dicts, into a fresh model: the next steps are the same."""
    model, optimizer = sharded("rescaled", 2)
    train(model, optimizer)
    saved = copy.deepcopy(dcp.get_state_dict(model, optimizer))
    other, resumed = sharded("rescaled", 2)
    dcp.set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, steps=2)
    assert all(torch.equal(whole(a), whole(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_state_goes_through_distributed_checkpoints() -> None:
    run_ranks(2, checkpoint)
