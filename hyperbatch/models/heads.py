"""Attention whose backward concatenates the gradients of queries, keys and values in one pass, and sums their columns.

    forward     h = x @ w.T + b  [samples, tokens, 3 * width]  ->  q, k, v  [samples, heads, tokens, width of one]
    backward    dq, dk, dv       ->  dh, and the gradient of b: its column sums                     kernels/stack.py

The attention itself and the products are torch's. The operations are registered with torch. On a CPU, in other
precisions and without Triton, they run torch's own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hyperbatch.models.attention import attention
from hyperbatch.models.gelu import FEW_ROWS, by_kernels
from hyperbatch.models.layers import with_constant_bias
from hyperbatch.models.vit import Attention


@torch.library.custom_op("hyperbatch::stack_heads", mutates_args=())
def stack_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ([q | k | v] of each token, its sums over samples and tokens in fp32 or wider).

    q, k and v are [samples, heads, tokens, width]. If the heads of a token are not contiguous in memory, as they are in
    the gradients from torch's attention, they are copied first.
    """
    parts = [part.transpose(1, 2).flatten(2).contiguous() for part in (q, k, v)]
    if by_kernels(parts[0]):
        from hyperbatch.kernels.stack import stack

        return stack(*parts)
    wide = torch.promote_types(q.dtype, torch.float32)
    stacked = torch.cat(parts, 2)
    return stacked, stacked.to(wide).sum((0, 1))


@stack_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    samples, heads, tokens, width = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(samples, tokens, 3 * heads * width), q.new_empty(3 * heads * width, dtype=wide)


class _Heads(torch.autograd.Function):
    """Splits h into the queries, keys and values of each head. `bias` was the last summand of h; its gradient is
    computed here and must not be computed elsewhere."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
        ctx.dtype = bias.dtype
        return h.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dh, total = stack_heads(*gradients)
        return dh, total.to(ctx.dtype), None


def mixed_tokens(x: Tensor, qkv: nn.Linear, heads: int, dropout: float = 0.0) -> Tensor:
    """Returns the output of attention before its last product, [samples, tokens, width]."""
    q, k, v = _Heads.apply(with_constant_bias(qkv, x), qkv.bias, heads)
    return attention(q, k, v, dropout).transpose(1, 2).flatten(2)


class QuickAttention(Attention):
    stacks_heads = True

    def mixed(self, x: Tensor) -> Tensor:
        return mixed_tokens(x, self.qkv, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.proj(self.mixed(x)))


@functools.cache
def quick_timm_attention(attention: type[nn.Module]) -> type[nn.Module]:
    """Returns timm's attention class with another forward. Calls with a mask use timm's own forward."""

    def mixed(self: Any, x: Tensor) -> Tensor:
        return mixed_tokens(x, self.qkv, self.num_heads, self.attn_drop.p if self.training else 0.0)

    def forward(self: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
        if any(arg is not None and arg is not False for arg in (*args, *named.values())):
            return attention.forward(self, x, *args, **named)
        return self.proj_drop(self.proj(self.mixed(x)))

    methods = {"mixed": mixed, "forward": forward, "stacks_heads": True, "__module__": __name__}
    return type(f"Quick{attention.__name__}", (attention,), methods)


def compile_heads(layers: Iterable[Any], dtype: torch.dtype) -> None:
    """Launches each variant of the kernels once, on a few rows. Call it inside `kernels.compile.compiling`."""
    from hyperbatch.kernels import gelu, stack

    for device, columns in {(layer.qkv.weight.device, layer.qkv.out_features // 3) for layer in layers}:
        x = torch.empty(FEW_ROWS, columns, dtype=dtype, device=device)
        if gelu.takes(x):
            stack.stack(x, x, x)
