"""A model's parameters: whose they are, of which kind, and in which order backward finishes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hyperbatch import vocabulary
from hyperbatch.schedule.layers import is_in

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


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that are no weights to be kept small: weight decay and trust ratios leave them alone.

    They are norm parameters and biases; position embeddings, class tokens and scales that are broadcast over the batch
    (a first dimension of 1, and not called `weight`); embeddings by number (`nn.Embedding`); and what a model, or a
    part of it, lists itself in a method `no_weight_decay()`, as timm's models do.
    """
    own = owners(model)
    found = set()
    for full_name, (module, name) in own.items():
        param = module.get_parameter(name)
        broadcast = param.ndim > 1 and param.shape[0] == 1 and name != "weight"
        if kind_of(module, name, param) != "weight" or broadcast or isinstance(module, nn.Embedding):
            found.add(full_name)
    for prefix, module in model.named_modules():
        if hasattr(module, "no_weight_decay"):
            listed: Any = module.no_weight_decay
            layers = [f"{prefix}.{layer}" if prefix else layer for layer in listed()]
            found |= {name for name in own if any(is_in(name, layer) for layer in layers)}
    return found


def param_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    decay_norm_bias: bool = False,
    adapt_norm_bias: bool = False,
    layer_decay: float = 1.0,
    lr: float | None = None,
) -> list[dict[str, Any]]:
    """The model's trainable parameters as groups for any torch optimizer, with names as `named_parameters()` has them.

    There are two: weights, and the `undecayed` rest (norm parameters, biases, position embeddings, tokens), which by
    default gets neither weight decay nor a trust ratio. `layer_decay` divides them further: a parameter's rate is `lr`
    times `layer_decay` to the power of its distance from the head (`layer_depths`), which is each group's `lr_scale`.
    """
    if layer_decay != 1.0 and lr is None:
        raise ValueError("layer_decay gives every group a rate of its own: give param_groups the lr of the head, too")
    plain, depths = undecayed(model), {} if layer_decay == 1.0 else layer_depths(model)
    head = max(depths.values(), default=0)
    groups: dict[tuple[bool, int], dict[str, Any]] = {}
    for is_plain in (False, True):
        for full_name, (module, name) in owners(model).items():
            param = module.get_parameter(name)
            if not param.requires_grad or (full_name in plain) is not is_plain:
                continue
            distance = head - depths.get(full_name, head)
            if (is_plain, distance) not in groups:
                group: dict[str, Any] = {"params": [], "weight_decay": weight_decay, "adapt": True}
                if is_plain:
                    group.update(weight_decay=weight_decay if decay_norm_bias else 0.0, adapt=adapt_norm_bias)
                if lr is not None:
                    scale = layer_decay**distance
                    group.update(lr=lr * scale, lr_scale=scale)
                groups[is_plain, distance] = group
            groups[is_plain, distance]["params"].append((full_name, param))
    return list(groups.values())


# How deep a parameter lies

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def layer_depths(model: nn.Module) -> dict[str, int]:
    """How deep each parameter lies, by its full name: 0 for the stem, 1, 2, ... for the repeated blocks, then the head.

    Only the structure of the modules counts, in the order of definition. What lies between two blocks belongs to the
    next one, and what follows the last block to the head, to which the last linear layer belongs in any case. In a
    model without repeated blocks, each weight begins a layer of its own.
    """
    own, blocks, head = owners(model), repeated_blocks(model), head_layer(model)
    depths: dict[str, int] = {}
    here = 0
    if blocks:
        last = len(blocks) + 1
        for name in own:
            inside = next((depth for depth, block in enumerate(blocks, start=1) if name.startswith(f"{block}.")), None)
            here = here if inside is None else inside
            depths[name] = here + 1 if inside is None and here else here
        head = None if any(f"{head}.".startswith(f"{block}.") for block in blocks) else head
    else:
        plain = undecayed(model)
        for name in own:
            here += name not in plain
            depths[name] = max(0, here - 1)
        last = max(depths.values(), default=0)
    return {name: last if head is not None and is_in(name, head) else depth for name, depth in depths.items()}


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks that a model repeats (a ResNet's bottlenecks, a transformer's layers), in their order; none
    where they hold no more than half of its weights.

    A block is a module of a type that occurs several times, and has at least two weights: a convolution with its norm
    is none. A stage, which holds several blocks of one type in a list or a sequence, is none either, but its blocks
    are. Shapes may differ, unlike in `models.regions`, where one compilation is to serve all blocks of a kind.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    types = Counter(map(type, modules.values()))
    weights = {module: _weight_count(module) for module in modules.values()}
    repeated = {
        module
        for module in modules.values()
        if type(module) not in CONTAINERS and types[type(module)] > 1 and weights[module] > 1
    }
    stages = {type(module) for module in repeated if _is_stage(module, repeated, weights)}
    blocks: list[str] = []
    for name, module in modules.items():
        is_inner = bool(blocks) and name.startswith(f"{blocks[-1]}.")  # a module comes before those in it
        if module in repeated and type(module) not in stages and not is_inner:
            blocks.append(name)
    held = sum(weights[modules[block]] for block in blocks)
    return blocks if 2 * held > _weight_count(model) else []


def _weight_count(module: nn.Module) -> int:
    return sum(param.ndim > 1 for param in module.parameters())


def _is_stage(module: nn.Module, repeated: set[nn.Module], weights: dict[nn.Module, int]) -> bool:
    for inner in module.modules():
        if isinstance(inner, CONTAINERS):
            parts = [part for part in inner.children() if part in repeated]
            same = Counter(map(type, parts))
            held = sum(weights[part] for part in parts if same[type(part)] > 1)
            if 2 * held > weights[module]:
                return True
    return False


# Heads, and the order of backward


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

    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
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
            for places, name, buffer, saved in buffers:
                places[name] = buffer  # forward may have put another tensor there
                buffer.copy_(saved)
    return [*finished, *(name for name, _ in named if name not in finished)]
