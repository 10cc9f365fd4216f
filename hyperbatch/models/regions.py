"""Finds the parts of a model that are compiled separately: its repeated blocks, or the whole model if nothing repeats.

    stem   blocks.0   blocks.1   ...   blocks.11   head          one compilation serves all blocks of a kind
    plain  └────────────── regions ────────────┘   plain

The model is not run. A block is a module that contains layers and whose class occurs more than once with the same
layers and shapes. Other modules of such a class are regions, too, such as the first block of a stage, which changes the
shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

LEAST_SHARE = 0.5  # blocks must contain this share of a model's layers, or most of the step would not be compiled


@dataclass(frozen=True, slots=True)
class Region:
    """A module that is compiled separately. Regions of one kind have the same structure."""

    name: str  # name in the model; empty for the model itself
    module: nn.Module
    kind: int


def find_regions(model: nn.Module) -> tuple[Region, ...]:
    """Returns the regions in the order of definition. None is inside another."""
    made = _make(model)
    blocks = [module for module in model.modules() if module is not model and _is_block(module)]
    alike = Counter(made[block] for block in blocks)
    repeated = {_family(block, made) for block in blocks if alike[made[block]] > 1}
    repeated -= {made[block] for block in blocks if _is_stack(block, made, repeated)}
    # A class that repeats only inside of other blocks, such as a transformer's attention, is no family of regions.
    outer = {_family(block, made) for _, block in _outermost(model, made, repeated) if alike[made[block]] > 1}
    found: dict[nn.Module, str] = {}
    for name, block in _outermost(model, made, outer):
        found.setdefault(block, name)  # a module may occur in several places
    if not found or _layers(found) < LEAST_SHARE * _layers([model]):
        found = {model: ""}
    kinds: dict[Hashable, int] = {}
    return tuple(Region(name, module, kinds.setdefault(made[module], len(kinds))) for module, name in found.items())


def _make(model: nn.Module) -> dict[nn.Module, Hashable]:
    """Maps each module to its structure: class, printed settings, own tensors, and the structure of its children."""
    made: dict[nn.Module, Hashable] = {}

    def of(module: nn.Module) -> Hashable:
        if module not in made:
            made[module] = (
                type(module),
                module.extra_repr(),
                tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters(recurse=False)),
                tuple((name, buffer.shape, buffer.dtype) for name, buffer in module.named_buffers(recurse=False)),
                tuple((name, of(child)) for name, child in module.named_children()),
            )
        return made[module]

    of(model)
    return made


def _is_block(module: nn.Module) -> bool:
    """Whether the module can be called (a ModuleList cannot), has children, and has parameters."""
    callable_ = type(module).forward is not nn.Module.forward
    return callable_ and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _family(module: nn.Module, made: dict[nn.Module, Hashable]) -> Hashable:
    """Returns the family of a module: its class or, because a Sequential may contain anything, a Sequential's
    structure."""
    return made[module] if isinstance(module, nn.Sequential) else type(module)


def _is_stack(block: nn.Module, made: dict[nn.Module, Hashable], repeated: set[Hashable]) -> bool:
    """Whether the block is a Sequential of repeated blocks. Then these are the regions, and not the Sequential."""
    inside = (module for module in block.modules() if module is not block and _is_block(module))
    return isinstance(block, nn.Sequential) and any(_family(module, made) in repeated for module in inside)


def _outermost(
    module: nn.Module, made: dict[nn.Module, Hashable], families: set[Hashable], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if _is_block(child) and _family(child, made) in families:
            yield prefix + name, child
        else:
            yield from _outermost(child, made, families, f"{prefix}{name}.")


def _layers(modules: Iterable[nn.Module]) -> int:
    """Returns the number of modules inside these that have parameters of their own."""
    inside = {layer for module in modules for layer in module.modules()}
    return sum(any(True for _ in layer.parameters(recurse=False)) for layer in inside)
