"""Faults that nobody reports, made on purpose on one rank of a real run: the run ends, and names the rank."""

from __future__ import annotations

import torch
from harness import run_ranks
from toy import config

from hyperbatch.engine import loop
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import RunFailed
from hyperbatch.record import RunRecord

CONFIG = {"eval_every_epochs": 1.0, "log_every_steps": 50, "max_rollbacks": 0}  # 10 steps an epoch at first


def flip(tensor):
    """One bit of one value: the tenth of the tensor."""
    with torch.no_grad():
        tensor.as_strided((tensor.numel(),), (1,)).view(torch.int32)[10] ^= 1 << 20


def weight(run):
    flip(run.learner.model[2].weight)


def momentum(run):
    flip(run.learner.optimizer.state[run.learner.model[5].weight]["momentum_buffer"])


def statistics(run):
    run.learner.model[1].running_var.fill_(torch.inf)


def nan_weight(run):
    run.learner.model[0].weight.data.view(-1)[3] = torch.nan


def inf_gradients(run):
    run.learner.model[2].weight.register_hook(lambda grad: grad * torch.inf)


FAULTS = {f.__name__: f for f in (weight, momentum, statistics, nan_weight, inf_gradients)}


def train_faulty(rank, world_size, folder, fault, at, values):
    """What the run raised. The fault is made on the last rank after so many steps."""
    plain = loop.average_weights

    def spoil(run, step):
        plain(run, step)
        if step.index + 1 == at and rank == world_size - 1:
            FAULTS[fault](run)

    loop.average_weights = spoil
    ranks = Ranks(rank=rank, world_size=world_size, local_rank=rank, local_size=world_size, launcher="test")
    try:
        return loop.run(config(out=str(folder), **{**CONFIG, **values}), ranks).result.steps
    except RunFailed as error:
        return str(error)
    finally:
        loop.average_weights = plain


def faulty(world_size, folder, fault, at=5, **values):
    """The message, the same on every rank; rank 0's record has it, too. An int: the run came to its end."""
    if world_size == 1:
        return train_faulty(0, 1, folder, fault, at, values)
    found = run_ranks(world_size, train_faulty, world_size, folder, fault, at, values)
    assert len(set(found)) == 1
    if isinstance(found[0], str):
        record = RunRecord.load(folder)
        assert record.error == found[0]
        assert record.failure["message"] == found[0]
    return found[0]


def checkpoints(folder):
    return [path.name for path in sorted((folder / "checkpoints").glob("step-*"))]


def test_a_flipped_weight_names_the_rank_that_differs_from_the_others(tmp_path):
    line = faulty(3, tmp_path, "weight", at=15)
    assert line.startswith("rank 2 (host ")
    assert "has drifted from the other 2 ranks: the weight of " in line
    assert "differs after step 20; after step 10 all ranks agreed" in line
    assert RunRecord.load(tmp_path).failure["rank"] == 2
    assert len(checkpoints(tmp_path)) == 1, "the one of step 10: nothing that has drifted is kept"


def test_a_flipped_momentum_is_found_before_it_has_reached_a_weight(tmp_path):
    line = faulty(3, tmp_path, "momentum", at=10)  # between the update and the comparison
    assert line.startswith("rank 2 (host ")
    assert "the momentum buffer of 5.weight differs after step 10; after step 0 all ranks agreed" in line


def test_of_two_ranks_nobody_can_say_which_is_right(tmp_path):
    line = faulty(2, tmp_path, "weight", at=10)
    assert line.startswith("ranks 0 (host ")
    assert "have drifted apart: the weight of 2.weight differs after step 10" in line


def test_ranks_are_compared_every_k_steps_if_asked(tmp_path):
    """And the answer is read at the next comparison: nobody waits for it."""
    rare = {"eval_every_epochs": 4.0, "keep_checkpoints": 0}
    assert "differs after step 6; after step 3" in faulty(2, tmp_path / "k", "weight", compare_every_steps=3, **rare)
    assert faulty(2, tmp_path / "never", "weight", compare_every_steps=0, **rare) == 30


def test_sharded_and_16_bit_ranks_are_compared_in_what_must_be_equal(tmp_path):
    """Momentum and masters differ outside of a rank's own shard, and that is no fault."""
    same = {"precision": "bf16", "compare_every_steps": 2}
    for name, values in {"sharded": {"sharded_update": True}, "masters": {}}.items():
        assert faulty(2, tmp_path / name, "weight", at=0, **same, **values) == 30


def test_no_checkpoint_holds_values_that_are_not_finite(tmp_path):
    line = faulty(2, tmp_path, "statistics", model="toy:normed", at=20)
    assert line.startswith("rank 1 (host ")
    assert "the buffer 1.running_var was inf or nan after step 20, so this step was not saved" in line
    assert len(checkpoints(tmp_path)) == 1


def test_a_loss_that_is_not_finite_names_its_rank_whatever_is_logged(tmp_path):
    line = faulty(2, tmp_path, "nan_weight", at=15)
    assert line.startswith("the loss became nan at step 16 (epoch ")
    assert " on rank 1 (host " in line
    assert RunRecord.load(tmp_path).failure["rank"] == 1
    assert len(checkpoints(tmp_path)) == 1


def test_gradients_that_are_never_finite_name_rank_and_layer(tmp_path):
    line = faulty(3, tmp_path, "inf_gradients", max_skipped_steps=4, log_every_steps=1)
    assert line.startswith("4 steps in a row, up to step 9, were skipped because gradients were inf or nan ")
    assert "on rank 2 (host " in line
    assert ", first in 2.weight; " in line


def test_a_few_skipped_steps_are_no_fault_and_zero_allows_any_number(tmp_path):
    assert faulty(1, tmp_path / "any", "inf_gradients", max_skipped_steps=0) == 30
    line = faulty(1, tmp_path / "alone", "inf_gradients", max_skipped_steps=20)
    assert line.startswith("20 steps in a row, up to step 25, were skipped")
    assert "first in 2.weight; " in line
