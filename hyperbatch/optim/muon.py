"""Muon (Jordan et al., 2024) as a torch optimizer: it brings the singular values of a matrix's momentum close to 1.

    m = mu m + g           u = g + mu m (Nesterov), else m
    X = u / |u|            as a matrix: a convolution's kernel is out x (in kh kw)
    X = a X + b (X X^T) X + c (X X^T)^2 X            once per polynomial (a, b, c); approaches u's polar factor U V^T
    w = (1 - lr wd) w - lr adjusted X                normalize_weights: w is first scaled to |w| = sqrt(rows)

Parameters with fewer than two dimensions, and all in groups with adapt=False, take a momentum SGD step instead:
m = mu m + g + wd w, and w -= lr u. With decoupled decay, both kinds subtract wd w from w, whatever the (non-zero) lr.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch.errors import InputError, shown
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.rule import Entry, Rule, Update, full_grads
from hyperbatch.optim.tensors import Scalar, norms_of, scaled, unless
from hyperbatch.params import is_dtensor
from hyperbatch.vocabulary import MUON_ADJUSTMENTS, MUON_COEFFICIENTS

if TYPE_CHECKING:
    from hyperbatch.arena import Arena
    from hyperbatch.comm.grid import GridComm

Polynomial = tuple[float, float, float]

POLYNOMIALS: dict[str, tuple[Polynomial, ...]] = {
    # Keller Jordan: the steepest slope at 0. Singular values end up between about 0.7 and 1.2.
    "original": ((3.4445, -4.7750, 2.0315),),
    # Amsel et al., 2025 (Polar Express): each is optimal after the previous ones, with a margin of 1 % for rounding.
    "polar_express": (
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064835, -2.893047735332586, 0.5252849256975648),
        (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
        (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
        (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
        (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
        (1.875, -1.25, 0.375),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonSettings:
    """One group's settings at one step."""

    lr: Scalar
    momentum: float
    weight_decay: Scalar
    eps: float
    nesterov: bool
    steps: int
    coefficients: str | Sequence[Any]
    adjust_lr: str
    normalize_weights: bool
    decoupled_weight_decay: bool
    maximize: bool
    product_dtype: torch.dtype | None
    adapt: bool

    @property
    def polynomials(self) -> list[Polynomial]:
        """One polynomial per iteration. The last one is repeated if there are fewer than `steps`."""
        given = self.coefficients
        table = POLYNOMIALS[given] if isinstance(given, str) else given if isinstance(given[0], Sequence) else (given,)
        return [tuple(table[min(i, len(table) - 1)]) for i in range(self.steps)]

    def takes(self, weight: Tensor) -> bool:
        """Whether the parameter's momentum is orthogonalised."""
        return self.adapt and weight.ndim >= 2 and weight.numel() > 0

    def adjustment(self, weight: Tensor) -> float:
        """The factor of a matrix's rate, which depends on its shape."""
        rows, columns = matrix_shape(weight)
        if self.adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns)) if self.adjust_lr == "match_rms_adamw" else 1.0

    def shrink(self, *, matrix: bool) -> Scalar:
        """The fraction of a weight that decay subtracts in this step; 0 if the rate is 0."""
        if not self.decoupled_weight_decay:
            return self.lr * self.weight_decay if matrix else 0.0
        if isinstance(self.lr, Tensor):
            return unless(self.lr <= 0, self.weight_decay, 0.0)
        return self.weight_decay if self.lr > 0 else 0.0

    def normalization(self, relative_norm: Tensor) -> Tensor:
        """The factor that scales |w| to sqrt(rows), given |w| / sqrt(rows); 1 if w or the rate is 0."""
        return torch.where((relative_norm > 0) & (self.lr > 0), 1.0 / relative_norm, 1.0)

    def check(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
        if not (isinstance(self.steps, int) and self.steps >= 1):
            raise ValueError(f"steps must be a whole number above 0, not {shown(self.steps)}")
        if isinstance(self.coefficients, str):
            if self.coefficients not in MUON_COEFFICIENTS:
                raise ValueError(f"coefficients {self.coefficients!r} is not one of {', '.join(MUON_COEFFICIENTS)}")
        elif not _are_polynomials(self.coefficients):
            wanted = "a name, three numbers, or three numbers per iteration"
            raise ValueError(f"coefficients must be {wanted}, not {shown(self.coefficients)}")
        dtype = self.product_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"product_dtype must be a floating-point dtype of torch or None, not {shown(dtype)}")
        if self.adjust_lr not in MUON_ADJUSTMENTS:
            raise ValueError(f"adjust_lr {self.adjust_lr!r} is not one of {', '.join(MUON_ADJUSTMENTS)}")

    def next_group_state(self) -> dict[str, Scalar]:
        return {}


def _are_polynomials(given: Any) -> bool:
    table = given if isinstance(given, Sequence) and given and isinstance(given[0], Sequence) else (given,)
    return all(isinstance(p, Sequence) and len(p) == 3 and all(isinstance(x, Real) for x in p) for p in table)


def matrix_shape(weight: Tensor) -> tuple[int, int]:
    return len(weight), weight.numel() // len(weight)


def polar_factor(matrices: Tensor, h: MuonSettings, dtype: torch.dtype) -> Tensor:
    """An approximation of U V^T for a batch of matrices U S V^T: the polynomials bring singular values close to 1.

    Products are computed in `dtype`. Tall matrices are transposed first, so that X X^T is the smaller product.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=h.eps)
    x = (matrices / norms).to(dtype)
    x = x.mT if tall else x
    for a, b, c in h.polynomials:
        gram = x @ x.mT
        # b A + c A A. alpha=0 is avoided: with it, torch 2.13 ignores beta in bf16 on a CPU.
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else b * gram
        x = torch.baddbmm(x, factor, x, beta=a)  # a X + (b A + c A A) X
    return (x.mT if tall else x).to(matrices.dtype)


def muon_update(weight: Tensor, grad: Tensor, momentum_buffer: Tensor, h: MuonSettings) -> Update:
    """The reference implementation: computes one layer's step in full precision and returns new tensors."""
    matrix = h.takes(weight)
    g = -grad if h.maximize else grad
    weight_norm = norms_of([weight])[0]
    if not matrix and not h.decoupled_weight_decay:
        g = g + weight * h.weight_decay
    buffer = momentum_buffer * h.momentum + g
    direction = g + buffer * h.momentum if h.nesterov else buffer
    keep, rate = 1.0 - h.shrink(matrix=matrix), h.lr
    if matrix:
        dtype = h.product_dtype or weight.dtype
        direction = polar_factor(direction.flatten(1)[None], h, dtype).view(direction.shape)
        rate = rate * h.adjustment(weight)
        if h.normalize_weights:
            keep = keep * h.normalization(weight_norm / len(weight) ** 0.5)
    return Update(weight * keep - direction * rate, (buffer,), weight_norm, torch.ones_like(weight_norm))


def memory_shape(weight: Tensor) -> tuple[int, int] | None:
    """Returns the rows and columns of the matrix in its (dense) memory layout; None if the memory is not one matrix.

    Columns may be in any order, and the matrix may be transposed; its polar factor then has the same layout.
    """
    rows, columns = matrix_shape(weight)
    strides = torch.empty_like(weight, device="meta").stride()
    others = [stride for stride, size in zip(strides[1:], weight.shape[1:], strict=True) if size > 1]
    if rows == 1 or not others or strides[0] > max(others):
        return rows, columns
    return (columns, rows) if strides[0] < min(others) else None


PolarFactors = Callable[[list[Tensor], MuonSettings], list[Tensor]]


def polar_factors(directions: list[Tensor], h: MuonSettings) -> list[Tensor]:
    """Computes polar factors of parameters of any shape. On a GPU, matrices of one shape or its transpose are a batch.

    On a CPU each is computed alone. There the bits of a result depend on the batch size, so ranks that share matrices
    would get other weights than one rank that has them all.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, direction in enumerate(directions):
        kind = (*sorted(matrix_shape(direction)), direction.dtype) if direction.is_cuda else (i,)
        alike.setdefault(kind, []).append(i)
    found = list(directions)
    for places in alike.values():
        batch = torch.stack([_wide(directions[i]) for i in places])
        for i, wide in zip(places, polar_factor(batch, h, product_dtype(h, batch)), strict=True):
            tall = len(directions[i]) > wide.shape[0]
            found[i] = (wide.mT if tall else wide).reshape(directions[i].shape)
    return found


def _wide(direction: Tensor) -> Tensor:
    matrix = direction.flatten(1)
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def product_dtype(h: MuonSettings, like: Tensor) -> torch.dtype:
    """The dtype of the products. On a GPU it is 16-bit, because fp32 takes many times as long."""
    return h.product_dtype or (torch.bfloat16 if like.is_cuda and like.dtype == torch.float32 else like.dtype)


def muon_foreach(
    entries: list[Entry],
    h: MuonSettings,
    grad_norms: Tensor,
    grad_scale: Tensor | None,
    skip: Tensor | None,
    *,
    factors: PolarFactors = polar_factors,
) -> tuple[Tensor, Tensor]:
    """Updates all layers of a group with each operation. A skipped step has no gradient, momentum 1 and rate 0."""
    grads = full_grads(entries, grad_scale, skip, negated=h.maximize)
    lr, momentum = h.lr, h.momentum
    if skip is not None:
        lr, momentum = unless(skip, lr, 0.0), unless(skip, momentum, 1.0)
    weight_norms = list(torch.full_like(grad_norms, torch.nan).unbind())
    for matrix in (True, False):
        places = [i for i, entry in enumerate(entries) if h.takes(entry.weight) is matrix]
        if not places:
            continue
        weights, buffers = [entries[i].weight for i in places], [entries[i].state[0] for i in places]
        d = [grads[i] for i in places]
        if not matrix and not h.decoupled_weight_decay:
            decay = h.weight_decay if skip is None else unless(skip, h.weight_decay, 0.0)
            d = list(torch._foreach_add(d, scaled(weights, decay)))
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, d)
        direction = list(torch._foreach_add(d, buffers, alpha=h.momentum)) if h.nesterov else buffers
        keep = 1.0 - h.shrink(matrix=matrix)
        if matrix:
            direction = torch._foreach_mul(factors(direction, h), [h.adjustment(weight) for weight in weights])
            if h.normalize_weights:
                norms = list(norms_of(weights).unbind())
                for i, norm in zip(places, norms, strict=True):
                    weight_norms[i] = norm
                relative = torch._foreach_mul(norms, [len(weight) ** -0.5 for weight in weights])
                keep = keep * h.normalization(torch.stack(list(relative)))
        if skip is not None:
            keep = unless(skip, keep, 1.0)
        if isinstance(keep, Tensor) or keep != 1.0:
            torch._foreach_copy_(weights, scaled(weights, keep))
        torch._foreach_sub_(weights, scaled(list(direction), lr))
    return torch.stack(weight_norms), torch.ones_like(grad_norms)


MUON_RULE = Rule(
    name="muon",
    settings=MuonSettings,
    fields=tuple(MuonSettings.__dataclass_fields__),
    state_names=("momentum_buffer",),
    group_state_names=(),
    update=muon_update,
    foreach=muon_foreach,
    shardable=False,  # a step needs whole matrices
)


class Muon(LayerwiseOptimizer):
    """Muon. Like `LARS`, it supports fp32 masters, the arena, loss scaling, skipped steps and CUDA graphs.

    A parameter with two or more dimensions is a matrix whose rows are its first dimension. Groups with `adapt=False`
    and all other parameters take momentum SGD steps; this is usual for the first and the last layer.
    """

    rule = MUON_RULE

    def __init__(
        self,
        params: Any,
        lr: Scalar | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = True,
        steps: int = 5,
        coefficients: str | Sequence[Any] = "original",
        adjust_lr: str = "original",
        eps: float = 1e-7,
        normalize_weights: bool = False,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        product_dtype: torch.dtype | None = None,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        arena: Arena | None = None,
    ) -> None:
        """lr: may be omitted if every param group has its own.

        steps: iterations of the polynomial that orthogonalises the momentum.
        coefficients: "original", "polar_express", three numbers, or three numbers per iteration.
        adjust_lr: a matrix's rate is multiplied by sqrt(max(1, rows / columns)) ("original"), by
        0.2 sqrt(max(rows, columns)) ("match_rms_adamw") or by nothing ("none").
        normalize_weights: scales a matrix to the norm sqrt(rows) before each update.
        decoupled_weight_decay: each step subtracts `weight_decay * w`; otherwise `lr * weight_decay * w` from matrices,
        and the rest decays as in torch's SGD.
        product_dtype: the dtype of the matrix products. None means bf16 on a GPU, and the weights' dtype on a CPU and
        in the reference.
        maximize, capturable, foreach, fused, arena: as in `LARS`.
        """
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "steps": steps,
            "coefficients": coefficients,
            "adjust_lr": adjust_lr,
            "eps": eps,
            "normalize_weights": normalize_weights,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "product_dtype": product_dtype,
            "capturable": capturable,
            "adapt": True,
        }
        super().__init__(params, defaults, arena=arena, capturable=capturable, foreach=foreach, fused=fused)

    def share(self, comm: GridComm) -> None:
        """Makes each rank of `comm` orthogonalise a share of the matrices. The resulting weights are the same.

        Every rank must have the same complete gradients, as from `GradSync` without `sharded` or from DDP.
        """
        from hyperbatch.comm.collectives import check_comm
        from hyperbatch.optim.shares import MatrixShares

        check_comm(comm)
        if self.foreach is False:
            raise InputError(
                "the reference path of Muon (foreach=False) cannot be distributed over ranks; leave foreach out"
            )
        self.shares = MatrixShares(comm)
        self.rule = replace(MUON_RULE, foreach=partial(muon_foreach, factors=self.shares.polar_factors))
        self._fused_step = None

    def check_group(self, group: dict[str, Any]) -> None:
        if any(is_dtensor(param) for param in group["params"]):
            raise ValueError(
                "Muon needs whole matrices and does not support DTensor parameters; use LARS for sharded models"
            )
        super().check_group(group)

    def why_not_fused(self) -> str | None:
        settings = [self.rule.read(group) for group in self.param_groups]
        dtypes = {h.product_dtype for h in settings if h.adapt}
        if len(dtypes) > 1 or not dtypes <= {None, torch.bfloat16, torch.float32}:
            return f"product_dtype is {', '.join(sorted(map(str, dtypes)))}, not bfloat16 or float32 in all groups"
        for h, group in zip(settings, self.param_groups, strict=True):
            if any(h.takes(param) and memory_shape(param) is None for param in group["params"]):
                return "the first dimension of a parameter is neither the outermost nor the innermost one in memory"
        return super().why_not_fused()
