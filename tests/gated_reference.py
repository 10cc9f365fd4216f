"""A norm, squeeze-excite, residual add and ReLU in float64 by torch, and the kernels beside it, on any device."""

from __future__ import annotations

import copy

import timm_reference
import torch
from fused_reference import error
from norm_reference import Case, check_bits, new_gradients, norm64, of_pixels, poisoned
from torch import Tensor

from hyperbatch.kernels import norm as kernels
from hyperbatch.kernels.norm import gated
from hyperbatch.models.fused_gate import Gate

# Relative, of whole tensors. s, h and the gradients between the products are rounded to 16 bits, as torch does.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def new_gate(case: Case) -> timm_reference.SEModule:
    """Half of its ReLUs let through, the others do not, and none is so near 0 that a rounding turns it over."""
    torch.manual_seed(0)
    module = timm_reference.SEModule(case.x.shape[1], 24).to(case.x.device)
    for fc in (module.fc1, module.fc2):
        fc.weight.data = (2 * fc.weight.data).to(case.x.dtype)
    module.fc1.bias.data.copy_(3 * torch.tensor([1.0, -1.0]).repeat(12))
    return module


def exact(case: Case, module: timm_reference.SEModule, *, plain: bool, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(the sum before the ReLU, gradients of x, the norm, the gate, x2, and its norm where it has one)."""
    wide = copy.deepcopy(module).double()
    norms = [case.norm] if plain else [case.norm, case.norm2]
    affine = [[p.detach().double().requires_grad_() for p in (norm.weight, norm.bias)] for norm in norms]
    x, x2 = (tensor.detach().double().requires_grad_() for tensor in (case.x, case.x2))
    branch = wide(norm64(x, case.norm, *affine[0])[0])
    total = branch + (x2 if plain else norm64(x2, case.norm2, *affine[1])[0])
    leaves = [x, *affine[0], *wide.parameters(), x2, *(p for pair in affine[1:] for p in pair)]
    return total.detach(), list(torch.autograd.grad(total.relu(), leaves, dy.double()))


def check(case: Case, counters: Tensor, *, plain: bool, dy2: kernels.Handed | None = None) -> None:
    """Forward and backward, in memory that starts as nan. plain: the shortcut has no norm."""
    module, dtype = new_gate(case), case.x.dtype
    total, _ = exact(case, module, plain=plain, dy=case.dy)
    # Where the precision may not tell on which side of the ReLU a value is, no gradient does.
    doubtful = total.abs() < (4 * TOLERANCE[dtype] if dy2 is None else 0)
    dy = torch.where(doubtful, 0, case.dy).contiguous(memory_format=torch.channels_last)
    _, want = exact(case, module, plain=plain, dy=dy.double() + of_pixels(dy2, case.x))
    gate = Gate(module)
    with torch.no_grad(), poisoned():
        coef2 = None if plain else kernels.statistics(case.x2, case.norm2, counters)
        coef, means = gated.image_statistics(case.x, case.norm, counters)
        opened = gate.open(means, coef, gate.parameters, dtype)
        out, bits = gated.gated_join(case.x, coef, opened.gate, case.x2, coef2)
        grads, grads2 = new_gradients(case.norm), new_gradients(case.norm2)
        branches = [kernels.Branch(case.x, coef, grads)]
        branches += [] if coef2 is None else [kernels.Branch(case.x2, coef2, grads2)]
        g, sums, part = gated.reduce_gated(dy, bits, branches, counters, dy2=dy2)
        room = [torch.empty_like(parameter) for parameter in gate.parameters]
        ds, of_gate = gate.backward(part, coef, opened, gate.parameters, room)
        gated.finish_gated(part, means, opened.gate, ds, coef, grads, case.x)
        dx = gated.apply_gated(g, case.x, opened.gate, ds, grads.back)
    check_bits(bits, out)
    assert error(sums, g.double().sum((0, 2, 3))) < 1e-5
    dx2 = g if coef2 is None else kernels.apply_gradient(g, case.x2, coef2, grads2.back, relu=False)
    got = [dx, grads.weight, grads.bias, *of_gate, dx2, *([] if plain else [grads2.weight, grads2.bias])]
    errors = [error(out, total.relu()), *(error(a, b) for a, b in zip(got, want, strict=True))]
    assert max(errors) < TOLERANCE[dtype], errors
