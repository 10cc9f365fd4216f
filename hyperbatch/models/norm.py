"""Batch norm whose statistics may span a group of ranks, and the merging of per-rank statistics for evaluation.

    rank 0  x0 -> count, mean, variance --+                       +-> normalise x0
    rank 1  x1 -> count, mean, variance --+-- all-gather, pool ---+-> normalise x1

All sums are computed in fp32 (or fp64 for fp64 inputs). Variances are computed about a mean, never as E[x^2] - E[x]^2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperbatch.errors import InputError


class _Group:
    """Holds a process group so that a deep copy of the model shares it instead of failing on it."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self


class BatchNorm2d(nn.BatchNorm2d):
    """torch's BatchNorm2d, with the same names and maths. Given a process group, its training statistics span those
    ranks.

    Inputs may be 16-bit with fp32 parameters. Parameter gradients remain those of this rank's samples.
    """

    # A class attribute, so that a torch layer that `layers.adopt` turns into this class starts without a group.
    norm_group: _Group | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.norm_group is None:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, var, count = _SharedBatchNorm.apply(
            input, self.weight, self.bias, self.eps, self.norm_group.process_group
        )
        self._update_running(mean, var, count)
        return output

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        self.blend_running(mean, var, count)

    @torch.no_grad()
    def blend_running(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Updates the running statistics with this batch's mean and biased variance. The batch must already be
        counted."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # As in torch, momentum None means a plain average over all batches. A tensor as weight avoids a
        # synchronisation.
        weight = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


class _SharedBatchNorm(torch.autograd.Function):
    """Returns (output, mean, biased variance, count) with statistics over all ranks of the group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _widen(x)
        local_var, local_mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
        local_count = local_mean.new_full((1,), x.numel() // x.shape[1])
        mean, var, count = pool_moments(gather_rows(torch.cat([local_mean, local_var, local_count]), group))
        scale = torch.rsqrt(var + eps)
        normal = (wide - _lift(mean)) * _lift(scale)
        output = normal
        if weight is not None and bias is not None:
            output = torch.addcmul(_lift(bias.to(wide.dtype)), normal, _lift(weight.to(wide.dtype)))
        # x is saved and normalised again in backward: saving the fp32 result would double the memory of a 16-bit run.
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        grad = _widen(grad_output)
        normal = (_widen(x) - _lift(mean)) * _lift(scale)
        grad_bias = grad.sum((0, 2, 3))
        grad_weight = (grad * normal).sum((0, 2, 3))
        grad_x = None
        if ctx.needs_input_grad[0]:
            # Each input changes the mean and variance of every rank of the group, so both sums span the group.
            sums = torch.stack([grad_bias, grad_weight])
            dist.all_reduce(sums, group=ctx.group)
            mean_grad, mean_grad_normal = (sums / count).unbind()
            gain = scale if weight is None else scale * weight.to(scale.dtype)
            grad_x = (grad - _lift(mean_grad) - normal * _lift(mean_grad_normal)) * _lift(gain)
            grad_x = grad_x.to(x.dtype)
        if weight is None:
            return grad_x, None, None, None, None
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


def _widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _lift(per_channel: Tensor) -> Tensor:
    return per_channel.view(1, -1, 1, 1)


def gather_rows(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the rows of all ranks, [ranks, len(row)], in rank order, so that every rank pools in the same order."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return torch.stack(rows)


def pool_moments(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, biased variance and count of all samples, from one row of (means, biased variances, count) per
    rank."""
    channels = (rows.shape[1] - 1) // 2
    means, variances, counts = rows.split([channels, channels, 1], dim=1)
    count = counts.sum(0)
    share = counts / count
    mean = (share * means).sum(0)
    var = (share * (variances + (means - mean).square())).sum(0)
    return mean, var, count


def set_norm_group(model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Makes every batch norm of the model compute its training statistics over the ranks of the group. With None, they
    are those of this rank.

    Call it in the same way on each rank of the group: from then on, a training forward is a collective.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    foreign = next((norm for norm in norms if not isinstance(norm, BatchNorm2d)), None)
    if foreign is not None:
        raise InputError(f"--bn-group-ranks: {type(foreign).__name__} cannot share statistics between ranks; use 1")
    if not norms and process_group is not None:
        raise InputError(f"--bn-group-ranks: {type(model).__name__} has no batch norm; use 1")
    for norm in norms:
        assert isinstance(norm, BatchNorm2d)
        norm.norm_group = None if process_group is None else _Group(process_group)


def keep_statistics(norm: _BatchNorm) -> None:
    """Makes the norm use its running statistics without updating them from now on, even while the model is trained."""
    norm.eval()
    norm.train = MethodType(_stay, norm)


def keeps_statistics(norm: nn.Module) -> bool:
    return getattr(vars(norm).get("train"), "__func__", None) is _stay


def _stay(self: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces `Module.train`, which is called for the whole model after each evaluation."""
    return self


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Freezes these parameters. A batch norm whose parameters are all frozen also keeps its statistics, because they
    belong to the weights before it."""
    for prefix, module in model.named_modules():
        own = {f"{prefix}.{name}" if prefix else name: param for name, param in module.named_parameters(recurse=False)}
        frozen = [name for name in own if name in names]
        for name in frozen:
            own[name].requires_grad_(False)
        if frozen and isinstance(module, _BatchNorm) and not any(param.requires_grad for param in own.values()):
            keep_statistics(module)


def _statistics(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields pairs of names (running mean, running variance). A mean that has no variance, as of a layer that only
    centres its input, is a buffer like any other."""
    known = set(names)
    for name in names:
        var_name = f"{name.removesuffix('running_mean')}running_var"
        if name.endswith("running_mean") and var_name in known:
            yield name, var_name


def merge_norm_statistics(per_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merges the norm buffers of all ranks into one set: mean of means; mean variance + variance of means.

    The variance of means is not contained in the ranks' own variances. Other buffers (the batch count) are rank 0's.
    """
    return merge_rows({name: torch.stack([buffers[name] for buffers in per_rank]) for name in per_rank[0]})


def merge_rows(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`merge_norm_statistics` for stacked tensors [ranks, ...]."""
    merged = {name: tensor[0].clone() for name, tensor in stacked.items()}
    for mean_name, var_name in _statistics(list(stacked)):
        means, variances = stacked[mean_name].double(), stacked[var_name].double()
        merged[mean_name].copy_(means.mean(0))
        merged[var_name].copy_(variances.mean(0) + means.var(0, correction=0))
    return merged


def norm_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the running statistics and batch counts of every batch norm, by their names in the state dict. They are
    not copies."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that belong to the model's state, by name. They are not copies.

    A module computes buffers with persistent=False from its arguments: masks, tables of positions, the rate of a
    branch. They are not in the state dict, and an exported model that contained them could not be loaded by other
    programs. So neither averages nor checkpoints keep them, and a resumed run uses those of the model that it builds.
    """
    return {full_name: module.get_buffer(name) for full_name, (module, name) in buffer_places(model).items()}


def buffer_places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Returns the module and the attribute of each of the `persistent_buffers`. Look the tensor up each time, because a
    module's forward may replace it (`self.mean = ...`)."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def merged_buffers(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """`merge_over_ranks` of the model's norm buffers. The model's own buffers do not change."""
    return merge_over_ranks(norm_buffers(model), process_group)


@torch.no_grad()
def merge_over_ranks(own: Mapping[str, Tensor], process_group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """`merge_norm_statistics` over the ranks of a group (None: all ranks), in two small all-reduces. Returns copies;
    this rank's own buffers do not change. Every rank must call it, and every rank gets the same bits."""
    merged = {name: buffer.clone(memory_format=torch.contiguous_format) for name, buffer in own.items()}
    names = list(_statistics(list(own)))
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return merged
    statistics = {name for pair in names for name in pair}
    for name, buffer in merged.items():  # integers count batches, which are the same on every rank
        if name not in statistics and (buffer.is_floating_point() or buffer.is_complex()):
            dist.broadcast(buffer, group=process_group, group_src=0)
    if not names:
        return merged
    ranks = dist.get_world_size(process_group)
    means = torch.cat([own[name].double().reshape(-1) for name, _ in names])
    variances = torch.cat([own[name].double().reshape(-1) for _, name in names])
    mean = means.clone()
    dist.all_reduce(mean, group=process_group)
    mean /= ranks
    var = variances + (means - mean).square()
    dist.all_reduce(var, group=process_group)
    var /= ranks
    sizes = [own[name].numel() for name, _ in names]
    for (mean_name, var_name), m, v in zip(names, mean.split(sizes), var.split(sizes), strict=True):
        merged[mean_name].copy_(m.view_as(merged[mean_name]))
        merged[var_name].copy_(v.view_as(merged[var_name]))
    return merged
