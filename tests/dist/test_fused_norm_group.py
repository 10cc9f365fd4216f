"""Fused networks whose norms span two ranks equal the plain path, and one process that sees the whole batch.

The ranks are started in the process with Triton's interpreter (`interpreter.py`).
"""

from __future__ import annotations

import copy

import pytest
import timm_reference
import torch
import torch.distributed as dist
from fused_reference import alexnet, batch, check, error, errors, exact_step, residual, shuffled, step
from harness import run_ranks
from interpreter import inside, outside, run_by_the_interpreter

from hyperbatch.models import set_norm_group
from hyperbatch.models.fused import fuse
from hyperbatch.models.layers import adopt
from hyperbatch.models.resnet import BasicBlock, Bottleneck

FP32 = 5e-5  # relative, per tensor: some ten layers of fp32, each amplified by the norms behind it
RANKS = 2


@outside
def test_groups_by_the_interpreter():
    run_by_the_interpreter(__file__)


NETWORKS = {
    "bottlenecks": (lambda: residual(Bottleneck, (1, 1), (16, 8), small_stem=True), (4, 5)),
    "basic blocks under a pool": (lambda: residual(BasicBlock, (1,), (8,)), (17, 15)),
    "alexnet": (alexnet, (64, 63)),
    "gates": (lambda: adopt(timm_reference.small(timm_reference.BasicBlock, averages=True, gated=True)), (21, 18)),
}


def train(rank: int, network: str, counts: tuple[int, ...]) -> None:
    from hyperbatch.models import fused_blocks

    fused_blocks.BY_MOMENTS_BYTES = 0  # statistics over a group know no moments: they must not be taken
    build, size = NETWORKS[network]
    torch.manual_seed(0)
    whole = shuffled(build())
    images, labels = batch(sum(counts), size)
    mine = images.split(counts)[rank], labels.split(counts)[rank]
    everything = exact_step(whole, images, labels)
    share = counts[rank] / sum(counts)  # of this rank's mean loss in the mean of all

    plain, fused = copy.deepcopy(whole).double(), copy.deepcopy(whole)
    for model in (plain, fused):
        set_norm_group(model, dist.group.WORLD)
    fuse(fused)
    for _ in range(2 if network == "bottlenecks" else 1):  # the running statistics move on from where they are
        want = step(plain, mine[0].double(), mine[1], scale=share)
        got = step(fused, *mine, scale=share)
        check(got, want, FP32)
        total = {name: grad * share for name, grad in got.grads.items()}
        for grad in total.values():
            dist.all_reduce(grad)
        assert max(errors(total, everything.grads).values()) < FP32
        assert error(got.logits, everything.logits.split(counts)[rank]) < FP32
    alone = copy.deepcopy(whole)
    fuse(alone)
    assert error(step(alone, *mine).logits, want.logits) > 100 * FP32  # or nothing was shared


@inside
@pytest.mark.parametrize(
    ("network", "counts"),
    [
        ("bottlenecks", (2, 2)),
        ("bottlenecks", (1, 3)),
        ("basic blocks under a pool", (2, 2)),
        ("alexnet", (1, 1)),
        ("gates", (2, 1)),
    ],
)
def test_equals_one_process(network, counts):
    run_ranks(RANKS, train, network, counts, timeout_s=120, collective_timeout_s=60)
