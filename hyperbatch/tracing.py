"""Finds the layers of a model in one forward and backward pass of two images, for models without a table.

    forward    patch_embed.proj  blocks.0.norm1  blocks.0.attn.qkv  blocks.0.attn  blocks.0.attn.proj  ...  head
    backward   head  ...  blocks.0.attn.proj  blocks.0.attn.qkv  blocks.0.norm1  patch_embed.proj  pos_embed

The pass runs on torch's meta device, which has shapes but no values, or on the CPU if the model needs values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hyperbatch.errors import InputError, own_code
from hyperbatch.models.build import create_model
from hyperbatch.params import backward_order, kind_of, owners

SAMPLES = 2  # batch norms cannot be trained on a single sample


class TracedParameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: str  # result of `params.kind_of`


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedLayer:
    """A module that has trainable parameters or products of its own, or is a norm or a pool. All counts are per
    image."""

    name: str
    kind: str  # "conv", "linear", "attention", "norm" or "pool"
    parameters: tuple[TracedParameter, ...]  # in the order in which backward finishes them
    macs: int
    inputs: int
    outputs: int
    saved: int  # elements that are saved for backward


class Trace(NamedTuple):
    layers: tuple[TracedLayer, ...]  # in the order of the forward pass
    order: tuple[str, ...]  # all trainable parameters, in the order in which backward finishes them


def trace_model(name: str, *, classes: int, image_size: int, in_channels: int) -> Trace:
    """Traces a model by its name. Raises InputError if it cannot be trained on such images."""

    def traced(device: str) -> Trace:
        model = create_model(name, classes=classes, in_channels=in_channels).to(device)
        return trace(model, torch.zeros(SAMPLES, in_channels, image_size, image_size, device=device))

    try:
        return traced("meta")
    except InputError:
        raise
    except Exception:  # the model needs values, which the meta device does not have, or fails on every device
        with own_code(f"model {name!r}", f"it must take images of {image_size} px and return logits"):
            return traced("cpu")


def trace(model: nn.Module, images: Tensor) -> Trace:
    """Traces a model that returns a tensor. Its weights, buffers and gradients do not change."""
    watch = _Watch(model, images)

    def run_backward() -> None:
        with watch:
            loss = model(images).float().sum()
        loss.backward()

    order = backward_order(model, run_backward)
    return Trace(tuple(_in_order(_layers(model, watch.done, order, len(images)), order)), tuple(order))


@dataclass(kw_only=True, slots=True)
class _Done:
    """The work of one module, without that of its children."""

    moment: int = 0  # time of its first product or, without one, of its end; 0 if it was never called
    macs: dict[str, int] = field(default_factory=dict)  # by kind
    inputs: int = 0
    outputs: int = 0
    saved: int = 0


class _Watch(TorchDispatchMode):
    """A context for the forward pass that records the work of every module."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        super().__init__()
        self.done = {name: _Done() for name, _ in model.named_modules()}
        self._modules = dict(model.named_modules())
        self._running = [""]
        self._clock = 0
        # The tensors are kept alive, so that no storage is reused.
        self._seen = {_storage(tensor): tensor for tensor in (*model.parameters(), images)}
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._modules.items():
            if name:
                self._undo.callback(module.register_forward_pre_hook(self._begins(name)).remove)
                self._undo.callback(module.register_forward_hook(self._ends(name)).remove)
        self._undo.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saves, lambda tensor: tensor))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        name = packet.__name__
        if packet in flop_registry:
            operations = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            kind = "conv" if "conv" in name else "linear" if name in ("mm", "addmm", "_scaled_mm") else "attention"
            self._multiplies(kind, operations // 2)
        elif "scaled_dot_product" in name:  # the CPU's attention, which torch does not count
            query, key, value = args[:3]
            rows = query.numel() // query.shape[-1]
            self._multiplies("attention", rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
        return result

    def _multiplies(self, kind: str, macs: int) -> None:
        done = self.done[self._running[-1]]
        if not done.macs:
            done.moment = self._tick()
        done.macs[kind] = done.macs.get(kind, 0) + macs

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(name)
            self.done[name].inputs = sum(value.numel() for value in args if isinstance(value, Tensor))

        return hook

    def _ends(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._running.pop()
            done = self.done[name]
            done.outputs = output.numel() if isinstance(output, Tensor) else done.inputs
            if not done.macs:
                done.moment = self._tick()

        return hook

    def _saves(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and _storage(tensor) not in self._seen:
            self._seen[_storage(tensor)] = tensor
            self.done[self._running[-1]].saved += tensor.numel()
        return tensor

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _storage(tensor: Tensor) -> int:
    """Returns an identifier that is the same for all views of a tensor. It is not an address, because tensors on the
    meta device have none."""
    return tensor.untyped_storage()._cdata


def _layers(model: nn.Module, done: dict[str, _Done], order: list[str], samples: int) -> list[tuple[int, TracedLayer]]:
    """Returns (moment, layer). The moment is 0 for a layer whose place in the order follows only from backward."""
    own, held = owners(model), {}
    for full_name in order:
        module, name = own[full_name]
        param = module.get_parameter(name)
        found = TracedParameter(full_name, tuple(param.shape), kind_of(module, param))
        held.setdefault(full_name.rpartition(".")[0], []).append(found)
    kinds = {name: _kind(module, done[name], held.get(name, [])) for name, module in model.named_modules()}
    layers, rest = [], sum(done[name].saved for name, kind in kinds.items() if kind is None)
    for name, kind in kinds.items():
        here = done[name]
        if kind is None or not (here.moment or held.get(name)):  # not a layer, or a pool that is never called
            continue
        inner = any(other is not None and place.startswith(f"{name}.") for place, other in kinds.items()) or not name
        layer = TracedLayer(
            name=name,
            kind=kind,
            parameters=tuple(held.get(name, ())),
            macs=sum(here.macs.values()) // samples,
            inputs=here.inputs // samples,
            outputs=here.outputs // samples,
            saved=(here.saved + rest) // samples,
        )
        rest = 0  # what modules that are not layers save, such as activations, is added to the first layer
        layers.append((0 if inner and not here.macs else here.moment, layer))
    return layers


def _kind(module: nn.Module, done: _Done, parameters: list[TracedParameter]) -> str | None:
    """Returns the kind of a layer, or None if the module is not a layer."""
    name = type(module).__name__.lower()
    if done.macs:
        kind = max(done.macs, key=lambda kind: done.macs[kind])
        has_weight = any(param.kind == "weight" for param in parameters)
        return kind if has_weight or kind == "conv" else "attention"  # without a weight, a product of activations
    if parameters:
        return "norm"  # also for a scale or an embedding, which read memory but have no products
    if next(module.children(), None) is not None:
        return None
    return "norm" if "norm" in name else "pool" if "pool" in name else None


def _in_order(layers: list[tuple[int, TracedLayer]], order: list[str]) -> list[TracedLayer]:
    """Sorts the layers. One without a moment is inserted after the layer whose gradients backward finishes next."""
    placed = [layer for moment, layer in sorted(layers, key=lambda item: item[0]) if moment]
    for moment, layer in layers:
        if moment == 0:
            after = order[order.index(layer.parameters[-1].name) + 1 :]
            owner = {param.name: i for i, other in enumerate(placed) for param in other.parameters}
            place = next((owner[name] + 1 for name in after if name in owner), 0)
            placed.insert(place, layer)
    return placed
