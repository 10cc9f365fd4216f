"""`models.whitenet` in fused 16-bit kernels: training and evaluation. Reference: the model's own layers.

    images ─ whiten, act ─ [conv ─ pool, statistics ─ norm, act] [conv ─ statistics ─ norm, act] ... ─ maximum ─ head
                                                               └── shortcut, in groups of three or more ──┘

There is one autograd function per unit, so that its gradients are ready to be exchanged as soon as its backward is
done. Saved for backward are a unit's input, the input of its norm, and one byte per pooled element. A pooled unit whose
input needs no gradient, such as the first unit after a frozen layer, never stores its convolution's output. Evaluation
launches the same kernels, so that no other kernels must be compiled; statistics that they compute are discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyperbatch.kernels import conv as convolution
from hyperbatch.kernels import norm as kernels
from hyperbatch.kernels.norm import conv_pool
from hyperbatch.kernels.norm import unit as unit_kernels
from hyperbatch.kernels.whiten import whiten
from hyperbatch.models.fused_blocks import ConvNorm, new_grad, saved_by, share_statistics, share_sums
from hyperbatch.models.fused_network import FusedNetwork
from hyperbatch.models.layers import to_logits
from hyperbatch.models.whitenet import ConvUnit, WhiteNet


class FusedUnit:
    """A convolution, an optional max-pool, a norm, an optional shortcut that is added, and an activation."""

    def __init__(self, unit: ConvUnit, counters: Tensor) -> None:
        self.layer = ConvNorm(unit.conv, unit.norm, counters)
        self.pooled = unit.pooled
        self.act = unit_kernels.ACTIVATIONS[type(unit.act)]
        # Receives the statistics that evaluation does not need.
        self.wasted = nn.BatchNorm2d(unit.norm.num_features, device=unit.norm.weight.device)

    def __call__(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        return Unit.apply(x, shortcut, self, *self.layer.parameters)

    def evaluate(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        conv, norm, counters = self.layer.conv, self.layer.norm, self.layer.counters
        if self.pooled and conv_pool.can_take(x, conv):
            p = conv_pool.conv_pool_statistics(x, conv, self.wasted, counters)[0].value
        elif self.pooled:
            p = unit_kernels.pool_statistics(convolution.convolve(x, conv), self.wasted, counters)[0].value
        else:
            p = convolution.convolve(x, conv)
        mean, var = norm.running_mean, norm.running_var
        assert mean is not None
        assert var is not None
        rstd = torch.rsqrt(var + norm.eps)
        scale = norm.weight * rstd
        coef = torch.stack([mean, rstd, scale, norm.bias - mean * scale])
        return unit_kernels.activate(p, coef, self.act, shortcut)


class Unit(torch.autograd.Function):
    """act(norm(pool(conv(x))) + shortcut). A unit that pools has no shortcut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shortcut: Tensor | None, unit: FusedUnit, *parameters: Tensor) -> Tensor:
        layer = unit.layer
        ctx.unit = unit
        ctx.without_z = unit.pooled and not ctx.needs_input_grad[0] and conv_pool.can_take(x, layer.conv)
        if ctx.without_z:
            pooled, coef = conv_pool.conv_pool_statistics(x, layer.conv, layer.norm, layer.counters, local=layer.shared)
        else:
            z = convolution.convolve(x, layer.conv)
            ctx.pixels = z.shape[2], z.shape[3]
            if unit.pooled:
                pooled, coef = unit_kernels.pool_statistics(z, layer.norm, layer.counters, local=layer.shared)
            else:
                pooled, coef = unit_kernels.Pooled(z, z), layer.statistics(z)
        if unit.pooled and layer.shared:
            coef = share_statistics(coef, kernels.matrix(pooled.value)[0], layer.norm)
        ctx.save_for_backward(*parameters, x, *pooled, coef, shortcut)
        return unit_kernels.activate(pooled.value, coef, unit.act, shortcut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        unit: FusedUnit = ctx.unit
        (layer,), (x, p, tap, coef, shortcut) = saved_by(ctx, [unit.layer])
        dy, grads = convolution.channels_last(dy), layer.new_gradients()
        unit_kernels.reduce_gradient(dy, p, coef, grads, layer.counters, unit.act, shortcut)
        if layer.shared:
            share_sums(grads, coef, layer.norm)
        of_norm = grads.weight if ctx.needs_input_grad[4] else None, grads.bias
        pooled = unit_kernels.Pooled(p, tap)
        if ctx.without_z:
            dw = new_grad(layer.parameters[0])
            conv_pool.weight_gradient_from_pooled(dy, pooled, coef, grads.back, unit.act, x, dw)
            return None, None, None, dw, *of_norm
        dshortcut = None
        if unit.pooled:
            dz = unit_kernels.apply_unpool_gradient(dy, pooled, coef, grads.back, unit.act, pixels=ctx.pixels)
        else:
            dz, dshortcut = unit_kernels.apply_gradient(dy, p, coef, grads.back, unit.act, shortcut)
        dw = layer.weight_gradient(dz, x)
        dx = layer.input_gradient(dz, x) if ctx.needs_input_grad[0] else None
        return dx, dshortcut, None, dw, *of_norm


class FusedWhiteNet(FusedNetwork):
    """Computes what `WhiteNet.forward` computes."""

    def __init__(self, model: WhiteNet) -> None:
        super().__init__(model)
        self.groups = [[FusedUnit(unit, self.counters) for unit in getattr(model, group)] for group in model.groups]
        self.norms = [unit.layer.norm for group in self.groups for unit in group]
        self.act = unit_kernels.ACTIVATIONS[type(model.act)]

    def logits(self, images: Tensor) -> Tensor:
        model = self.model
        x: Any = images.to(model.whiten.weight.dtype)
        frozen = not any(parameter.requires_grad for parameter in model.whiten.parameters())
        x = whiten(x, model.whiten, self.act) if frozen else convolution.channels_last(model.act(model.whiten(x)))
        return self._classify(x, FusedUnit.__call__)

    def evaluate(self, images: Tensor) -> Tensor:
        with torch.cuda.device_of(images):
            x = whiten(images.to(self.model.whiten.weight.dtype), self.model.whiten, self.act)
            return self._classify(x, FusedUnit.evaluate)

    def _classify(self, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        """Returns the logits of the whitened images. `run` is called with a unit, its input and its shortcut."""
        for first, *between, last in self.groups:
            x = shortcut = run(first, x)
            for unit in between:
                x = run(unit, x)
            x = run(last, x, shortcut if between else None)
        return to_logits(self.model.head(unit_kernels.Peak.apply(x))) * self.model.logit_scale
