"""Transformer blocks in which a residual sum and the layer norm after it are one operation, and so are their gradients.

    x = x + attention(norm1(x))          x, n = fork(x, norm1)
    x = x + mlp(norm2(x))                x, n = join(x, attention(n), norm2)          kernels/add_norm.py
                                         x = x + mlp(n)

Inductor fuses the sum with the norm, too, but computes the gradients of scale and shift as partial sums and adds them
up in a separate launch for each. If attention and MLP end with a linear layer, and nothing is dropped or scaled after
it, its bias is a summand of x. The pass that writes or reads the gradient of x then also sums up the bias's gradient.
The operations are registered with torch. On a CPU, in other precisions and without Triton, they run torch's own
operations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyperbatch.kernels import has_triton, interpreted
from hyperbatch.models.gelu import FEW_ROWS
from hyperbatch.models.layers import DropPath, with_constant_bias
from hyperbatch.models.vit import Block


@torch.library.custom_op("hyperbatch::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (layer norm over the last dimension, mean and 1 / standard deviation of each row)."""
    if by_kernels(x):
        from hyperbatch.kernels import add_norm

        return add_norm.forward(x.contiguous(), None, weight, bias, eps)[1:]
    return _normalised(x, weight, bias, eps)


@torch.library.custom_op("hyperbatch::add_norm", mutates_args=())
def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns s = x + branch, followed by the results of `norm` for s."""
    if by_kernels(x):
        from hyperbatch.kernels import add_norm

        return add_norm.forward(x.contiguous(), branch.contiguous(), weight, bias, eps)
    s = (x + branch).contiguous()
    return s, *_normalised(s, weight, bias, eps)


# Torch's caches of compiled code identify operations by name. If the results of an operation change, rename it.


@torch.library.custom_op(
    "hyperbatch::add_norm_backward",
    mutates_args=(),
    schema="(Tensor? ds, Tensor dn, Tensor s, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
)
def add_norm_backward(
    ds: Tensor | None, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (gradient of s, [gradient of the scale, gradient of the shift]). The gradient of s is ds, which bypasses
    the norm, plus the gradient that comes through the norm."""
    if by_kernels(s):
        from hyperbatch.kernels import add_norm

        passing = None if ds is None else ds.contiguous()
        return add_norm.backward(passing, dn.contiguous(), s.contiguous(), weight, mean, rstd)[:2]
    d, sums = _gradients(ds, dn, s, weight, mean, rstd)
    return d.to(s.dtype), sums


@torch.library.custom_op("hyperbatch::add_norm_bias_backward", mutates_args=())
def add_norm_bias_backward(
    ds: Tensor, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of `add_norm_backward`, and [column sums of ds, column sums of the gradient of s] in fp32 or
    wider."""
    if by_kernels(s):
        from hyperbatch.kernels import add_norm

        d, sums, totals = add_norm.backward(
            ds.contiguous(), dn.contiguous(), s.contiguous(), weight, mean, rstd, biases=True
        )
        assert totals is not None
        return d, sums, totals
    d, sums = _gradients(ds, dn, s, weight, mean, rstd)
    return d.to(s.dtype), sums, torch.stack([each.to(d.dtype).flatten(0, -2).sum(0) for each in (ds, d)])


def _gradients(
    ds: Tensor | None, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the gradients with torch's own operations. The gradient of s is not rounded yet."""
    wide = mean.dtype
    rows = [tensor.to(wide).reshape(-1, s.shape[-1]) for tensor in (dn, s)]
    g, v = rows[0], (rows[1] - mean[:, None]) * rstd[:, None]
    sums = torch.stack([(g * v).sum(0), g.sum(0)]).to(weight.dtype)
    g = g * weight.to(wide)
    d = rstd[:, None] * (g - g.mean(1, keepdim=True) - v * (g * v).mean(1, keepdim=True))
    d = d.view(s.shape)
    return (d if ds is None else ds.to(wide) + d).contiguous(), sums


@norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), *_statistics_of(x)


@add_norm.register_fake
def _(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(x), _like(x), *_statistics_of(x)


@add_norm_backward.register_fake
def _(ds: Tensor | None, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _like(s), weight.new_empty(2, s.shape[-1])


@add_norm_bias_backward.register_fake
def _(ds: Tensor, dn: Tensor, s: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _like(s), weight.new_empty(2, s.shape[-1]), mean.new_empty(2, s.shape[-1])


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
    """Whether these operations use our kernels for this tensor."""
    if not (has_triton() and (x.is_cuda or interpreted())):
        return False
    from hyperbatch.kernels import add_norm

    return add_norm.takes(x)


class _Fork(torch.autograd.Function):
    """x -> x, norm(x). Their two gradients are added in backward."""

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
    """x, branch -> s = x + branch, norm(s). The biases are used for their gradients only: see `join`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        branch_bias: Tensor | None,
        next_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        s, n, mean, rstd = add_norm(x, branch, weight, bias, eps)
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.dtypes = None if branch_bias is None or next_bias is None else (branch_bias.dtype, next_bias.dtype)
        return s, n

    @staticmethod
    def backward(ctx: Any, ds: Tensor, dn: Tensor) -> tuple[Tensor | None, ...]:
        s, weight, mean, rstd = ctx.saved_tensors
        if ctx.dtypes is None:
            d, sums = add_norm_backward(ds, dn, s, weight, mean, rstd)
            return d, d, sums[0], sums[1], None, None, None
        d, sums, totals = add_norm_bias_backward(ds, dn, s, weight, mean, rstd)
        of_branch, of_next = ctx.dtypes
        return d, d, sums[0], sums[1], None, totals[1].to(of_branch), totals[0].to(of_next)


def fork(x: Tensor, layer: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Returns (x for the later sum, norm(x))."""
    return _Fork.apply(x, layer.weight, layer.bias, layer.eps)


def join(
    x: Tensor,
    branch: Tensor,
    layer: nn.LayerNorm,
    branch_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (s = x + branch, norm(s)).

    If biases are given, both get their gradients here and nowhere else. branch_bias was the last summand of the branch.
    next_bias will be the last summand of the next branch, to which s is added; s must not be used for anything else.
    """
    args = (x, branch, layer.weight, layer.bias, layer.eps, branch_bias, next_bias)
    return _Join.apply(*args)


def _behind_fork(block: Any, x: Tensor, n: Tensor) -> Tensor:
    """Computes the rest of a block whose branches end with linear layers that nothing follows."""
    proj, fc2 = block.attn.proj, block.mlp.fc2
    branch = with_constant_bias(proj, block.attn.mixed(n))
    x, n = join(x, branch, block.norm2, proj.bias, fc2.bias)
    return x + with_constant_bias(fc2, block.mlp.act(block.mlp.fc1(n)))


def _is_idle(layer: Any) -> bool:
    """Whether the layer returns its input unchanged, even in training."""
    if isinstance(layer, DropPath):
        return layer.kept is None
    return type(layer) is nn.Identity or (isinstance(layer, nn.Dropout) and layer.p == 0)


class QuickBlock(Block):
    joins_norms = True
    sums_biases = False  # whether `_behind_fork` supports its branches; `quicken` sets it

    def forward(self, x: Tensor) -> Tensor:
        x, n = fork(x, self.norm1)
        if self.leaves_biases():
            return _behind_fork(self, x, n)
        x, n = join(x, self.drop_path(self.attn(n)), self.norm2)
        return x + self.drop_path(self.mlp(n))

    def leaves_biases(self) -> bool:
        return self.sums_biases and all(_is_idle(layer) for layer in (self.drop_path, self.attn.drop, self.mlp.drop))


@functools.cache
def quick_timm_block(block: type[nn.Module]) -> type[nn.Module]:
    """Returns timm's vision transformer block class with another forward. Calls with a mask use timm's own forward."""

    def forward(self: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
        if args or named:
            return block.forward(self, x, *args, **named)
        x, n = fork(x, self.norm1)
        if self.leaves_biases():
            return _behind_fork(self, x, n)
        x, n = join(x, self.drop_path1(self.ls1(self.attn(n))), self.norm2)
        return x + self.drop_path2(self.ls2(self.mlp(n)))

    def leaves_biases(self: Any) -> bool:
        if not self.sums_biases:
            return False
        attn, mlp = self.attn, self.mlp
        behind = self.ls1, self.drop_path1, attn.proj_drop, self.ls2, self.drop_path2, mlp.drop2
        return all(_is_idle(layer) for layer in (*behind, mlp.drop1, mlp.norm))

    methods = {"forward": forward, "leaves_biases": leaves_biases, "joins_norms": True, "sums_biases": False}
    return type(f"Quick{block.__name__}", (block,), {**methods, "__module__": __name__})


def compile_norms(blocks: Iterable[Any], dtype: torch.dtype) -> None:
    """Launches each variant of the kernels once, on a few rows. Call it inside `kernels.compile.compiling`."""
    from hyperbatch.kernels import add_norm

    blocks = list(blocks)
    variants = {(layer.weight.shape, layer.weight.dtype, layer.bias.dtype): layer for layer in _norms(blocks)}
    for layer in variants.values():
        x = torch.empty(FEW_ROWS, *layer.normalized_shape, dtype=dtype, device=layer.weight.device)
        if add_norm.takes(x):
            _, _, mean, rstd = add_norm.forward(x, x, layer.weight, layer.bias, layer.eps)
            add_norm.forward(x, None, layer.weight, layer.bias, layer.eps)
            for biases in {False, *(block.leaves_biases() for block in blocks)}:
                add_norm.backward(x, x, x, layer.weight, mean, rstd, biases=biases)


def _norms(blocks: Iterable[Any]) -> Iterator[nn.LayerNorm]:
    for block in blocks:
        yield from (block.norm1, block.norm2)
