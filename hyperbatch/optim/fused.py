"""The host's side of the fused kernels: tables of addresses, kept on the device and sent again only on a change.

chunks   [ weight, state, 16-bit copy | elements | layer, first element | first partial, partials | group ]    fixed
grads    [ address or 0 ]             new after zero_grad(set_to_none=True); constant over an arena
numbers  [ lr, decay, momentum, ... ] per group; capturable rates are read where they are
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.layerwise import (
    CHUNK_COLUMNS,
    COLUMNS,
    LAMB_CODE,
    LARS_CODES,
    MAX_PARTIALS,
    NEXT_CARRIED,
    norms_kernel,
    update_kernel,
    weight_norms_kernel,
)
from hyperbatch.optim.base import LayerStats
from hyperbatch.optim.tensors import capturing, is_dense, is_number, on_device, scalar

if TYPE_CHECKING:
    from hyperbatch.optim.base import LayerwiseOptimizer

CHUNK = 4096  # elements a program handles, unless the layer would need more than MAX_PARTIALS of them
BLOCK = 1024
WARPS = 4
CAPTURES = 16  # graphs whose gradient addresses can be held for replay
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KernelForm:
    """How the kernels are told of a rule."""

    flags: Callable[
        [Group], tuple[Any, ...]
    ]  # what a launch is compiled for: code, nesterov, clip, decoupled, maximize
    settings: Callable[[Group], list[float]]  # its columns of the table of numbers, behind lr and weight decay


def _lars_flags(group: Group) -> tuple[Any, ...]:
    names = ("nesterov", "trust_clip", "decoupled_weight_decay", "maximize")
    return LARS_CODES[group["momentum_rule"]], *(bool(group[name]) for name in names)


def _lars_settings(group: Group) -> list[float]:
    return [group["momentum"], group["trust_coefficient"], group["eps"], float(group["adapt"])]


def _lamb_flags(group: Group) -> tuple[Any, ...]:
    return LAMB_CODE, False, bool(group["trust_clip"]), False, False


def _lamb_settings(group: Group) -> list[float]:
    """What a beta leaves, and its logarithm, are taken here: fp32 would keep four digits of 1 - 0.999."""
    betas = group["betas"]
    logs = [math.log(beta) if beta > 0.0 else -math.inf for beta in betas]
    return [*betas, *(1.0 - beta for beta in betas), *logs, group["eps"], float(group["adapt"])]


FORMS = {"lars": KernelForm(_lars_flags, _lars_settings), "lamb": KernelForm(_lamb_flags, _lamb_settings)}


@dataclass(frozen=True, slots=True)
class KernelTensors:
    """What the kernels write for one parameter. All dense and laid out alike."""

    weight: Tensor  # fp32: the parameter or its master
    state: tuple[Tensor, ...]  # fp32: one or two
    copy: Tensor | None  # the 16-bit working weight
    group: int


class FusedKernels:
    """Two launches a step, and one more for each further combination of flags among the groups."""

    def __init__(
        self, form: KernelForm, layers: list[KernelTensors], groups: list[Group], *, fixed_grads: bool
    ) -> None:
        """fixed_grads: gradients keep their addresses, as in an arena."""
        self._form = form
        device = layers[0].weight.device
        # Programmatic dependent launch: launch 2 starts up under launch 1. Hopper and newer have it.
        self._overlap = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        # There is one 16-bit dtype at most; without any, the name of one is still needed.
        halves = {layer.copy.dtype for layer in layers if layer.copy is not None}
        self._has_half, self._half = bool(halves), TRITON_DTYPES[next(iter(halves), torch.float16)]

        # Chunks of groups with equal flags are neighbours, so that one launch covers them.
        flags = [form.flags(group) for group in groups]
        rows, self._launches, self._partials = [], [], 1
        for i in sorted(range(len(layers)), key=lambda i: flags.index(flags[layers[i].group])):
            made = _chunk_rows(layers[i], i, len(rows))
            kind = flags[layers[i].group]
            if not self._launches or self._launches[-1][0] != kind:
                self._launches.append([kind, len(rows), 0])
            self._launches[-1][2] += len(made)
            self._partials = max(self._partials, triton.next_power_of_2(len(made)))
            rows += made
        self._count = len(rows)
        self._fixed_aligned = all(address % 16 == 0 for row in rows for address in (*row[:3], row[9]))
        self._has_direction = any(kind[0] == LAMB_CODE for kind in flags)

        self._chunks = torch.tensor(rows or [(0,) * CHUNK_COLUMNS.value], dtype=torch.int64).to(device)
        self._grad_partials = torch.zeros(max(1, self._count), device=device)
        self._direction_partials = torch.zeros_like(self._grad_partials)
        self._weight_partials = torch.zeros_like(self._grad_partials)
        self._new_weight_partials = torch.zeros_like(self._grad_partials)
        self._clock = torch.tensor([0, 1, 0], dtype=torch.int32).to(device)
        self.outcome = torch.zeros(2, device=device)  # last step skipped; steps skipped
        self.stats = torch.full((len(layers), 3), torch.nan, device=device)
        self._grads_aligned = False
        self._grads = DeviceTable((len(layers),), torch.int64, device, fixed=fixed_grads)
        columns = 2 + len(form.settings(groups[0]))
        self._numbers = DeviceTable((len(groups), COLUMNS.value), torch.float32, device, columns=columns)
        self._rates = DeviceTable((len(groups), 2), torch.int64, device)
        self.carried = self._numbers.tensor[:, NEXT_CARRIED.value]  # one per group

    def refresh(self) -> None:
        """Takes the weights' norms anew, and masters from 16-bit weights that somebody else wrote."""
        if self._count:
            with torch.cuda.device_of(self._chunks):  # Triton launches on the current device
                weight_norms_kernel[(self._count,)](
                    self._chunks,
                    self._new_weight_partials,
                    HALF=self._half,
                    HAS_HALF=self._has_half,
                    ALIGNED=self._fixed_aligned,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                )

    def step(
        self,
        grads: list[Tensor | None],
        groups: list[Group],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """grads: laid out as the weights, or None; they must stay alive until the launches have run."""
        if self._count:
            with torch.cuda.device_of(self._chunks):
                self._launch(grads, groups, grad_scale, found_inf)

    def _launch(
        self, grads: list[Tensor | None], groups: list[Group], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
        if self._grads.send(addresses):
            self._grads_aligned = all(address % 16 == 0 for address in addresses)
        self._send_settings(groups)
        common = {
            "HALF": self._half,
            "HAS_HALF": self._has_half,
            "ALIGNED": self._fixed_aligned and self._grads_aligned,
            "BLOCK": BLOCK,
            "OVERLAP": self._overlap,
            "num_warps": WARPS,
        }
        tables = (
            self._chunks,
            self._grads.tensor,
            self._grad_partials,
            self._direction_partials,
            self._weight_partials,
            self._new_weight_partials,
            self._clock,
            self._numbers.tensor,
            self._rates.tensor,
            self.outcome if grad_scale is None else grad_scale,
        )
        scaled, told = grad_scale is not None, found_inf is not None
        sizes = {"GROUPS": len(groups), "SCALED": scaled, "DIRECTION": self._has_direction}
        norms_kernel[(self._count,)](*tables, **sizes, **common)
        for kind, first, count in self._launches:
            if count:
                update_kernel[(count,)](
                    first,
                    *tables,
                    found_inf if told else self.outcome,
                    self.outcome,
                    self.stats,
                    FLAGS=(scaled, told, *kind),
                    PARTIALS=self._partials,
                    **({"launch_pdl": True} if self._overlap else {}),
                    **common,
                )

    def _send_settings(self, groups: list[Group]) -> None:
        """Numbers go into the table; rates that live on the device are read where they are."""
        home, device, row_bytes = self._numbers.tensor.data_ptr(), self._numbers.tensor.device, 4 * COLUMNS.value
        numbers, rates = [], []
        for row, group in enumerate(groups):
            here = [_rate_of(group, name, device) for name in ("lr", "weight_decay")]
            rates.append([home + row_bytes * row + 4 * i if is_number(x) else x.data_ptr() for i, x in enumerate(here)])
            numbers.append([x if is_number(x) else 0.0 for x in here] + self._form.settings(group))
        self._numbers.send(numbers)
        self._rates.send(rates)


class FusedStep:
    """A step through the kernels: gathers gradients, notices changes from outside, launches."""

    def __init__(self, optimizer: LayerwiseOptimizer) -> None:
        # Held weakly: the optimizer owns this object.
        self._optimizer: LayerwiseOptimizer = weakref.proxy(optimizer)
        self._form, self._kind = FORMS[optimizer.rule.name], type(optimizer).__name__
        groups = optimizer.param_groups
        self._params = _params_of(groups)
        if capturing(self._params[0].device):
            raise RuntimeError("run one step of the optimizer before capturing it: its tables are made there")
        for param in self._params:
            _fit_state(param, optimizer.init_state(param))
        self._names = [name for _, part in optimizer.group_names() for name in part]
        self._captured: list[Tensor] = []  # what graphs write to: stays alive
        # (parameter with gaps in memory, what the kernels write instead): a copy follows each step.
        self._copied_back: list[tuple[Tensor, Tensor]] = []
        layers = [self._tensors(param, index) for index, group in enumerate(groups) for param in group["params"]]
        self._fits = [(x.weight, p.dtype, x.weight.stride()) for x, p in zip(layers, self._params, strict=True)]
        self._kernels = FusedKernels(self._form, layers, groups, fixed_grads=optimizer.arena is not None)
        # (group, key, where the kernels keep the number that the group carries from step to step)
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
        """Where everything lies that the tables point at. Taken on the host in every step, so it must be cheap."""
        params = _params_of(self._optimizer.param_groups)
        states = [x for state in self._optimizer.state.values() if type(state) is dict for x in state.values()]
        addresses = [*map(Tensor.data_ptr, params), *map(Tensor.data_ptr, states)]
        # Memory may have been given back and handed out again for the same parameter in another form.
        return [*addresses, *map(Tensor.stride, params), *[param.dtype for param in params]]

    def holds(self) -> bool:
        """Whether parameters, state and flags are still those that the tables were made for."""
        groups = self._optimizer.param_groups
        same = [self._form.flags(group) for group in groups] == self._flags
        if same and all(group[key] is number for group, key, number in self._carried):
            if self._live_places() == self._places:
                return True
            for param in self._params:
                self._optimizer.init_state(param)  # takes values into the arena that somebody put beside it
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
        """Takes over weights that were written from outside."""
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
        # What autograd's check for changed saved tensors looks at; the kernels wrote behind its back.
        torch.autograd.graph.increment_version(touched)


def _params_of(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


def _fit_state(param: Tensor, state: dict[str, Tensor]) -> None:
    """State in fp32 and laid out as the weight, or as a dense one: parameters may have moved since it was made."""
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
    """Strides of dimensions of size 1 mean nothing."""
    return all(x == y or size == 1 for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True))


class DeviceTable:
    """A small table on the device that is sent again only when its values change, without waiting for the device."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, columns: int = 0, fixed: bool = True
    ) -> None:
        """columns: only the first so many are the host's; 0: all.

        fixed: captured graphs rely on the values staying as they are. Otherwise each graph sends its own on replay,
        from a buffer that is made beforehand and never written again.
        """
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._target = self.tensor[..., :columns] if columns else self.tensor
        self._values: Any = None
        self._fixed, self._relied_on = fixed, False
        self._on_gpu = device.type == "cuda"
        spare = 0 if fixed or not self._on_gpu else CAPTURES
        self._spare = [torch.zeros(self._target.shape, dtype=dtype, pin_memory=True) for _ in range(spare)]
        self._sent_on_replay: list[Tensor] = []

    def send(self, values: Any) -> bool:
        """Says whether they were new."""
        capturing = self._on_gpu and torch.cuda.is_current_stream_capturing()
        if capturing and not self._fixed:
            self._send_on_replay(values)
            return True
        self._relied_on |= capturing
        if values == self._values:
            return False
        if self._relied_on:
            raise RuntimeError("a captured graph relies on the optimizer's settings; change only lr and weight_decay")
        source = torch.tensor(values, dtype=self.tensor.dtype, pin_memory=self._on_gpu)
        self._target.copy_(source, non_blocking=True)
        self._values = values
        return True

    def _send_on_replay(self, values: Any) -> None:
        if not self._spare:
            raise RuntimeError(f"an optimizer can be captured in {CAPTURES} graphs; use an Arena for more")
        source = self._spare.pop()
        source.copy_(torch.tensor(values, dtype=source.dtype))
        self._sent_on_replay.append(source)
        self._target.copy_(source, non_blocking=True)
        self._values = None  # the host cannot know which graph ran last


def _chunk_rows(layer: KernelTensors, index: int, first: int) -> list[tuple[int, ...]]:
    """The layer's rows of the kernels' chunk table; `first` is the number of its first partial."""
    n = layer.weight.numel()
    size = max(CHUNK, -(-n // (MAX_PARTIALS * BLOCK)) * BLOCK)
    first_state, *more = (tensor.data_ptr() for tensor in layer.state)
    weight, copy = layer.weight.data_ptr(), 0 if layer.copy is None else layer.copy.data_ptr()
    return [
        (
            weight + start * 4,
            first_state + start * 4,
            copy + start * 2 if copy else 0,
            min(size, n - start),
            index,
            start,
            first,
            -(-n // size),
            layer.group,
            more[0] + start * 4 if more else 0,
        )
        for start in range(0, n, size)
    ]


def _rate_of(group: dict[str, Any], name: str, device: torch.device) -> Any:
    value = scalar(group[name], name, device)
    return value if is_number(value) or value.dtype == torch.float32 else value.item()
