"""The host side of the fused kernels: tables of addresses on the device, which are sent again only when they change.

chunks   [ weight, state, 16-bit copy | elements | layer, first element | first partial, partials | group ]    fixed
grads    [ address or 0 ]             new after zero_grad(set_to_none=True); constant with an arena
numbers  [ lr, decay, momentum, ... ] per group; capturable rates are read from their own tensors
"""

from __future__ import annotations

import math
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
from hyperbatch.optim.tensors import is_number, scalar

if TYPE_CHECKING:
    from hyperbatch.optim.base import LayerwiseOptimizer

CHUNK = 4096  # elements per program; more if the layer would need more than MAX_PARTIALS programs
BLOCK = 1024
WARPS = 4
CAPTURES = 16  # the number of graphs whose gradient addresses can be stored for replay
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KernelForm:
    """How the kernels see a rule: its flags, its settings, and the class that launches them."""

    flags: Callable[
        [Group], tuple[Any, ...]
    ]  # what a launch is compiled for: code, nesterov, clip, decoupled, maximize
    settings: Callable[[Group], list[float]]  # the rule's columns of the table of numbers, after lr and weight decay
    make: Callable[[KernelForm, list[KernelTensors], LayerwiseOptimizer], FusedKernels]


def _lars_flags(group: Group) -> tuple[Any, ...]:
    names = ("nesterov", "trust_clip", "decoupled_weight_decay", "maximize")
    return LARS_CODES[group["momentum_rule"]], *(bool(group[name]) for name in names)


def _lars_settings(group: Group) -> list[float]:
    return [group["momentum"], group["trust_coefficient"], group["eps"], float(group["adapt"])]


def _lamb_flags(group: Group) -> tuple[Any, ...]:
    return LAMB_CODE, False, bool(group["trust_clip"]), False, False


def _lamb_settings(group: Group) -> list[float]:
    """LAMB's columns. 1 - beta and log(beta) are computed in fp64, since fp32 would keep four digits of 1 - 0.999."""
    betas = group["betas"]
    logs = [math.log(beta) if beta > 0.0 else -math.inf for beta in betas]
    return [*betas, *(1.0 - beta for beta in betas), *logs, group["eps"], float(group["adapt"])]


@dataclass(frozen=True, slots=True)
class KernelTensors:
    """The tensors that the kernels write for one parameter, all dense and with the same layout."""

    weight: Tensor  # fp32: the parameter or its master
    state: tuple[Tensor, ...]  # fp32; one or two tensors
    copy: Tensor | None  # the 16-bit working weight
    group: int


class FusedKernels:
    """Launches the kernels of a step: two, and one more for each further combination of flags among the groups."""

    def __init__(self, form: KernelForm, layers: list[KernelTensors], optimizer: LayerwiseOptimizer) -> None:
        self._form, groups = form, optimizer.param_groups
        fixed_grads = optimizer.arena is not None  # an arena keeps the addresses of gradients
        device = layers[0].weight.device
        # Programmatic dependent launch, on Hopper and newer: launch 2 may start before launch 1 has ended.
        self._overlap = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        # There is at most one 16-bit dtype. Without any, the kernels' signature still needs one.
        halves = {layer.copy.dtype for layer in layers if layer.copy is not None}
        self._has_half, self._half = bool(halves), TRITON_DTYPES[next(iter(halves), torch.float16)]

        # Chunks of groups with equal flags are neighbours, so that one launch covers them.
        flags = [form.flags(group) for group in groups]
        rows, self._launches, self._partials = [], [], 1
        self._spans: dict[int, tuple[int, int]] = {}  # layer -> (its first partial, its number of partials)
        for i in sorted(range(len(layers)), key=lambda i: flags.index(flags[layers[i].group])):
            made = _chunk_rows(layers[i], i, len(rows))
            self._spans[i] = (len(rows), len(made))
            kind = flags[layers[i].group]
            if not self._launches or self._launches[-1][0] != kind:
                self._launches.append([kind, len(rows), 0])
            self._launches[-1][2] += len(made)
            self._partials = max(self._partials, triton.next_power_of_2(len(made)))
            rows += made
        self._count = len(rows)
        self._fixed_aligned = all(address % 16 == 0 for row in rows for address in (*row[:3], row[9]))

        self._chunks = torch.tensor(rows or [(0,) * CHUNK_COLUMNS.value], dtype=torch.int64).to(device)
        self._grad_partials = torch.zeros(max(1, self._count), device=device)
        self._direction_partials = torch.zeros_like(self._grad_partials)
        self._weight_partials = torch.zeros_like(self._grad_partials)
        self._new_weight_partials = torch.zeros_like(self._grad_partials)
        self._clock = torch.tensor([0, 1, 0], dtype=torch.int32).to(device)
        self.outcome = torch.zeros(2, device=device)  # whether the last step was skipped; how many steps were skipped
        self.stats = torch.full((len(layers), 3), torch.nan, device=device)
        self._grads_aligned = False
        self._grads = DeviceTable((len(layers),), torch.int64, device, fixed=fixed_grads)
        columns = 2 + len(form.settings(groups[0]))
        self._numbers = DeviceTable((len(groups), COLUMNS.value), torch.float32, device, columns=columns)
        self._rates = DeviceTable((len(groups), 2), torch.int64, device)
        self.carried = self._numbers.tensor[:, NEXT_CARRIED.value]  # one per group

    def refresh(self) -> None:
        """Computes the weights' norms again, and copies 16-bit weights that other code wrote into their masters."""
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
        """Launches the kernels of one step.

        grads: each in its weight's layout, or None. They must stay alive until the launches have run.
        """
        if self._count:
            with torch.cuda.device_of(self._chunks):
                self._launch(grads, groups, grad_scale, found_inf)

    def _launch(
        self, grads: list[Tensor | None], groups: list[Group], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        self._send(grads, groups)
        common = self._common()
        tables = (*self._tables(), self.outcome if grad_scale is None else grad_scale)
        scaled, told = grad_scale is not None, found_inf is not None
        # AdamW needs no norm of its direction, so the first launch reads only gradients.
        direction = any(self._form.flags(group)[0] == LAMB_CODE and group["adapt"] for group in groups)
        sizes = {"GROUPS": len(groups), "SCALED": scaled, "DIRECTION": direction}
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

    def _tables(self) -> tuple[Tensor, ...]:
        """Returns the arguments with which every step's first launch begins."""
        return (
            self._chunks,
            self._grads.tensor,
            self._grad_partials,
            self._direction_partials,
            self._weight_partials,
            self._new_weight_partials,
            self._clock,
            self._numbers.tensor,
            self._rates.tensor,
        )

    def _common(self) -> dict[str, Any]:
        """Returns the constants of every launch over chunks. Must be called after `_send`."""
        return {
            "HALF": self._half,
            "HAS_HALF": self._has_half,
            "ALIGNED": self._fixed_aligned and self._grads_aligned,
            "BLOCK": BLOCK,
            "OVERLAP": self._overlap,
            "num_warps": WARPS,
        }

    def _send(self, grads: list[Tensor | None], groups: list[Group]) -> None:
        """Sends addresses and numbers to the tables. The kernels read rates on the device from their own tensors."""
        addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
        if self._grads.send(addresses):
            self._grads_aligned = all(address % 16 == 0 for address in addresses)
        home, device, row_bytes = self._numbers.tensor.data_ptr(), self._numbers.tensor.device, 4 * COLUMNS.value
        numbers, rates = [], []
        for row, group in enumerate(groups):
            here = [_rate_of(group, name, device) for name in ("lr", "weight_decay")]
            rates.append([home + row_bytes * row + 4 * i if is_number(x) else x.data_ptr() for i, x in enumerate(here)])
            numbers.append([x if is_number(x) else 0.0 for x in here] + self._form.settings(group))
        self._numbers.send(numbers)
        self._rates.send(rates)


LARS_FORM = KernelForm(_lars_flags, _lars_settings, FusedKernels)
LAMB_FORM = KernelForm(_lamb_flags, _lamb_settings, FusedKernels)


class DeviceTable:
    """A small table on the device that is sent again only when its values change, without waiting for the device."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, columns: int = 0, fixed: bool = True
    ) -> None:
        """columns: the host writes only the first `columns` columns; 0 means all.

        fixed: captured graphs require that the values do not change. Otherwise each graph sends its own values on
        replay, from a buffer that is allocated beforehand and never written again.
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
        """Sends the values if they have changed. Returns whether they have."""
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
