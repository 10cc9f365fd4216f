"""One step with a rule's fused kernels: collects gradients, detects changes by other code, launches the kernels."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch.optim.base import LayerStats
from hyperbatch.optim.fused_kernels import LAMB_FORM, LARS_FORM, Group, KernelTensors
from hyperbatch.optim.fused_muon import MUON_FORM
from hyperbatch.optim.tensors import capturing, is_dense, on_device

if TYPE_CHECKING:
    from hyperbatch.optim.base import LayerwiseOptimizer

FORMS = {"lars": LARS_FORM, "lamb": LAMB_FORM, "muon": MUON_FORM}


class FusedStep:
    """Runs an optimizer's step with fused kernels, and keeps their tables up to date."""

    def __init__(self, optimizer: LayerwiseOptimizer) -> None:
        # This reference is weak because the optimizer owns this object.
        self._optimizer: LayerwiseOptimizer = weakref.proxy(optimizer)
        self._form, self._kind = FORMS[optimizer.rule.name], type(optimizer).__name__
        groups = optimizer.param_groups
        self._params = _params_of(groups)
        if capturing(self._params[0].device):
            raise RuntimeError(
                "run one step of the optimizer before capturing it, because that step creates its tables"
            )
        for param in self._params:
            _fit_state(param, optimizer.init_state(param))
        self._names = [name for _, part in optimizer.group_names() for name in part]
        self._captured: list[Tensor] = []  # keeps the tensors alive that captured graphs write to
        # Pairs (parameter with gaps in memory, tensor that the kernels write instead), copied back after each step.
        self._copied_back: list[tuple[Tensor, Tensor]] = []
        layers = [self._tensors(param, index) for index, group in enumerate(groups) for param in group["params"]]
        self._fits = [(x.weight, p.dtype, x.weight.stride()) for x, p in zip(layers, self._params, strict=True)]
        self._kernels = self._form.make(self._form, layers, optimizer)
        # Triples (group, key, tensor): where the kernels keep a number that the group carries from step to step.
        self._carried: list[tuple[Group, str, Tensor]] = []
        for group, number in zip(groups, self._kernels.carried, strict=True):
            for key in optimizer.rule.read(group).next_group_state():
                number.copy_(on_device(group[key], number.device))
                group[key] = number
                self._carried.append((group, key, number))
        optimizer.report_from(self._kernels.outcome, LayerStats(self._names, *self._kernels.stats.unbind(dim=1)))
        self._places, self._flags = self._live_places(), [self._form.flags(group) for group in groups]

    def _tensors(self, param: Tensor, group: int) -> KernelTensors:
        values = self._optimizer.state[param]
        state, master = tuple(values[key] for key in self._optimizer.state_names), values.get("master")
        if master is None:
            return KernelTensors(param, state, None, group)
        copy = None if param.dtype == torch.float32 else param if is_dense(param) else torch.empty_like(param)
        if copy is not param:
            self._copied_back.append((param, master if copy is None else copy))
        return KernelTensors(master, state, copy, group)

    def _live_places(self) -> list[Any]:
        """The addresses of everything that the tables point to. Runs on the host in every step, so it must be cheap."""
        params = _params_of(self._optimizer.param_groups)
        states = [x for state in self._optimizer.state.values() if type(state) is dict for x in state.values()]
        addresses = [*map(Tensor.data_ptr, params), *map(Tensor.data_ptr, states)]
        # Strides and dtypes too, because freed memory may be allocated again for the same parameter in another layout.
        return [*addresses, *map(Tensor.stride, params), *[param.dtype for param in params]]

    def holds(self) -> bool:
        """Whether parameters, state and flags are still the ones for which the tables were made."""
        groups = self._optimizer.param_groups
        same = [self._form.flags(group) for group in groups] == self._flags
        if same and all(group[key] is number for group, key, number in self._carried):
            if self._live_places() == self._places:
                return True
            for param in self._params:
                self._optimizer.init_state(param)  # copies state that other code replaced back into the arena
            if self._live_places() == self._places:
                return True
            what = "parameters or their state were moved"
        else:
            what = "settings other than lr and weight_decay were changed"
        if self._captured:
            raise RuntimeError(
                f"{what} after a CUDA graph captured the step of this {self._kind}; make a new one and capture it"
            )
        return False

    def refresh(self) -> None:
        """Adopts weights that other code wrote."""
        for param, source in self._copied_back:
            source.copy_(param)
        self._kernels.refresh()

    def run(self) -> None:
        optimizer, params, dense = self._optimizer, self._params, torch.strided
        grads = [param.grad for param in params]
        touched = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
        if not touched:
            return
        if not capturing(params[0].device):
            self.refresh()
        elif not optimizer.param_groups[0]["capturable"]:
            raise RuntimeError(f"{self._kind} must be made with capturable=True to be captured in a CUDA graph")
        else:
            self._captured = self._captured or [param.detach() for param in params]
        fitting = [
            g
            if g is None or (g.layout is dense and g.dtype == dtype and g.stride() == strides)
            else _fitting(g, like, dtype, name)
            for g, (like, dtype, strides), name in zip(grads, self._fits, self._names, strict=True)
        ]
        self._kernels.step(fitting, optimizer.param_groups, optimizer.scale_of_grads(), optimizer.told_inf())
        for param, source in self._copied_back:
            param.copy_(source)
        # Autograd detects changes to saved tensors by their version counters, which kernels do not increase.
        torch.autograd.graph.increment_version(touched)


def _params_of(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


def _fit_state(param: Tensor, state: dict[str, Tensor]) -> None:
    """Brings the state into fp32 and the weight's dense layout. Parameters may have moved since it was created."""
    like = torch.empty_like(param, dtype=torch.float32)
    if "master" not in state and not _same_layout(param, like):
        state["master"] = torch.empty_like(like).copy_(param)
    for key, tensor in state.items():
        if tensor.shape != like.shape:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}, but its parameter has {tuple(like.shape)}")
        if tensor.dtype != like.dtype or tensor.device != like.device or not _same_layout(tensor, like):
            state[key] = torch.empty_like(like).copy_(tensor)


def _fitting(grad: Tensor, like: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The gradient in its weight's memory layout and the parameter's dtype."""
    if grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is sparse; the fused kernels need dense gradients")
    if grad.dtype == dtype and _same_layout(grad, like):
        return grad
    return torch.empty_like(like, dtype=dtype).copy_(grad)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same strides, except in dimensions of size 1, where strides have no meaning."""
    return all(x == y or size == 1 for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True))
