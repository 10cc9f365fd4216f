"""Helpers of the optimizers: numbers on the host or the device, norms in fp64, writes of other code to 16-bit weights,
and whether the fused kernels support some parameters."""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is the multi-tensor interface that torch.optim itself uses.
from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from hyperbatch.errors import shown
from hyperbatch.kernels import has_triton, interpreted
from hyperbatch.params import is_dtensor

# Settings that only torch's optimizers have, and the values that have no effect in ours; None means any value.
TORCHS = {
    "amsgrad": (False,),
    "dampening": (0,),
    "decoupled_weight_decay": (True,),
    "maximize": (False,),
    "differentiable": None,
    "foreach": None,
    "fused": None,
}

Scalar = float | Tensor  # a Tensor stays on the device: capturable rates, loss scales


def is_number(value: Any) -> bool:
    return not isinstance(value, Tensor)


def check_setting(name: str, value: Any, kind: Any) -> None:
    """Raises ValueError if a setting is not a number or a flag, as the annotation of its field (`kind`) requires."""
    if isinstance(value, Tensor):
        if not read_is_free(value.device):
            return
        value = value.item()
    if kind in ("float", "Scalar"):
        if not isinstance(value, numbers.Real):
            raise ValueError(f"{name} must be a number, not {shown(value)}")
        if math.isinf(value):
            raise ValueError(f"{name} must be finite, but is {value}")
        if name in ("lr", "weight_decay", "eps") and not float(value) >= 0.0:
            raise ValueError(f"{name} must not be negative, but is {value}")
    if kind == "bool" and value not in (True, False):
        raise ValueError(f"{name} must be True or False, not {shown(value)}")


def is_idle(group: dict[str, Any], name: str) -> bool:
    """Whether a setting of torch's (`TORCHS`) has a value in this group that changes nothing."""
    values = TORCHS[name]
    without_decay = name == "decoupled_weight_decay" and group["weight_decay"] == 0
    return values is None or group[name] in values or without_decay


def check_keys(group: dict[str, Any], settings: Collection[str]) -> None:
    """ValueError where a key looks like a setting misspelt, or is a setting of torch's that would do nothing here. Keys
    of one's own are welcome."""
    own = group.keys() - settings - {"params", "param_names"}
    if not own:
        return
    for key in sorted(own & TORCHS.keys()):
        if not is_idle(group, key):
            raise ValueError(
                f"{key}={group[key]} is a setting of torch's optimizers that this one does not support; remove it"
            )
    import difflib

    for key in sorted(map(str, own)):
        meant = difflib.get_close_matches(key, [*settings], n=1, cutoff=0.8)
        if meant and meant[0] not in key:  # a word in front gives a schedule's key, such as max_momentum
            raise ValueError(f"{key!r} is no setting of a param group; did you mean {meant[0]!r}?")


def scalar(value: Any, name: str, device: torch.device | None = None) -> Any:
    """A group's setting. Tensors of one element become 0-d; tensors on a device other than `device` become numbers."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number, but is a tensor of shape {tuple(value.shape)}")
    return value.item() if device is not None and value.device != device else value.reshape(())


def write_setting(group: dict[str, Any], name: str, value: Scalar) -> None:
    """Sets a number of a group. A device tensor is written in place, because captured graphs read its address."""
    old = group[name]
    if isinstance(old, Tensor):
        old.copy_(value) if isinstance(value, Tensor) else old.fill_(value)
    else:
        group[name] = value.clone() if isinstance(value, Tensor) else value


def on_device(value: Scalar, device: torch.device) -> Tensor:
    """A number as a device tensor. full() fills it on the device, whereas tensor() would copy it and wait."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)


def unless(skip: Tensor, value: Scalar, otherwise: float) -> Tensor:
    """`value`, or `otherwise` if the step is skipped."""
    return torch.where(skip, otherwise, on_device(value, skip.device))


def scaled(tensors: list[Tensor], factor: Scalar) -> list[Tensor]:
    """Each tensor times one factor, or times its own element of a vector of factors."""
    if isinstance(factor, Tensor) and factor.ndim == 1:
        wide = {dtype: factor.to(dtype).unbind() for dtype in {tensor.dtype for tensor in tensors}}
        return list(torch._foreach_mul(tensors, [wide[tensor.dtype][i] for i, tensor in enumerate(tensors)]))
    return list(torch._foreach_mul(tensors, factor))


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def read_is_free(device: torch.device) -> bool:
    """Whether the host can read a value on this device without waiting, which is so only on the CPU."""
    return device.type == "cpu"


@torch.no_grad()
def adopt_writes(param: Tensor, master: Tensor) -> None:
    """Copies a weight into its master if it differs from the rounded master: other code has then written it."""
    same = master.to(param.dtype) == param
    master.copy_(torch.where(same, master, param.to(master.dtype)))


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps in memory, with its dimensions in any order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def norms_of(tensors: list[Tensor]) -> Tensor:
    """The norms in fp64, since a long fp32 sum loses digits (4e-5 over 2 million elements on a CPU)."""
    if tensors[0].device.type == "cpu":
        return torch.stack([_cpu_norm(tensor) for tensor in tensors])
    return torch.stack(list(torch._foreach_norm(tensors, 2, torch.float64)))


def _cpu_norm(tensor: Tensor) -> Tensor:
    """The fp64 norm of the fp32 norms of short rows: as exact as converting every element, and seven times as fast."""
    row, n = 4096, tensor.numel()
    if tensor.dtype != torch.float32 or n < 2 * row or not is_dense(tensor):
        return torch.linalg.vector_norm(tensor, dtype=torch.float64)
    flat = tensor.as_strided((n,), (1,))
    whole = n // row * row
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, row), dim=1)
    norm = torch.linalg.vector_norm(torch.cat([rows, flat[whole:]]), dtype=torch.float64)
    # Squares of elements below 1e-19 lose digits in fp32, and below 1e-23 they vanish: negligible beside such a norm.
    return norm if norm >= 1e-12 else torch.linalg.vector_norm(tensor, dtype=torch.float64)


def why_not_fused(groups: list[dict[str, Any]]) -> str | None:
    """Returns in one line why the fused kernels cannot update these parameters; None if they can."""
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
