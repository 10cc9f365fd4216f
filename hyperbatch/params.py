"""A model's parameters: whose they are, of which kind, and in which order backward finishes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hyperbatch import vocabulary

HALF_DTYPES = tuple(getattr(torch, name) for name in vocabulary.HALF_DTYPES)
NORM_TYPES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def kind_of(module: nn.Module, name: str, param: nn.Parameter) -> str:
    """ "norm" by the owner's type, "bias" for other parameters of one dimension and fewer, else "weight".

    Types count, never attribute names: the norm of a ResNet's shortcut is called `downsample.1`. A norm layer of
    someone else's is recognised by its class name.
    """
    foreign_norm = param.ndim <= 1 and "norm" in type(module).__name__.lower()
    if isinstance(module, NORM_TYPES) or foreign_norm:
        return "norm"
    return "bias" if param.ndim <= 1 else "weight"


def owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Each parameter's owner and its name there, by the first full name a tied parameter is met under."""
    found: dict[str, tuple[nn.Module, str]] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param not in seen:
                seen.add(param)
                found[f"{prefix}.{name}" if prefix else name] = (module, name)
    return found


def param_groups(
    model: nn.Module, weight_decay: float, *, decay_norm_bias: bool = False, adapt_norm_bias: bool = False
) -> list[dict[str, Any]]:
    """Two groups: weights, and norm parameters with biases, which by default get neither decay nor trust ratio.

    Frozen parameters are left out. The groups carry names, as `named_parameters()` gives them.
    """
    weights, rest = [], []
    for full_name, (module, name) in owners(model).items():
        param = module.get_parameter(name)
        if param.requires_grad:
            (weights if kind_of(module, name, param) == "weight" else rest).append((full_name, param))
    groups = [
        {"params": weights, "weight_decay": weight_decay, "adapt": True},
        {"params": rest, "weight_decay": weight_decay if decay_norm_bias else 0.0, "adapt": adapt_norm_bias},
    ]
    return [group for group in groups if group["params"]]


def head_weight(model: nn.Module) -> str | None:
    """The name of the last linear layer's weight, in the order of definition; None: the model has no such layer."""
    head = head_layer(model)
    return None if head is None else f"{head}.weight"


def head_layer(model: nn.Module) -> str | None:
    """The name of the last linear layer, in the order of definition; None: the model has no such layer."""
    names = [full.rpartition(".")[0] for full, (module, _) in owners(model).items() if isinstance(module, nn.Linear)]
    return names[-1] if names else None


def backward_order(model: nn.Module, run_backward: Callable[[], None]) -> list[str]:
    """Names of trainable parameters in the order in which one probe backward finishes their gradients.

    Parameters the probe does not touch come last, in definition order. Buffers, gradients and RNG state are restored
    after it.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    finished: dict[str, None] = {}

    def record(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            finished.pop(name, None)  # a second backward in the probe: the last one counts
            finished[name] = None

        return hook

    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    grads = [(param, param.grad) for _, param in named]
    for param, _ in grads:
        param.grad = None
    handles = [param.register_post_accumulate_grad_hook(record(name)) for name, param in named]
    cuda_devices = sorted({param.device.index for _, param in named if param.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=cuda_devices):
            run_backward()
    finally:
        for handle in handles:
            handle.remove()
        for param, grad in grads:
            param.grad = grad
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
    return [*finished, *(name for name, _ in named if name not in finished)]
