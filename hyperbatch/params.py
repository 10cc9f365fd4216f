"""A model's parameters: their modules, kinds, groups and depths, and the order in which backward finishes them."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from hyperbatch import vocabulary
from hyperbatch.errors import InputError, check_kind, check_number
from hyperbatch.schedule.layers import is_broadcast, is_in

FLOAT_DTYPES = tuple(getattr(torch, name) for name in vocabulary.DTYPE_BYTES)
HALF_DTYPES = tuple(getattr(torch, name) for name in vocabulary.HALF_DTYPES)
NORM_TYPES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_dtensor(tensor: Tensor | None) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # if it is not imported, there is no DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def kind_of(module: nn.Module, param: nn.Parameter) -> str:
    """The kind of a parameter: "norm" by its module's type, "bias" for others of at most one dimension, else "weight".

    Attribute names are not used, because the norm of a ResNet's shortcut is called `downsample.1`. Norm layers of
    other libraries are recognised by their class name; their scales may have the shape C x 1 x 1.
    """
    foreign_norm = param.numel() == max(param.shape, default=1) and "norm" in type(module).__name__.lower()
    if isinstance(module, NORM_TYPES) or foreign_norm:
        return "norm"
    return "bias" if param.ndim <= 1 else "weight"


def owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Maps each parameter's full name to its module and its name there. A tied parameter has only its first name."""
    found: dict[str, tuple[nn.Module, str]] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            if is_lazy(param):
                raise InputError(f"{full_name} has no shape yet (a lazy layer); run a batch through the model first")
            if param not in seen:
                seen.add(param)
                found[full_name] = (module, name)
    return found


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that by default get neither weight decay nor a trust ratio.

    These are norm parameters and biases; position embeddings, class tokens and scales that are broadcast
    (`is_broadcast`); `nn.Embedding` and `nn.EmbeddingBag` layers; and whatever the model, or a part of it, lists in a
    method `no_weight_decay()`, as timm's models do.
    """
    own = owners(model)
    found = set()
    for full_name, (module, name) in own.items():
        param = module.get_parameter(name)
        embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if kind_of(module, param) != "weight" or is_broadcast(name, param.shape) or embedding:
            found.add(full_name)
    for prefix, module in model.named_modules():
        if hasattr(module, "no_weight_decay"):
            listed: Any = module.no_weight_decay
            listed = listed() if callable(listed) else listed
            layers = [f"{prefix}.{layer}" if prefix else layer for layer in listed or ()]
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
    """Returns the model's trainable parameters as groups for any torch optimizer, with their names of
    `named_parameters()`.

    There are two groups: weights, and the `undecayed` rest (norm parameters, biases, position embeddings, tokens),
    which by default gets neither weight decay nor a trust ratio. `layer_decay` divides them further by depth
    (`layer_depths`): the learning rate of a group is `lr` times its `lr_scale`, which is `layer_decay` to the power of
    its distance from the head.
    """
    check_kind("model", model, nn.Module, "give a torch module")
    check_number("layer_decay", layer_decay, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
    for name, value in (("weight_decay", weight_decay), *([] if lr is None else [("lr", lr)])):
        if not isinstance(value, Tensor):  # reading a tensor on a GPU would synchronise
            check_number(name, value, lambda x: 0 <= x < math.inf, "a number that is not negative")
    if layer_decay != 1.0 and lr is None:
        raise ValueError(
            "layer_decay gives every group its own learning rate; pass that of the head to param_groups as lr"
        )
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


# --- the depth of a parameter -----------------------------------------------------------------------------------------

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Maps each parameter's full name to its depth: 0 for the stem, 1, 2, ... for the repeated blocks, then the head.

    The depth follows from the order in which modules are defined. Layers between two blocks belong to the next block,
    and layers after the last block to the head, which always includes the last linear layer. In a model without
    repeated blocks, each weight starts a new layer.
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
    """Names of the blocks that a model repeats (a ResNet's bottlenecks, a transformer's layers), as they are defined.

    A block is a module with at least two weights whose type occurs several times; a convolution with its norm is not
    one. A stage, which holds several blocks of one type in a list or a sequence, does not count, but its blocks do. If
    all blocks together hold no more than half of the model's weights, the list is empty. Shapes may differ, unlike in
    `models.regions`, where one compilation serves all blocks of a kind.
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
        is_inner = bool(blocks) and name.startswith(f"{blocks[-1]}.")  # a module is listed before its children
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


# --- the head, and the order of backward ------------------------------------------------------------------------------


def head_weight(model: nn.Module) -> str | None:
    """The name of the weight of the model's last linear layer by definition; None if the model has no linear layer."""
    head = head_layer(model)
    return None if head is None else f"{head}.weight"


def head_layer(model: nn.Module) -> str | None:
    """The name of the model's last linear layer by definition; None if the model has no linear layer."""
    names = [full.rpartition(".")[0] for full, (module, _) in owners(model).items() if isinstance(module, nn.Linear)]
    return names[-1] if names else None


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Runs the block, and restores the model's buffers afterwards: forward may change or replace them."""
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for places, name, buffer, saved in buffers:
                places[name] = buffer
                if not any(
                    stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
                ):
                    buffer.copy_(saved)  # torch does not write to an expanded tensor, whose elements share memory


def backward_order(model: nn.Module, run_backward: Callable[[], None]) -> list[str]:
    """Returns the names of the trainable parameters in the order in which one probe backward finishes their gradients.

    run_backward: runs one forward and backward pass of the model. Parameters that it does not reach come last, in the
    order of definition. Buffers, gradients and the random state are restored afterwards.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    finished: dict[str, None] = {}

    def record(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            finished.pop(name, None)  # if the probe runs backward twice, the last time counts
            finished[name] = None

        return hook

    grads = [(param, param.grad) for _, param in named]
    for param, _ in grads:
        param.grad = None
    handles = [param.register_post_accumulate_grad_hook(record(name)) for name, param in named]
    cuda_devices = sorted({param.device.index for _, param in named if param.device.type == "cuda"})
    try:
        with buffers_restored(model), torch.random.fork_rng(devices=cuda_devices):
            run_backward()
    finally:
        for handle in handles:
            handle.remove()
        for param, grad in grads:
            param.grad = grad
    if named and not finished:
        raise InputError(
            "run_backward has computed no gradient of the model; give a function that ends with loss.backward()"
        )
    return [*finished, *(name for name, _ in named if name not in finished)]
