"""Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, 2017) as a torch optimizer.

    trust = c |w| / (|g| + wd |w| + eps)          1 where |w| or |g| is 0, and for groups with adapt=False
    d     = g + wd w                              decoupled decay: d = g, and w -= wd w, whatever the (non-zero) lr

    lr_inside    m = mu m + lr trust d            w -= m              MLPerf's reference, TensorFlow, Optax
    rescaled     m = mu m lr/lr_last + lr trust d w -= m              NVIDIA, MXNet: a new lr rescales the whole buffer
    lr_outside   m = mu m + trust d               w -= lr m           timm, apex's LARC; with adapt=False torch's SGD
    unscaled     m = mu m + d                     w -= lr trust m     Google's unscaled momentum

Everything is computed in fp32 (fp64 for fp64 weights) on unscaled gradients; 16-bit weights get an fp32 master.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.rule import Entry, Rule, Update, full_grads, weight_norms_of
from hyperbatch.optim.tensors import Scalar, norms_of, scaled, unless
from hyperbatch.vocabulary import MOMENTUM_RULES

if TYPE_CHECKING:
    from hyperbatch.arena import Arena


@dataclass(frozen=True, kw_only=True, slots=True)
class LarsSettings:
    """One group's settings at one step."""

    lr: Scalar
    momentum: float
    weight_decay: Scalar
    trust_coefficient: float
    eps: float
    nesterov: bool
    trust_clip: bool
    momentum_rule: str
    decoupled_weight_decay: bool
    maximize: bool
    adapt: bool
    last_lr: Scalar = 0.0  # lr of the previous step; 0 if there was none, or if its lr of 0 emptied the buffer

    @property
    def buffer_scale(self) -> Scalar:
        """The factor by which the old momentum buffer is multiplied."""
        if self.momentum_rule != "rescaled":
            return self.momentum
        if isinstance(self.last_lr, Tensor):
            safe = torch.where(self.last_lr > 0, self.last_lr, 1.0)
            return torch.where(self.last_lr > 0, self.momentum * self.lr / safe, self.momentum)
        return self.momentum * self.lr / self.last_lr if self.last_lr > 0 else self.momentum

    @property
    def shrink(self) -> Scalar:
        """The fraction of a weight that decoupled decay subtracts in this step; 0 if the rate is 0."""
        if not self.decoupled_weight_decay:
            return 0.0
        if isinstance(self.lr, Tensor):
            return unless(self.lr <= 0, self.weight_decay, 0.0)
        return self.weight_decay if self.lr > 0 else 0.0

    def rates(self, trust: Any, lr: Any) -> tuple[Any, Any]:
        """Returns the gradient's factor when it is added to the buffer, and the buffer's when it updates the weight."""
        if self.momentum_rule == "lr_outside":
            return trust, lr
        if self.momentum_rule == "unscaled":
            return 1.0, lr * trust
        return lr * trust, 1.0

    def trust_ratio(self, weight_norm: Tensor, grad_norm: Tensor) -> Tensor:
        """The factor of a layer's learning rate. It is elementwise, so it works for one layer or a vector of layers."""
        decay = 0.0 if self.decoupled_weight_decay else self.weight_decay
        ratio = self.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + self.eps)
        if self.trust_clip:  # LARC: the effective rate lr * trust is at most lr; with lr = 0 no weight changes anyway
            safe = torch.where(self.lr > 0, self.lr, 1.0) if isinstance(self.lr, Tensor) else (self.lr or 1.0)
            ratio = (ratio / safe).clamp(max=1.0)
        return torch.where((weight_norm > 0) & (grad_norm > 0), ratio, 1.0)

    def check(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
        if not self.trust_coefficient > 0.0:
            raise ValueError(f"trust_coefficient must be positive, not {self.trust_coefficient}")
        if self.momentum_rule not in MOMENTUM_RULES:
            raise ValueError(f"momentum_rule {self.momentum_rule!r} is not one of {', '.join(MOMENTUM_RULES)}")
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov needs a momentum above 0")

    def next_group_state(self) -> dict[str, Scalar]:
        return {"last_lr": self.lr} if self.momentum_rule == "rescaled" else {}


def lars_update(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    h: LarsSettings,
    norms: Callable[[list[Tensor]], Tensor] = norms_of,
) -> Update:
    """The reference implementation: computes one layer's step in full precision and returns new tensors."""
    g = -grad if h.maximize else grad
    weight_norm, grad_norm = norms([weight, g])
    trust = h.trust_ratio(weight_norm, grad_norm) if h.adapt else torch.ones_like(weight_norm)

    d = g if h.decoupled_weight_decay else _plus(g, weight, h.weight_decay)
    inside, outside = h.rates(trust if h.adapt else 1.0, h.lr)
    d = _times(d, inside)
    buffer = momentum_buffer * h.buffer_scale + d
    direction = _plus(d, buffer, h.momentum) if h.nesterov else buffer
    new = _plus(_plus(weight, weight, -h.shrink), direction, -outside)
    return Update(new, (buffer,), weight_norm, trust)


def _plus(x: Tensor, y: Tensor, factor: Scalar) -> Tensor:
    """x + factor y. If the factor is a number, it uses the operation of torch.optim.SGD, so that the bits agree."""
    if isinstance(factor, Tensor):
        return x + y * factor
    return x.add(y, alpha=factor) if factor else x


def _times(x: Tensor, factor: Scalar) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


def lars_in_place(
    entries: list[Entry], h: LarsSettings, grad_norms: Tensor, grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The path for CPUs: one layer at a time while it is in the cache, no temporaries, factors on the host."""
    weight_norms, trust = _layer_norms(entries, h, grad_norms)
    lr, buffer_scale, shrink = float(h.lr), float(h.buffer_scale), float(h.shrink)
    coupled = 0.0 if h.decoupled_weight_decay else float(h.weight_decay)
    sign = (-1.0 if h.maximize else 1.0) / (1.0 if grad_scale is None else float(grad_scale))
    for entry, layer_trust in zip(entries, trust.tolist(), strict=True):
        w, g, (m,) = entry.weight, entry.grad, entry.state
        inside, outside = h.rates(layer_trust, lr)
        m.mul_(buffer_scale).add_(g, alpha=inside * sign)
        if coupled:
            m.add_(w, alpha=inside * coupled)
        own = -outside * inside if h.nesterov else 0.0  # Nesterov adds this step's gradient a second time
        if lost := shrink - own * coupled:
            w.add_(w, alpha=-lost)
        w.add_(m, alpha=-outside * (h.momentum if h.nesterov else 1.0))
        if own:
            w.add_(g, alpha=own * sign)
    return weight_norms, trust


def lars_foreach(
    entries: list[Entry], h: LarsSettings, grad_norms: Tensor, grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Updates all layers of a group with each operation; every factor stays on the device."""
    weight_norms, trust = _layer_norms(entries, h, grad_norms)
    weights, buffers = [entry.weight for entry in entries], [entry.state[0] for entry in entries]
    d = full_grads(entries, grad_scale, skip, negated=h.maximize)
    if not h.decoupled_weight_decay:
        d = torch._foreach_add(d, scaled(weights, h.weight_decay))
    # On a skipped step the buffer is multiplied by 1, and nothing is added to the weight or the buffer.
    inside, outside = h.rates(trust, h.lr)
    shrink, buffer_scale = h.shrink, h.buffer_scale
    if skip is not None:
        inside, outside, shrink = (unless(skip, x, 0.0) for x in (inside, outside, shrink))
        buffer_scale = unless(skip, buffer_scale, 1.0)
    d = scaled(list(d), inside)
    torch._foreach_mul_(buffers, buffer_scale)
    torch._foreach_add_(buffers, d)
    direction = buffers
    if h.nesterov:
        direction = list(torch._foreach_add(d, buffers, alpha=h.momentum))
    if h.decoupled_weight_decay:
        torch._foreach_sub_(weights, scaled(weights, shrink))
    torch._foreach_sub_(weights, scaled(direction, outside))
    return weight_norms, trust


def _layer_norms(entries: list[Entry], h: LarsSettings, grad_norms: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (|w|, trust) of each layer."""
    if not h.adapt:  # |w| is not needed, so the weights are not read
        return torch.full_like(grad_norms, torch.nan), torch.ones_like(grad_norms)
    weight_norms = weight_norms_of(entries)
    return weight_norms, h.trust_ratio(weight_norms, grad_norms)


LARS_RULE = Rule(
    name="lars",
    settings=LarsSettings,
    fields=tuple(LarsSettings.__dataclass_fields__),
    state_names=("momentum_buffer",),
    group_state_names=("last_lr",),
    update=lars_update,
    foreach=lars_foreach,
    in_place=lars_in_place,
    shardable=True,
)


class LARS(LayerwiseOptimizer):
    """LARS as a torch optimizer, with param groups, closures, LR schedulers, GradScaler and CUDA graphs.

        optimizer = LARS(param_groups(model, weight_decay=5e-5), lr=10.0, momentum=0.9)

    Groups with `adapt=False`, such as the norm parameters and biases of `param_groups`, take plain momentum SGD steps:
    their rate is not multiplied by a trust ratio. With `model.parameters()` every parameter is adapted.

    Paths: `fused` (CUDA with Triton, and the default there: two launches for all layers), `foreach` (the default on
    other GPUs), in place (the default on CPUs), and the reference (`foreach=False`). A step with an inf or nan in a
    gradient leaves weights and state unchanged on every path, without a host synchronisation.
    """

    rule = LARS_RULE

    def __init__(
        self,
        params: Any,
        lr: Scalar | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        trust_clip: bool = False,
        momentum_rule: str = "lr_inside",
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        arena: Arena | None = None,
    ) -> None:
        """lr: may be omitted if every param group has its own. It is much larger than SGD's, because a layer's rate is
        `lr * trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`.
        momentum_rule: "lr_inside" multiplies the gradient by the rate before it is added to the momentum; "lr_outside"
        multiplies the momentum by the rate, as torch's SGD does; "rescaled" and "unscaled" are in docs/lars.md.
        trust_clip: limits a layer's rate to `lr` (LARC).
        decoupled_weight_decay: each step subtracts `weight_decay * w`, independently of the rate.
        maximize: maximizes the objective instead of minimizing it.
        capturable: keeps `lr` and `weight_decay` on the device, for CUDA graphs.
        foreach, fused: True selects this path, and foreach=False the reference; None selects the fastest path that can
        run.
        arena: also stores the momentum. Gradients in it keep their addresses, so the fused path sends these only once.
        """
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "trust_clip": trust_clip,
            "momentum_rule": momentum_rule,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "capturable": capturable,
            "adapt": True,
            "last_lr": 0.0,
        }
        super().__init__(params, defaults, arena=arena, capturable=capturable, foreach=foreach, fused=fused)
