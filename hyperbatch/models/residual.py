"""Blocks of a transformer whose residual sums and layer norms are one operation, and so are their gradients.

    x = x + attention(norm1(x))          x, n = fork(x, norm1)
    x = x + mlp(norm2(x))                x, n = join(x, attention(n), norm2)          kernels/add_norm.py
                                         x = x + mlp(n)

Inductor fuses the sum with the norm, too, but leaves the gradients of scale and shift in partial sums that torch adds
up in a launch for each. Operations are registered with torch; on a CPU, in other precisions and without Triton they run
torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyperbatch.kernels import has_triton, interpreted
from hyperbatch.models.gelu import FEW_ROWS
from hyperbatch.models.vit import Block


@torch.library.custom_op("hyperbatch::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(layer norm of the last dimension, mean and 1 / deviation of each row)."""
    if by_kernels(x):
        from hyperbatch.kernels import add_norm

        return add_norm.forward(x.contiguous(), None, weight, bias, eps)[1:]
    return _normalised(x, weight, bias, eps)


@torch.library.custom_op("hyperbatch::add_norm", mutates_args=())
def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(s = x + branch, and of s what `norm` gives)."""
    if by_kernels(x):
        from hyperbatch.kernels import add_norm

        return add_norm.forward(x.contiguous(), branch.contiguous(), weight, bias, eps)
    s = (x + branch).contiguous()
    return s, *_normalised(s, weight, bias, eps)


@torch.library.custom_op(
    "hyperbatch::add_norm_backward",
    mutates_args=(),
    schema="(Tensor? ds, Tensor dn, Tensor s, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
)
def add_norm_backward(
    ds: Tensor | None, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of s: what passes the norm by and what comes through it, [gradient of the scale, of the shift])."""
    if by_kernels(s):
        from hyperbatch.kernels import add_norm

        passing = None if ds is None else ds.contiguous()
        return add_norm.backward(passing, dn.contiguous(), s.contiguous(), weight, mean, rstd)
    wide = mean.dtype
    rows = [tensor.to(wide).reshape(-1, s.shape[-1]) for tensor in (dn, s)]
    g, v = rows[0], (rows[1] - mean[:, None]) * rstd[:, None]
    sums = torch.stack([(g * v).sum(0), g.sum(0)]).to(weight.dtype)
    g = g * weight.to(wide)
    d = rstd[:, None] * (g - g.mean(1, keepdim=True) - v * (g * v).mean(1, keepdim=True))
    d = d.view(s.shape) if ds is None else ds.to(wide) + d.view(s.shape)
    return d.to(s.dtype).contiguous(), sums


@norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), *_statistics_of(x)


@add_norm.register_fake
def _(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(x), _like(x), *_statistics_of(x)


@add_norm_backward.register_fake
def _(ds: Tensor | None, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _like(s), weight.new_empty(2, s.shape[-1])


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _statistics_of(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.numel() // x.shape[-1]
    return x.new_empty(rows, dtype=wide), x.new_empty(rows, dtype=wide)


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    n, mean, rstd = torch.native_layer_norm(x.to(wide), [x.shape[-1]], weight.to(wide), bias.to(wide), eps)
    return n.to(x.dtype).contiguous(), mean.flatten(), rstd.flatten()


def by_kernels(x: Tensor) -> bool:
    """Whether these operations run our kernels on a tensor."""
    if not (has_triton() and (x.is_cuda or interpreted())):
        return False
    from hyperbatch.kernels import add_norm

    return add_norm.takes(x)


class _Fork(torch.autograd.Function):
    """x -> x, norm(x): two ways that meet again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        n, mean, rstd = norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return x.view_as(x), n

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dn: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        d, sums = add_norm_backward(dx, dn, x, weight, mean, rstd)
        return d, sums[0], sums[1], None


class _Join(torch.autograd.Function):
    """x, branch -> s = x + branch, norm(s)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        s, n, mean, rstd = add_norm(x, branch, weight, bias, eps)
        ctx.save_for_backward(s, weight, mean, rstd)
        return s, n

    @staticmethod
    def backward(ctx: Any, ds: Tensor, dn: Tensor) -> tuple[Tensor | None, ...]:
        s, weight, mean, rstd = ctx.saved_tensors
        d, sums = add_norm_backward(ds, dn, s, weight, mean, rstd)
        return d, d, sums[0], sums[1], None


def fork(x: Tensor, layer: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """(x for the sum to come, norm(x))."""
    return _Fork.apply(x, layer.weight, layer.bias, layer.eps)  # pyright: ignore[reportReturnType]


def join(x: Tensor, branch: Tensor, layer: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """(s = x + branch, norm(s))."""
    return _Join.apply(x, branch, layer.weight, layer.bias, layer.eps)  # pyright: ignore[reportReturnType]


class QuickBlock(Block):
    joins_norms = True

    def forward(self, x: Tensor) -> Tensor:
        x, n = fork(x, self.norm1)
        x, n = join(x, self.drop_path(self.attn(n)), self.norm2)
        return x + self.drop_path(self.mlp(n))


@functools.cache
def quick_timm_block(block: type[nn.Module]) -> type[nn.Module]:
    """timm's block of a vision transformer with another forward. A mask of the attention is left to its own."""

    def forward(self: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
        if args or named:
            return block.forward(self, x, *args, **named)
        x, n = fork(x, self.norm1)
        x, n = join(x, self.drop_path1(self.ls1(self.attn(n))), self.norm2)
        return x + self.drop_path2(self.ls2(self.mlp(n)))

    return type(f"Quick{block.__name__}", (block,), {"forward": forward, "joins_norms": True, "__module__": __name__})


def compile_norms(blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Launches each variant of the kernels once, on a few rows; for inside of `kernels.compile.compiling`."""
    from hyperbatch.kernels import add_norm

    variants = {(layer.weight.shape, layer.weight.dtype, layer.bias.dtype): layer for layer in _norms(blocks)}
    for layer in variants.values():
        x = torch.empty(FEW_ROWS, *layer.normalized_shape, dtype=dtype, device=layer.weight.device)
        if add_norm.takes(x):
            _, _, mean, rstd = add_norm.forward(x, x, layer.weight, layer.bias, layer.eps)
            add_norm.forward(x, None, layer.weight, layer.bias, layer.eps)
            add_norm.backward(x, x, x, layer.weight, mean, rstd)


def _norms(blocks: Iterable[Any]) -> Iterator[nn.LayerNorm]:
    for block in blocks:
        yield from (block.norm1, block.norm2)
