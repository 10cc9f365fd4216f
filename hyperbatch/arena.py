"""Flat storage of a model's parameters, in the order in which backward finishes them: one buffer per role and dtype.

    16-bit arena  [ fc.w | layer4... | layer3... | ... | conv1 ]      a gradient group is a slice of it
    fp32 arena    [ norm scales and shifts ]                          small: one last group

The layout depends on the model, the order and the dtype policy, never on the world size. Offsets are aligned to 256
bytes; padding stays zero.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.weak import TensorWeakRef

from hyperbatch.errors import InputError, check_kind, shown
from hyperbatch.params import FLOAT_DTYPES, HALF_DTYPES, is_dtensor, kind_of, owners
from hyperbatch.plan.types import TensorSpec

ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of one parameter: elements [offset, offset + numel) of its dtype's buffers."""

    name: str
    param: nn.Parameter
    dtype: torch.dtype
    offset: int
    numel: int
    kind: str  # "weight", "bias" or "norm"

    @property
    def end(self) -> int:
        """The offset after this slot's padding, where the next slot begins."""
        return _aligned(self.offset + self.numel, self.dtype)


class Arena:
    """Owns the storage of a model's trainable parameters; `param.data` and `param.grad` become views of it.

    After `zero_grad()` each `param.grad` is None. When backward has computed a gradient, a hook copies it into the
    arena and sets `param.grad` to that view; further micro-steps accumulate into it. If backward does not reach a
    parameter, its `param.grad` stays None, and optimizers skip it. Its part of the buffers keeps an earlier gradient
    until `collect` fills it with zeros; code that reads the buffers directly must call `collect` first.
    """

    slots: tuple[Slot, ...]  # in arena order
    weights: dict[torch.dtype, Tensor]  # working weights, flat
    grads: dict[torch.dtype, Tensor]  # gradients, flat
    masters: Tensor | None  # fp32 masters of 16-bit weights, laid out as weights[dtype]; None when all are fp32 or fp64

    def __init__(
        self,
        model: nn.Module,
        order: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        copy_on_ready: bool = True,
    ) -> None:
        """Moves the model's trainable parameters into new buffers.

        order: names of all trainable parameters, e.g. from `backward_order`. dtype: working precision of weights;
        parameters of batch norm stay fp32 (fp64 if dtype is fp64). copy_on_ready: False leaves gradients where
        autograd allocated them until `collect` copies a whole group at once.
        """
        check_kind("model", model, nn.Module, "give a torch module")
        if dtype not in FLOAT_DTYPES:
            raise InputError(f"dtype is {shown(dtype)}; give one of {', '.join(map(str, FLOAT_DTYPES))}")
        if any(is_dtensor(param) for param in model.parameters()):
            raise InputError(
                "an arena does not support DTensor parameters; give the optimizer a sharded model without an arena"
            )
        self.dtype = dtype
        self.copy_on_ready = copy_on_ready
        self.pinned = False  # True once a captured graph contains the addresses: the buffers must then not move
        self.holds_shards = False  # True if the exchange leaves this rank only its shard of the gradients
        self._on_load: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._model = weakref.ref(model)
        self._frozen = [param for param in model.parameters() if not param.requires_grad]
        by_name = {name: owner for name, owner in owners(model).items() if _is_trainable(owner)}
        _check_order(order, by_name)

        slots: list[Slot] = []
        ends: dict[torch.dtype, int] = {}
        for name in order:
            module, local = by_name[name]
            param = module.get_parameter(local)
            kind = kind_of(module, param)
            kept = _working_dtype(module, kind, param, dtype)
            slots.append(Slot(name, param, kept, ends.get(kept, 0), param.numel(), kind))
            ends[kept] = slots[-1].end
        self.slots = tuple(slots)
        self._by_name = {slot.name: slot for slot in slots}
        self._sizes = ends
        self._layouts = {slot.name: (slot.param.shape, _dense_strides(slot.param)) for slot in slots}

        device = slots[0].param.device if slots else torch.device("cpu")
        self._allocate(device)
        self._fill({slot.name: slot.param.detach() for slot in slots})
        self.frozen_in_full = _cast_frozen(model, dtype)  # unrounded frozen parameters on the host, by name
        self._bind()
        _cast_constants(model, dtype)
        self._hook(model)

    # --- layout -------------------------------------------------------------------------------------------------

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The layout as the planner's tensor specs, in arena order."""
        return tuple(
            TensorSpec(name=s.name, shape=tuple(s.param.shape), kind=s.kind, dtype=str(s.dtype).removeprefix("torch."))
            for s in self.slots
        )

    @property
    def device(self) -> torch.device:
        return next(iter(self.weights.values())).device if self.weights else torch.device("cpu")

    def slot(self, name: str) -> Slot:
        return self._by_name[name]

    def slice_of(self, names: Sequence[str], buffers: dict[torch.dtype, Tensor]) -> Tensor:
        """Returns the contiguous slice of `buffers`, with padding, that contains these parameters.

        They must be neighbours in the arena, in its order and of one dtype; otherwise a ValueError is raised.
        """
        slots = [self._by_name[name] for name in names]
        if not slots:
            raise ValueError("slice_of needs at least one parameter")
        for left, right in itertools.pairwise(slots):
            if right.dtype != left.dtype or right.offset != left.end:
                raise ValueError(f"{left.name!r} and {right.name!r} are not neighbours in the arena")
        return buffers[slots[0].dtype][slots[0].offset : slots[-1].end]

    def new_buffers(self) -> dict[torch.dtype, Tensor]:
        """Returns zeros in the layout of the weights and the precision of their masters, for another role such as
        momentum."""
        return {
            dtype: torch.zeros(size, dtype=_master_dtype(dtype), device=self.device)
            for dtype, size in self._sizes.items()
        }

    def views(self, buffers: dict[torch.dtype, Tensor]) -> dict[str, Tensor]:
        """Returns each parameter's part of a role's buffers, in the parameter's shape and memory layout."""
        return {slot.name: self._view(slot, buffers[slot.dtype]) for slot in self.slots}

    def named_masters(self) -> dict[str, Tensor]:
        """Returns views of the fp32 masters, for the parameters whose working weight has 16 bits."""
        return {slot.name: self._full_view(slot) for slot in self.slots if slot.dtype in HALF_DTYPES}

    def flat_weights(self) -> list[Tensor]:
        """Returns every buffer with weights or masters. A broadcast of the weights must send them all."""
        return [*self.weights.values(), *([] if self.masters is None else [self.masters])]

    def has_thawed(self) -> bool:
        """Whether a parameter that was frozen when the arena was built is trainable now. Fast enough for every step."""
        return any(param.requires_grad for param in self._frozen)

    def left_out(self) -> list[str]:
        """Returns the names of trainable parameters outside the arena: when it was built, they were frozen or
        missing."""
        model, held = self._model(), {slot.param for slot in self.slots}
        return [] if model is None else [n for n, p in model.named_parameters() if p.requires_grad and p not in held]

    def holds(self, slot: Slot) -> bool:
        """Whether the parameter's data is still in the arena; `.to()` moves it out."""
        return slot.param.data_ptr() == self._weight_views[slot.name].data_ptr()

    # --- a step -------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Sets every `param.grad` to None. If the model was moved to another device, the arena follows first.

        The buffers keep their values: backward overwrites them, and `collect` clears those that it did not reach.
        """
        self.reclaim()
        for slot in self.slots:
            slot.param.grad = None

    def collect(self, names: Sequence[str] | None = None) -> None:
        """Brings the gradients of these parameters, by default of all, into the buffers. Must be called after backward.

        Gradients that autograd allocated elsewhere are copied, with one multi-tensor copy per dtype. A parameter
        without a gradient gets zeros.
        """
        slots = self.slots if names is None else [self._by_name[name] for name in names]
        sources: dict[torch.dtype, list[Tensor]] = {}
        targets: dict[torch.dtype, list[Tensor]] = {}
        missing: list[Tensor] = []
        for slot in slots:
            grad, view = slot.param.grad, self._grad_views[slot.name]
            if grad is None:
                missing.append(view)
            elif grad.layout != torch.strided:
                raise InputError(
                    f"the gradient of {slot.name} is sparse, and an arena supports only dense gradients; "
                    "use sparse=False in its layer"
                )
            elif grad.data_ptr() != view.data_ptr():
                sources.setdefault(slot.dtype, []).append(grad.detach())
                targets.setdefault(slot.dtype, []).append(view)
                slot.param.grad = view
        for dtype, views in targets.items():
            torch._foreach_copy_(views, sources[dtype])  # pyright: ignore[reportPrivateImportUsage]
        if missing:
            torch._foreach_zero_(missing)  # pyright: ignore[reportPrivateImportUsage]

    def grad_view(self, name: str) -> Tensor:
        """Returns the view into which a kernel writes this gradient directly. The caller then sets `param.grad` to
        it."""
        return self._grad_views[name]

    # --- changes from outside -----------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Allocates the arena again on the new device if `.to()` moved parameters out of it; otherwise does nothing."""
        if [slot.param.data_ptr() for slot in self.slots] == self._addresses:
            return
        if self.pinned:
            raise RuntimeError("the model was moved after a graph captured its arena; move it first, then capture")
        for slot in self.slots:
            if slot.param.dtype != slot.dtype:
                raise RuntimeError(
                    f"{slot.name} became {slot.param.dtype} while its arena holds {slot.dtype}; "
                    "build a new Arena(dtype=...) instead of casting the model"
                )
        masters = self.masters
        self._allocate(self.slots[0].param.device)
        self._fill({slot.name: slot.param.detach() for slot in self.slots})
        if masters is not None and self.masters is not None:
            self.masters.copy_(masters)
        self._bind()
        self.notify_loaded()

    def call_on_load(self, callback: Callable[[], None]) -> None:
        """Registers a bound method that is called after weights were loaded or moved. The reference to it is weak."""
        self._on_load.append(weakref.WeakMethod(callback))

    def notify_loaded(self) -> None:
        for reference in self._on_load:
            if callback := reference():
                callback()

    def load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills masters from `tensors`, then the working weights from the masters. Unknown names are ignored."""
        self.reclaim()
        self._fill({name: tensor for name, tensor in tensors.items() if name in self._by_name})
        self.notify_loaded()

    # --- inside -------------------------------------------------------------------------------------------------

    def _allocate(self, device: torch.device) -> None:
        self.weights = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in self._sizes.items()}
        self.grads = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in self._sizes.items()}
        half = [dtype for dtype in self._sizes if dtype in HALF_DTYPES]
        self.masters = torch.zeros(self._sizes[half[0]], dtype=torch.float32, device=device) if half else None
        self._weight_views = self.views(self.weights)
        self._grad_views = self.views(self.grads)
        self._addresses = [view.data_ptr() for view in self._weight_views.values()]

    def _full_view(self, slot: Slot) -> Tensor:
        in_masters = slot.dtype in HALF_DTYPES and self.masters is not None
        return self._view(slot, self.masters if in_masters else self.weights[slot.dtype])  # type: ignore[arg-type]

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            slot = self._by_name[name]
            full = self._full_view(slot)
            full.copy_(tensor)
            if slot.dtype in HALF_DTYPES:
                self._weight_views[name].copy_(full)

    def _bind(self) -> None:
        for slot in self.slots:
            grad = slot.param.grad
            slot.param.grad = None  # torch rejects data of another dtype while a gradient exists
            slot.param.data = self._weight_views[slot.name]
            if grad is not None:
                self._grad_views[slot.name].copy_(grad)
                slot.param.grad = self._grad_views[slot.name]

    def _view(self, slot: Slot, buffer: Tensor) -> Tensor:
        shape, strides = self._layouts[slot.name]
        return buffer.as_strided(shape, strides, slot.offset)

    def _hook(self, model: nn.Module) -> None:
        # A copy of the model has these hooks, too, and they must not change this arena. They therefore refer to the
        # arena weakly and check that they run for the original module.
        me: weakref.ref[Arena] = weakref.ref(self)
        for slot in self.slots:
            slot.param.place_of_grad = GradPlace(me, slot.name)  # type: ignore[attr-defined]
            slot.param.register_post_accumulate_grad_hook(_copy_hook(me, slot.name))
        local = {slot.param: slot.name for slot in self.slots}
        for module in model.modules():
            mine = {name: local[p] for name, p in module.named_parameters(recurse=False) if p in local}
            if mine:
                module.register_load_state_dict_pre_hook(_LoadHook(me, module, mine))
        model.register_load_state_dict_post_hook(_LoadedHook(me, model, {}))


class GradPlace:
    """For code that computes a gradient itself: returns the arena's view for it. A copy of this object belongs to no
    arena."""

    def __init__(self, arena_ref: weakref.ref[Arena] | None, name: str) -> None:
        self._arena_ref, self._name = arena_ref, name
        self._last: TensorWeakRef | None = None

    def __call__(self) -> Tensor | None:
        """Returns a new view of the gradient's memory, because autograd copies a gradient that has other references.

        Returns None while the last view is alive. This happens if a graph uses a parameter twice: autograd keeps the
        first gradient there until it adds the second one, which needs memory of its own.
        """
        arena = None if self._arena_ref is None else self._arena_ref()
        if arena is None or (self._last is not None and self._last() is not None):
            return None
        view = arena.grad_view(self._name).detach()
        self._last = TensorWeakRef(view)
        return view

    def __reduce__(self) -> tuple[Any, ...]:
        return GradPlace, (None, self._name)


def _copy_hook(arena_ref: weakref.ref[Arena], name: str) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        arena = arena_ref()
        if arena is not None and arena.copy_on_ready:
            arena.collect([name])

    return hook


class _Hook:
    """A hook of one module for its arena. It does nothing for a copy of the module, or after it was unpickled."""

    def __init__(self, arena_ref: weakref.ref[Arena], module: nn.Module, names: Mapping[str, str]) -> None:
        self._arena_ref, self._module, self._names = arena_ref, weakref.ref(module), names

    def arena(self, module: nn.Module) -> Arena | None:
        return self._arena_ref() if module is self._module() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass


class _LoadHook(_Hook):
    """Fills masters from the state dict before torch rounds its values to the working precision."""

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        arena = self.arena(module)
        if arena is None:
            return
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError("load_state_dict(assign=True) would take the model out of its arena; load by copy")
        arena.reclaim()
        for local, name in self._names.items():
            tensor = state_dict.get(prefix + local)
            slot = arena.slot(name)
            if isinstance(tensor, Tensor) and tensor.shape == slot.param.shape and slot.dtype in HALF_DTYPES:
                arena._fill({name: tensor})


class _LoadedHook(_Hook):
    def __call__(self, module: nn.Module, _: Any) -> None:
        if arena := self.arena(module):
            arena.notify_loaded()


def _is_trainable(owner: tuple[nn.Module, str]) -> bool:
    module, name = owner
    return module.get_parameter(name).requires_grad


def _check_order(order: Sequence[str], known: dict[str, Any]) -> None:
    if isinstance(order, str) or not isinstance(order, Sequence):
        raise InputError(f"order is {shown(order)}; give the names of backward_order(model, probe)")
    missing, unknown = set(known) - set(order), set(order) - set(known)
    twice = {name for name in order if order.count(name) > 1} if len(order) != len(set(order)) else set()
    if missing or unknown or twice:
        raise InputError(
            f"order must name each trainable parameter once: missing {sorted(missing)}, unknown {sorted(unknown)}, "
            f"twice {sorted(twice)}"
        )


def _aligned(elements: int, dtype: torch.dtype) -> int:
    unit = ALIGN_BYTES // dtype.itemsize
    return -(-elements // unit) * unit


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _working_dtype(module: nn.Module, kind: str, param: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a parameter. Norm parameters and biases stay fp32 if their module accepts that.

    torch's batch norm accepts fp32 parameters with 16-bit activations; its convolutions, linear layers, and layer norm
    on a GPU do not. Other modules declare it with the attribute `takes_fp32_parameters = True`.
    """
    if not param.is_floating_point():
        raise InputError(
            f"a parameter of {type(module).__name__} is {param.dtype}; an arena supports only real floating-point "
            "parameters: keep a complex parameter as two real ones (torch.view_as_real)"
        )
    wide = isinstance(module, _NormBase) or getattr(module, "takes_fp32_parameters", False)
    return torch.float32 if dtype in HALF_DTYPES and kind != "weight" and wide else dtype


def _dense_strides(param: Tensor) -> tuple[int, ...]:
    """Returns the parameter's own strides (channels_last is kept), or contiguous ones if it has gaps or overlaps."""
    return torch.empty_like(param, device="meta", memory_format=torch.preserve_format).stride()


def _cast_frozen(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Casts frozen parameters, which stay outside the arena, by the same policy. Returns the original values of those
    that were rounded, for checkpoints. Buffers are cast for fp64 only."""
    rounded: dict[str, Tensor] = {}
    for full_name, (module, name) in owners(model).items():
        param = module.get_parameter(name)
        if not param.requires_grad and param.is_floating_point():
            cast = param.data.to(_working_dtype(module, kind_of(module, param), param, dtype))
            if cast.element_size() < param.element_size():
                rounded[full_name] = param.detach().to("cpu", copy=True)
            param.data = cast
    if dtype == torch.float64:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)
    return rounded


def _cast_constants(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts buffers to 16 bits if an operation combines them with 16-bit activations or parameters and needs one dtype.

    Biases: in timm's EVA, BEiT and SwinV2, queries and values have a bias, and keys have a buffer of zeros, which is
    concatenated with these. Squares: the masks of Swin's windows, and the filters of timm's BlurPool2d, one for each
    channel. A persistent buffer may be a running mean, and one of another shape a table of positions; these are not
    cast, except that the statistics of batch norm become fp32.
    """
    for module in model.modules():
        if isinstance(module, _NormBase):  # its parameters and, for torch, its statistics must be fp32 or fp64
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype in HALF_DTYPES:  # the whole model was cast to 16 bits before
                    module._buffers[name] = buffer.float()
    if dtype not in HALF_DTYPES:
        return
    for module in model.modules():
        biases = {p.shape for p in module.parameters(recurse=False) if p.ndim == 1 and p.dtype == dtype}
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is None or not buffer.is_floating_point():
                continue
            is_square = buffer.ndim > 2 and buffer.shape[-2] == buffer.shape[-1] > 1
            if is_square or buffer.shape in biases:
                module._buffers[name] = buffer.to(dtype)
