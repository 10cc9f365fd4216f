"""A norm with its ReLU, or with the sum that ends a block: in one launch if the tensor is small, else in two.

Ranks that share statistics exchange them between the two passes, so they call the steps of `two_pass` directly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hyperbatch.kernels.norm import one_pass, two_pass
from hyperbatch.kernels.norm.sums import Branch, NormGradients
from hyperbatch.kernels.norm.tiles import Handed, JoinedGradient, Output


def norm_relu(x: Tensor, norm: nn.BatchNorm2d, counters: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (relu(norm(x)), coef)."""
    output = Output.of(x)
    return output.y, _norm(x, norm, counters, output)


def norm_join(
    x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, shortcut: Tensor, shortcut_coef: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, bits, coef). out and bits are those of `two_pass.join`."""
    output = Output.of(x, shortcut, shortcut_coef, bits=True)
    return output.y, output.bits, _norm(x, norm, counters, output)


def _norm(x: Tensor, norm: nn.BatchNorm2d, counters: Tensor, output: Output) -> Tensor:
    """Fills the output and returns coef."""
    if one_pass.is_small(x):
        return one_pass.forward(x, norm, counters, output)
    coef = two_pass.statistics(x, norm, counters)
    two_pass.fill(output, x, coef, follows=True)
    return coef


def norm_relu_backward(dy: Tensor, x: Tensor, coef: Tensor, grads: NormGradients, counters: Tensor) -> Tensor:
    """Returns dx of relu(norm(x)), and fills `grads`."""
    assert not grads.local
    if one_pass.is_small(x):
        return one_pass.backward(dy, x, coef, grads, counters)
    two_pass.reduce_gradient(dy, x, coef, grads, counters)
    return two_pass.apply_gradient(dy, x, coef, grads.back, relu=True, follows=True)


def join_backward(
    dy: Tensor, bits: Tensor, branches: Sequence[Branch], counters: Tensor, *, dy2: Handed | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns (g, its column sums, dx of each branch), and fills their gradients.

    The arguments are those of `two_pass.reduce_joined_gradient`.
    """
    assert not any(branch.grads.local for branch in branches)
    if branches and one_pass.is_small(branches[0].x):
        joined = JoinedGradient.of(dy, dy2, bits)
        return joined.g, joined.sums, one_pass.join_backward(joined, branches, counters)
    g, sums = two_pass.reduce_joined_gradient(dy, bits, branches, counters, dy2=dy2)
    dxs = [
        two_pass.apply_gradient(g, b.x, b.coef, b.grads.back, relu=False, follows=b is branches[0]) for b in branches
    ]
    return g, sums, dxs
