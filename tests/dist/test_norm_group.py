"""Batch norm over a group of ranks equals one process that sees the whole batch; merged statistics are the union's."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from hyperbatch.models import create_model, merge_norm_statistics, merged_buffers, norm_buffers, set_norm_group
from hyperbatch.models.norm import BatchNorm2d


def spawn(body, ranks, folder):
    """Forked ranks on gloo: torch is already imported, so this takes a fraction of a second."""
    mp.start_processes(_rank_main, (body, ranks, str(folder)), nprocs=ranks, start_method="fork")  # type: ignore[attr-defined]


def _rank_main(rank, body, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        body(rank, ranks)
    finally:
        dist.destroy_process_group()


def sample(counts, *, dtype=torch.float64, offset=0.0):
    torch.manual_seed(1)
    x = 3 * torch.randn(sum(counts), 3, 4, 5, dtype=dtype) + offset
    return x, torch.randn_like(x)


def fresh(dtype=torch.float64, **options):
    norm = BatchNorm2d(3, dtype=dtype, **options)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            norm.bias.copy_(torch.tensor([1.0, 0.0, -2.0]))
    return norm


def gather_sum(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def close(got, expect, tolerance=1e-12):
    torch.testing.assert_close(got, expect, rtol=tolerance, atol=tolerance)


def equals_one_process(rank, ranks):
    for counts in ((4,) * ranks, tuple(range(1, ranks + 1))):  # equal shares and ragged ones
        for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
            x, grad = sample(counts)
            whole = nn.BatchNorm2d(3, dtype=torch.float64, **options)
            whole.load_state_dict(fresh(**options).state_dict())
            part = fresh(**options)
            set_norm_group(part, dist.group.WORLD)
            for _ in range(2):  # twice: the running statistics move on from where they are
                everything = x.clone().requires_grad_()
                whole.zero_grad()
                expect = whole(everything)
                expect.backward(grad)
                mine = x.split(counts)[rank].clone().requires_grad_()
                part.zero_grad()
                got = part(mine)
                got.backward(grad.split(counts)[rank])
                close(got, expect.split(counts)[rank])
                close(mine.grad, everything.grad.split(counts)[rank])
                for p, q in zip(part.parameters(), whole.parameters(), strict=True):
                    close(gather_sum(p.grad), q.grad)
                for a, b in zip(part.buffers(), whole.buffers(), strict=True):
                    close(a, b)
            part.eval()
            whole.eval()
            if part.track_running_stats:
                close(part(x), whole(x))


def one_of_two_groups(rank, ranks):
    """Four ranks as two pairs: each pair normalises over its own eight samples only."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x, _ = sample((4,) * ranks)
    norm = fresh()
    set_norm_group(norm, pairs[rank // 2])
    got = norm(x.split(4)[rank])
    expect = fresh()(x.split(8)[rank // 2]).split(4)[rank % 2]
    close(got, expect)


def sixteen_bit(rank, ranks):
    """fp16 values of spread 3 around 300: squares overflow fp16, and E[x^2] - E[x]^2 would lose the spread."""
    x, grad = sample((8,) * ranks, offset=300.0)
    x, grad = x.half(), grad.half()
    norm, reference = fresh(torch.float32), fresh()
    set_norm_group(norm, dist.group.WORLD)
    mine = x.split(8)[rank].clone().requires_grad_()
    got = norm(mine)
    assert got.dtype == torch.float16
    got.backward(grad.split(8)[rank])
    everything = x.double().requires_grad_()
    expect = reference(everything)
    expect.backward(grad.double())
    # the statistics are fp32's, the output and input gradient are rounded once to fp16 (2^-11 of up to 10)
    close(norm.running_var.double(), reference.running_var, 1e-5)
    close(got.double(), expect.split(8)[rank], 5e-3)
    close(mine.grad.double(), everything.grad.split(8)[rank], 5e-3)
    assert norm.weight.grad.dtype == torch.float32
    close(gather_sum(norm.weight.grad).double(), reference.weight.grad, 1e-3)


def whole_network(rank, ranks):
    """A residual network on a share of the batch against the same network on all of it, gradients summed."""
    torch.manual_seed(3)
    whole = create_model("resnet8", classes=5, in_channels=1).double()
    part = copy.deepcopy(whole)
    set_norm_group(part, dist.group.WORLD)
    assert copy.deepcopy(part).bn1.norm_group is part.bn1.norm_group  # an evaluation copy keeps working
    x = torch.randn(2 * ranks, 1, 8, 8, dtype=torch.float64)
    whole(x).square().sum().backward()
    part(x.split(2)[rank]).square().sum().backward()
    for (name, p), q in zip(part.named_parameters(), whole.parameters(), strict=True):
        got = gather_sum(p.grad)
        assert (got - q.grad).norm() <= 1e-10 * (1 + q.grad.norm()), name  # 1e-12 a layer, amplified through eight
    for (name, a), b in zip(part.named_buffers(), whole.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12), name


def merging(rank, ranks):
    torch.manual_seed(rank)
    model = create_model("resnet8", classes=5, in_channels=1).double()
    for _ in range(2):
        model(torch.randn(4, 1, 8, 8, dtype=torch.float64) + rank)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    merged = merged_buffers(model, dist.group.WORLD)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name  # the training model is left alone
    per_rank = [None] * ranks
    dist.all_gather_object(per_rank, norm_buffers(model))
    expect = merge_norm_statistics(per_rank)  # type: ignore[arg-type]
    assert set(merged) == set(expect) == set(before)
    for name in expect:
        close(merged[name], expect[name])
    assert any(not torch.equal(merged[name], before[name]) for name in before)
    copied = copy.deepcopy(model)
    copied.load_state_dict(merged, strict=False)
    answers = [None] * ranks
    dist.all_gather_object(answers, dict(copied.named_buffers()))
    for name, buffer in copied.named_buffers():
        assert torch.equal(buffer, answers[0][name]), name  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "ranks"),
    [
        (equals_one_process, 2),
        (equals_one_process, 3),
        (one_of_two_groups, 4),
        (sixteen_bit, 2),
        (whole_network, 3),
        (merging, 3),
    ],
)
def test_norm_group(body, ranks, tmp_path):
    spawn(body, ranks, tmp_path)
