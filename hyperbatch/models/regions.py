"""Which parts of a model are compiled by themselves: its repeated blocks, or all of it where nothing repeats.

    stem   blocks.0   blocks.1   ...   blocks.11   head          one compilation serves all blocks of a kind
    plain  └────────────── regions ────────────┘   plain

Only modules are looked at, nothing is run: a block is a module that has layers in it and whose class occurs more than
once with the same layers and shapes. Other modules of such a class are regions, too, as the first block of a stage,
which changes the shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

LEAST_SHARE = 0.5  # of a model's layers that blocks must hold: with less, most of the step would stay as it is


@dataclass(frozen=True, slots=True)
class Region:
    """A module that is compiled by itself. Regions of one kind are built alike."""

    name: str  # in the model; empty: the model itself
    module: nn.Module
    kind: int


def find_regions(model: nn.Module) -> tuple[Region, ...]:
    """In the order of definition, none inside another."""
    made = _make(model)
    blocks = {name: module for name, module in model.named_modules() if name and _is_block(module)}
    alike = Counter(made[module] for module in blocks.values())
    repeated = {_family(module, made) for module in blocks.values() if alike[made[module]] > 1}
    repeated -= _inner(model, made, alike, repeated)
    found: dict[nn.Module, str] = {}
    for name, module in _outermost(model, made, repeated):
        found.setdefault(module, name)  # a module may stand in several places
    if not found or _layers(found) < LEAST_SHARE * _layers([model]):
        found = {model: ""}
    kinds: dict[Hashable, int] = {}
    return tuple(Region(name, module, kinds.setdefault(made[module], len(kinds))) for module, name in found.items())


def _make(model: nn.Module) -> dict[nn.Module, Hashable]:
    """Modules -> how they are built: class, own tensors, settings that they print, and the same of their children."""
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
    """Whether it can be called (a ModuleList cannot), and has layers in it that are trained."""
    callable_ = type(module).forward is not nn.Module.forward
    return callable_ and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _family(module: nn.Module, made: dict[nn.Module, Hashable]) -> Hashable:
    """Its class. A Sequential may be anything, so that only those built alike belong together."""
    return made[module] if isinstance(module, nn.Sequential) else type(module)


def _inner(
    model: nn.Module, made: dict[nn.Module, Hashable], alike: Counter[Hashable], repeated: set[Hashable]
) -> set[Hashable]:
    """Families that others stand for: those that repeat inside of blocks alone, as the attention of a transformer's
    blocks, and Sequentials that are stacks of blocks."""
    outside: set[Hashable] = set()
    stacks: set[Hashable] = set()

    def walk(module: nn.Module, inside: bool) -> None:
        for child in module.children():
            family = _family(child, made) if _is_block(child) else None
            is_region = family in repeated and not isinstance(child, nn.Sequential)
            if family in repeated and not inside and alike[made[child]] > 1:
                outside.add(family)
            if family in repeated and isinstance(child, nn.Sequential):
                deeper = (m for m in child.modules() if m is not child and _is_block(m))
                if any(_family(m, made) in repeated for m in deeper):
                    stacks.add(family)
            walk(child, inside or is_region)

    walk(model, False)
    return (repeated - outside) | stacks


def _outermost(
    module: nn.Module, made: dict[nn.Module, Hashable], families: set[Hashable], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if _is_block(child) and _family(child, made) in families:
            yield prefix + name, child
        else:
            yield from _outermost(child, made, families, f"{prefix}{name}.")


def _layers(modules: Iterable[nn.Module]) -> int:
    """Modules in these that hold parameters of their own."""
    inside = {layer for module in modules for layer in module.modules()}
    return sum(any(True for _ in layer.parameters(recurse=False)) for layer in inside)
