"""Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, 2017) as a torch optimizer.

    trust = c |w| / (|g| + wd |w| + eps)          1 where |w| or |g| is 0, and for groups with adapt=False
    d     = g + wd w                              decoupled decay: d = g, and w loses wd w whatever the (non-zero) lr

    lr_inside    m = mu m + lr trust d            w -= m              MLPerf's reference, TensorFlow, Optax
    rescaled     m = mu m lr/lr_last + lr trust d w -= m              NVIDIA, MXNet: a new lr reaches the whole buffer
    lr_outside   m = mu m + trust d               w -= lr m           timm, apex's LARC; with adapt=False torch's SGD
    unscaled     m = mu m + d                     w -= lr trust m     Google's unscaled momentum

Everything is computed in fp32 (fp64 for fp64 weights) on unscaled gradients; 16-bit weights get an fp32 master.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hyperbatch.kernels import has_triton, interpreted
from hyperbatch.optim.base import (
    Entry,
    LayerStats,
    LayerwiseOptimizer,
    Scalar,
    norms_of,
    norms_of_layers,
    on_device,
    put,
    scalar,
    unless,
)
from hyperbatch.optim.dtensor import is_dtensor
from hyperbatch.vocabulary import MOMENTUM_RULES

if TYPE_CHECKING:
    from hyperbatch.arena import Arena
    from hyperbatch.optim.fused import FusedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
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
    last_lr: Scalar = 0.0  # of the step before; 0: none, or a step that left the buffer empty

    @property
    def buffer_scale(self) -> Scalar:
        """What the momentum buffer is multiplied by."""
        if self.momentum_rule != "rescaled":
            return self.momentum
        if isinstance(self.last_lr, Tensor):
            safe = torch.where(self.last_lr > 0, self.last_lr, 1.0)
            return torch.where(self.last_lr > 0, self.momentum * self.lr / safe, self.momentum)
        return self.momentum * self.lr / self.last_lr if self.last_lr > 0 else self.momentum

    @property
    def shrink(self) -> Scalar:
        """The part of itself that a weight loses to decoupled decay. At rate 0 it loses nothing."""
        if not self.decoupled_weight_decay:
            return 0.0
        if isinstance(self.lr, Tensor):
            return unless(self.lr <= 0, self.weight_decay, 0.0)
        return self.weight_decay if self.lr > 0 else 0.0


class Update(NamedTuple):
    weight: Tensor
    momentum_buffer: Tensor
    weight_norm: Tensor
    grad_norm: Tensor
    trust: Tensor


def trust_ratio(weight_norm: Tensor, grad_norm: Tensor, h: Hyper) -> Tensor:
    """How much of the rate a layer takes. Elementwise, so it serves one layer or a vector of them."""
    decay = 0.0 if h.decoupled_weight_decay else h.weight_decay
    ratio = h.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + h.eps)
    if h.trust_clip:  # LARC: the effective rate lr * trust is at most lr; at lr = 0 nothing moves anyway
        safe = torch.where(h.lr > 0, h.lr, 1.0) if isinstance(h.lr, Tensor) else (h.lr or 1.0)
        ratio = (ratio / safe).clamp(max=1.0)
    return torch.where((weight_norm > 0) & (grad_norm > 0), ratio, 1.0)


def lars_update(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    h: Hyper,
    *,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Update:
    """The reference: one layer's step in full precision, as new tensors. `skip` (0-d bool) leaves all as it was."""
    g = grad.to(weight.dtype)
    if grad_scale is not None:
        g = g / grad_scale
    if h.maximize:
        g = -g
    weight_norm, grad_norm = norms_of([weight, g])
    trust = trust_ratio(weight_norm, grad_norm, h) if h.adapt else torch.ones_like(weight_norm)
    scale: Scalar = trust if h.adapt else 1.0

    d = g if h.decoupled_weight_decay else _plus(g, weight, h.weight_decay)
    inside, outside = rates(h.momentum_rule, h.lr, scale)
    d = _times(d, inside)
    buffer = momentum_buffer * h.buffer_scale + d
    direction = _plus(d, buffer, h.momentum) if h.nesterov else buffer
    new = _plus(_plus(weight, weight, -h.shrink), direction, -outside)
    if skip is not None:
        new, buffer = torch.where(skip, weight, new), torch.where(skip, momentum_buffer, buffer)
    return Update(new, buffer, weight_norm, grad_norm, trust)


def _plus(x: Tensor, y: Tensor, factor: Scalar) -> Tensor:
    """x + factor y, with torch.optim.SGD's own operation where the factor is a number: the bits agree."""
    if isinstance(factor, Tensor):
        return x + y * factor
    return x.add(y, alpha=factor) if factor else x


def _times(x: Tensor, factor: Scalar) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


class LARS(LayerwiseOptimizer):
    """LARS with param groups, closures, LR schedulers, GradScaler and CUDA graphs, as any torch optimizer.

    Group key `adapt=False`: plain momentum SGD. Paths: `fused` (CUDA with Triton: two launches for all layers; the
    default there), `foreach` (the default elsewhere), and the reference when both are False. A step that meets an
    inf or nan gradient leaves weights and state untouched on every path, without a host synchronisation.
    """

    state_names = ("momentum_buffer",)
    _fused_step: FusedStep | None = None
    group_state_names = ("last_lr",)

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
        """lr: may be left out where every param group has its own.

        arena: keeps momentum beside the weights it already holds, and lets the fused path run without tables.
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._fused_step = None  # built at the next step, over all groups
        if self._fused and (reason := why_not_fused(self.param_groups)):
            self.param_groups.pop()
            raise ValueError(f"fused=True, but {reason}")

    def check_group(self, group: dict[str, Any]) -> None:
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum must be in [0, 1), not {group['momentum']}")
        if not group["trust_coefficient"] > 0.0:
            raise ValueError(f"trust_coefficient must be positive, not {group['trust_coefficient']}")
        if group["momentum_rule"] not in MOMENTUM_RULES:
            raise ValueError(f"momentum_rule {group['momentum_rule']!r} is not one of {', '.join(MOMENTUM_RULES)}")
        if group["nesterov"] and group["momentum"] == 0.0:
            raise ValueError("nesterov needs a momentum above 0")

    def step_fused(self) -> bool:
        if self._fused is False or (self._fused is None and self._foreach is not None):
            return False
        if not any(group["params"] for group in self.param_groups):
            return False
        if self._fused_step is None or not self._fused_step.holds():
            self._fused_step = None
            if reason := why_not_fused(self.param_groups):
                if self._fused:
                    raise ValueError(f"fused=True, but {reason}")
                return False
            from hyperbatch.optim.fused import FusedStep  # imports Triton

            self._fused_step = FusedStep(self)
        self._fused_step.run()
        return True

    def refresh(self) -> None:
        self._follow_arena()
        if self._fused_step is not None and self._fused_step.holds():
            self._fused_step.refresh()
        else:
            self._fused_step = None
            super().refresh()

    def update_group(
        self, group: dict[str, Any], entries: list[Entry], grad_norms: Tensor, skip: Tensor | None
    ) -> LayerStats:
        h = hyper(group, grad_norms.device)
        if self._foreach:
            update = foreach_update
        elif self._foreach is False:
            update = reference_update
        else:
            update = inplace_update if skip is None else foreach_update
        weight_norms, unscaled_norms, trust = update(entries, h, grad_norms, self.scale_of_grads(), skip)
        if h.momentum_rule == "rescaled":
            # A skipped step did not rescale the buffer.
            put(group, "last_lr", h.lr if skip is None else torch.where(skip, on_device(h.last_lr, skip.device), h.lr))
        return LayerStats([entry.name for entry in entries], weight_norms, unscaled_norms, trust)


def why_not_fused(groups: list[dict[str, Any]]) -> str | None:
    """What keeps these parameters from the fused kernels, or None."""
    params = [param for group in groups for param in group["params"]]
    dtypes = {param.dtype for param in params}
    if any(is_dtensor(param) for param in params):
        return "some parameters are DTensors; leave fused out for them"
    if not has_triton():
        return "Triton is not installed"
    if any(param.device != params[0].device for param in params):
        return "the parameters are on several devices"
    if params and params[0].device.type != ("cpu" if interpreted() else "cuda"):
        return f"the parameters are on {params[0].device}, not on a CUDA device"
    if not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        return f"parameters are {', '.join(sorted(map(str, dtypes)))}"
    if {torch.float16, torch.bfloat16} <= dtypes:
        return "some parameters are float16 and some bfloat16"
    return None


def hyper(group: dict[str, Any], device: torch.device | None = None) -> Hyper:
    return Hyper(**{name: scalar(group[name], name, device) for name in Hyper.__dataclass_fields__})


def reference_update(
    entries: list[Entry], h: Hyper, grad_norms: Tensor, grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`lars_update` on one layer after the other. Like its fast siblings it returns (|w|, |g|, trust) per layer."""
    rows = []
    for entry in entries:
        (buffer,) = entry.state
        update = lars_update(entry.weight, entry.grad, buffer, h, grad_scale=grad_scale, skip=skip)
        entry.weight.copy_(update.weight)
        buffer.copy_(update.momentum_buffer)
        rows.append(torch.stack([update.weight_norm, update.grad_norm, update.trust]))
    weight_norms, unscaled_norms, trust = torch.stack(rows, dim=1)
    return weight_norms, unscaled_norms, trust


def inplace_update(
    entries: list[Entry], h: Hyper, grad_norms: Tensor, grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For the CPU: a layer at a time while it is in the cache, no temporaries, factors read on the host."""
    weight_norms, unscaled_norms, trust = _layer_norms(entries, h, grad_norms, grad_scale)
    lr, buffer_scale, shrink = float(h.lr), float(h.buffer_scale), float(h.shrink)
    coupled = 0.0 if h.decoupled_weight_decay else float(h.weight_decay)
    sign = (-1.0 if h.maximize else 1.0) / (1.0 if grad_scale is None else float(grad_scale))
    for entry, layer_trust in zip(entries, trust.tolist(), strict=True):
        w, g, (m,) = entry.weight, entry.grad, entry.state
        inside, outside = rates(h.momentum_rule, lr, layer_trust)
        m.mul_(buffer_scale).add_(g, alpha=inside * sign)
        if coupled:
            m.add_(w, alpha=inside * coupled)
        own = -outside * inside if h.nesterov else 0.0  # Nesterov adds this step's share once more
        if lost := shrink - own * coupled:
            w.add_(w, alpha=-lost)
        w.add_(m, alpha=-outside * (h.momentum if h.nesterov else 1.0))
        if own:
            w.add_(g, alpha=own * sign)
    return weight_norms, unscaled_norms, trust


def foreach_update(
    entries: list[Entry], h: Hyper, grad_norms: Tensor, grad_scale: Tensor | None, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """All layers of a group per operation; every factor stays on the device."""
    weight_norms, unscaled_norms, trust = _layer_norms(entries, h, grad_norms, grad_scale)
    weights, buffers = [entry.weight for entry in entries], [entry.state[0] for entry in entries]
    d = [entry.grad.to(entry.weight.dtype) for entry in entries]
    if skip is not None:
        d = [torch.where(skip, 0.0, g) for g in d]  # inf times 0 would be nan
    sign = -1.0 if h.maximize else 1.0
    if h.maximize or grad_scale is not None:
        d = torch._foreach_mul(d, sign if grad_scale is None else sign / grad_scale)
    if not h.decoupled_weight_decay:
        d = torch._foreach_add(d, _scaled(weights, h.weight_decay))
    # On a skipped step the buffer is multiplied by 1 and nothing is added to weight or buffer.
    inside, outside = rates(h.momentum_rule, h.lr, trust)
    shrink, buffer_scale = h.shrink, h.buffer_scale
    if skip is not None:
        inside, outside, shrink = (unless(skip, x, 0.0) for x in (inside, outside, shrink))
        buffer_scale = unless(skip, buffer_scale, 1.0)
    d = _scaled(list(d), inside)
    torch._foreach_mul_(buffers, buffer_scale)
    torch._foreach_add_(buffers, d)
    direction = buffers
    if h.nesterov:
        direction = list(torch._foreach_add(d, buffers, alpha=h.momentum))
    if h.decoupled_weight_decay:
        torch._foreach_sub_(weights, _scaled(weights, shrink))
    torch._foreach_sub_(weights, _scaled(direction, outside))
    return weight_norms, unscaled_norms, trust


def rates(rule: str, lr: Any, trust: Any) -> tuple[Any, Any]:
    """What a step multiplies the gradient by on its way into the buffer, and the buffer on its way into the weight."""
    if rule == "lr_outside":
        return trust, lr
    if rule == "unscaled":
        return 1.0, lr * trust
    return lr * trust, 1.0


def _layer_norms(
    entries: list[Entry], h: Hyper, grad_norms: Tensor, grad_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    unscaled_norms = grad_norms if grad_scale is None else grad_norms / grad_scale
    if not h.adapt:  # |w| is not needed, and not worth a pass over the weights
        return torch.full_like(grad_norms, torch.nan), unscaled_norms, torch.ones_like(grad_norms)
    known = [entry.weight_norm for entry in entries if entry.weight_norm is not None]
    weight_norms = torch.stack(known) if known else norms_of_layers([entry.weight for entry in entries], entries)
    return weight_norms, unscaled_norms, trust_ratio(weight_norms, unscaled_norms, h)


def _scaled(tensors: list[Tensor], factor: Scalar) -> list[Tensor]:
    """Each tensor times one factor, or times its own element of a vector of them."""
    if isinstance(factor, Tensor) and factor.ndim == 1:
        wide = {dtype: factor.to(dtype).unbind() for dtype in {tensor.dtype for tensor in tensors}}
        return list(torch._foreach_mul(tensors, [wide[tensor.dtype][i] for i, tensor in enumerate(tensors)]))
    return list(torch._foreach_mul(tensors, factor))
