"""The host's side of the fused LARS kernels: tables of addresses, kept on the device and sent again only on a change.

layers   [ weight, momentum, 16-bit copy | first partial, partials | group ]      fixed
chunks   [ layer, first element, elements ]                                       fixed
grads    [ address or 0 ]             new after zero_grad(set_to_none=True); constant over an arena
numbers  [ lr, decay, momentum, ... ] per group; capturable rates are read where they are
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.lars import (
    MAX_PARTIALS,
    RULE_CODES,
    grad_norms_kernel,
    update_kernel,
    weight_norms_kernel,
)
from hyperbatch.optim.base import LayerStats, is_dense, on_device, reconcile

if TYPE_CHECKING:
    from hyperbatch.optim.lars import LARS

CHUNK = 4096  # elements a program handles, unless the layer would need more than MAX_PARTIALS of them
BLOCK = 1024
WARPS = 4
CAPTURES = 16  # graphs whose gradient addresses can be held for replay
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
FLAGS = ("nesterov", "trust_clip", "decoupled_weight_decay", "maximize")


@dataclass(frozen=True, slots=True)
class Layer:
    """What the kernels write for one parameter. All dense and laid out alike."""

    weight: Tensor  # fp32: the parameter or its master
    buffer: Tensor  # fp32 momentum
    copy: Tensor | None  # the 16-bit working weight
    group: int


class FusedLars:
    """Two launches a step, and one more for each further combination of flags among the groups."""

    def __init__(self, layers: list[Layer], groups: list[dict[str, Any]], *, fixed_grads: bool) -> None:
        """fixed_grads: gradients keep their addresses, as in an arena."""
        self.layers = layers
        device = layers[0].weight.device
        # Programmatic dependent launch: launch 2 starts up under launch 1. Hopper and newer have it.
        self._overlap = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        # There is one 16-bit dtype at most; without any, the name of one is still needed.
        halves = {layer.copy.dtype for layer in layers if layer.copy is not None}
        self._has_half, self._half = bool(halves), TRITON_DTYPES[next(iter(halves), torch.float16)]

        # Chunks of groups with equal flags are neighbours, so that one launch covers them.
        flags = [(RULE_CODES[group["momentum_rule"]], *(bool(group[name]) for name in FLAGS)) for group in groups]
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
        self._fixed_aligned = all(address % 16 == 0 for row in rows for address in row[:3])

        self._chunks = torch.tensor(rows or [(0,) * 9], dtype=torch.int64).to(device)
        self._grad_partials = torch.zeros(max(1, self._count), device=device)
        self._weight_partials = torch.zeros_like(self._grad_partials)
        self._new_weight_partials = torch.zeros_like(self._grad_partials)
        self._clock = torch.tensor([0, 1, 0], dtype=torch.int32).to(device)
        self.outcome = torch.zeros(2, device=device)  # last step skipped; steps skipped
        self.stats = torch.full((len(layers), 3), torch.nan, device=device)
        self._grads_aligned = False
        self._grads = Mirror((len(layers),), torch.int64, device, fixed=fixed_grads)
        self._numbers = Mirror((len(groups), 8), torch.float32, device, columns=6)
        self._rates = Mirror((len(groups), 2), torch.int64, device)
        self.last_lr = self._numbers.tensor[:, 7]  # one per group
        self.refresh()

    def refresh(self) -> None:
        """Takes the weights' norms anew."""
        if self._count:
            with torch.cuda.device_of(self._chunks):  # Triton launches on the current device
                weight_norms_kernel[(self._count,)](
                    self._chunks,
                    self._new_weight_partials,
                    ALIGNED=self._fixed_aligned,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                )

    def holds(self, layers: list[Layer]) -> bool:
        """Whether the tables still point at these tensors."""
        return len(layers) == len(self.layers) and all(
            a.weight.data_ptr() == b.weight.data_ptr()
            and a.buffer.data_ptr() == b.buffer.data_ptr()
            and _address(a.copy) == _address(b.copy)
            for a, b in zip(layers, self.layers, strict=True)
        )

    def step(
        self,
        grads: list[Tensor | None],
        groups: list[dict[str, Any]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """grads: laid out as the weights, or None; they must stay alive until the launches have run."""
        if self._count:
            with torch.cuda.device_of(self._chunks):
                self._launch(grads, groups, grad_scale, found_inf)

    def _launch(
        self,
        grads: list[Tensor | None],
        groups: list[dict[str, Any]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
        if self._grads.put(addresses):
            self._grads_aligned = all(address % 16 == 0 for address in addresses)
        self._numbers.put([_numbers(group) for group in groups])
        base, row_bytes = self._numbers.tensor.data_ptr(), 8 * 4
        self._rates.put(
            [
                [_rate(group["lr"], base + i * row_bytes), _rate(group["weight_decay"], base + i * row_bytes + 4)]
                for i, group in enumerate(groups)
            ]
        )
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
            self._weight_partials,
            self._new_weight_partials,
            self._clock,
            self._numbers.tensor,
        )
        scale = self.outcome if grad_scale is None else grad_scale
        scaled, told = grad_scale is not None, found_inf is not None
        grad_norms_kernel[(self._count,)](*tables, scale, GROUPS=len(groups), SCALED=scaled, **common)
        for kind, first, count in self._launches:
            if count:
                update_kernel[(count,)](
                    first,
                    *tables,
                    self._rates.tensor,
                    scale,
                    found_inf if told else self.outcome,
                    self.outcome,
                    self.stats,
                    FLAGS=(scaled, told, *kind),
                    PARTIALS=self._partials,
                    **({"launch_pdl": True} if self._overlap else {}),
                    **common,
                )


class FusedStep:
    """A `LARS` step through the kernels: gathers gradients, notices changes from outside, launches."""

    def __init__(self, optimizer: LARS) -> None:
        # Held weakly: the optimizer owns this object.
        self._optimizer: LARS = weakref.proxy(optimizer)
        groups = optimizer.param_groups
        self._params = [param for group in groups for param in group["params"]]
        if _capturing(self._params[0].device):
            raise RuntimeError("run one step of the optimizer before capturing it: its tables are made there")
        self._masters = [optimizer.init_state(param).get("master") for param in self._params]
        # 16-bit copies of parameters with gaps in memory: the kernels write these, a copy follows.
        self._stand_ins = [
            None if master is None or param.dtype == torch.float32 or is_dense(param) else torch.empty_like(param)
            for param, master in zip(self._params, self._masters, strict=True)
        ]
        layers = self._layers()
        self._fits = [(x.weight, p.dtype, x.weight.stride()) for x, p in zip(layers, self._params, strict=True)]
        self._written_beside = [
            (param, master if stand_in is None else stand_in)
            for param, master, stand_in in zip(self._params, self._masters, self._stand_ins, strict=True)
            if master is not None and (stand_in is not None or param.dtype == torch.float32)
        ]
        self._kernels = FusedLars(layers, groups, fixed_grads=optimizer.arena is not None)
        self._versions: list[int] | None = None
        for last_lr, group in zip(self._kernels.last_lr, groups, strict=True):
            if group["momentum_rule"] == "rescaled":
                last_lr.copy_(on_device(group["last_lr"], last_lr.device))
                group["last_lr"] = last_lr
        if optimizer.skipped_steps is not None:
            self._kernels.outcome[1].copy_(optimizer.skipped_steps)
        optimizer.last_found_inf, optimizer.skipped_steps = self._kernels.outcome.unbind()
        names = [name for _, part in optimizer.group_names() for name in part]
        optimizer._stats = [LayerStats(names, *self._kernels.stats.unbind(dim=1))]

    def _layers(self) -> list[Layer]:
        layers, index = [], 0
        for group_index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                master, stand_in = self._masters[index], self._stand_ins[index]
                copy = None if param.dtype == torch.float32 else param if stand_in is None else stand_in
                buffer = self._optimizer.init_state(param)["momentum_buffer"]
                layers.append(Layer(param if master is None else master, buffer, copy, group_index))
                index += 1
        return layers

    def refresh(self) -> bool:
        """Takes the norms of weights that were changed from outside. False: the storage itself has moved."""
        self._masters = [self._optimizer.init_state(param).get("master") for param in self._params]
        if not self._kernels.holds(self._layers()):
            return False
        self._adopt_changes([param._version for param in self._params])
        return True

    def run(self) -> None:
        optimizer, params, dense = self._optimizer, self._params, torch.strided
        grads = [param.grad for param in params]
        touched = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
        if not touched:
            return
        if _capturing(params[0].device) and not optimizer.param_groups[0]["capturable"]:
            raise RuntimeError("LARS must be made with capturable=True to be captured in a CUDA graph")
        versions = [param._version for param in params]
        if versions != self._versions:
            self._adopt_changes(versions)
        fitting = [
            g
            if g is None or (g.layout is dense and g.dtype == dtype and g.stride() == strides)
            else _fitting(g, like, dtype)
            for g, (like, dtype, strides) in zip(grads, self._fits, strict=True)
        ]
        self._kernels.step(fitting, optimizer.param_groups, optimizer.scale_of_grads(), optimizer.told_inf())
        for param, source in self._written_beside:
            param.copy_(source)
        # What autograd's check for changed saved tensors looks at; the kernels wrote behind its back.
        torch.autograd.graph.increment_version(touched)
        self._versions = [param._version for param in params]

    def _adopt_changes(self, versions: list[int]) -> None:
        before = self._versions or [None] * len(versions)
        for param, master, old, new in zip(self._params, self._masters, before, versions, strict=True):
            if master is not None and old != new:
                reconcile(param, master)
        self._kernels.refresh()
        self._versions = versions


def _fitting(grad: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient in its weight's memory layout and the parameter's dtype."""
    if grad.layout != torch.strided:
        raise ValueError("a grad is sparse; LARS needs dense gradients")
    if grad.dtype == dtype and _same_layout(grad, like):
        return grad
    return torch.empty_like(like, dtype=dtype).copy_(grad)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Strides of dimensions of size 1 mean nothing."""
    return all(x == y or size == 1 for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Mirror:
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

    def put(self, values: Any) -> bool:
        """Whether they were new."""
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


def _chunk_rows(layer: Layer, index: int, first: int) -> list[tuple[int, ...]]:
    """The layer's rows of the kernels' chunk table; `first` is the number of its first partial."""
    n = layer.weight.numel()
    size = max(CHUNK, -(-n // (MAX_PARTIALS * BLOCK)) * BLOCK)
    weight, buffer, copy = layer.weight.data_ptr(), layer.buffer.data_ptr(), _address(layer.copy)
    return [
        (
            weight + start * 4,
            buffer + start * 4,
            copy + start * 2 if copy else 0,
            min(size, n - start),
            index,
            start,
            first,
            -(-n // size),
            layer.group,
        )
        for start in range(0, n, size)
    ]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rate(value: float | Tensor, home: int) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else home


def _numbers(group: dict[str, Any]) -> list[float]:
    lr, decay = (0.0 if isinstance(group[name], Tensor) else float(group[name]) for name in ("lr", "weight_decay"))
    return [lr, decay, group["momentum"], group["trust_coefficient"], group["eps"], float(group["adapt"])]
