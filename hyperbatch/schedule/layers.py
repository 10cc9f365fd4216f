"""Factors of the learning rate by layer, as in `--layer-rates '*:0.1,head:1,conv1:0'`, and a summary of them.

A name means a layer and everything in it (`layer1`, `layer1.0.conv2`, `blocks.*.norm1`), `head` means the last linear
layer, and `*` means everything. If several names match a parameter, the last one counts. A factor of 0 freezes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

from hyperbatch.config import LayerRate, format_value
from hyperbatch.errors import InputError, nearest

HEAD = "head"


def layer_factors(rates: Sequence[LayerRate], names: Sequence[str], head: str | None) -> dict[str, float]:
    """Returns each parameter's factor of the learning rate.

    names: the names of all parameters. head: the name of the last linear layer, if there is one.
    Raises InputError for a layer that the model does not have, or if nothing is left to train.
    """
    factors = dict.fromkeys(names, 1.0)
    for layer, factor in rates:
        found = [name for name in names if is_in(name, layer)]
        if not found and layer == HEAD and head is not None:
            found = [name for name in names if is_in(name, head)]
        if not found and layer == HEAD and names:
            last = names[-1].rpartition(".")[0] or names[-1]
            raise InputError(
                f"--layer-rates: the model has no linear layer, for which head stands; name a layer, such as {last!r}"
            )
        if not found:
            raise InputError(f"--layer-rates: the model has no layer {layer!r}{nearest(layer, _layers(names))}")
        factors.update(dict.fromkeys(found, factor))
    if rates and not any(factors.values()):
        raise InputError(f"--layer-rates {format_value(tuple(rates))} freezes every layer; leave one to train")
    return factors


def is_in(name: str, layer: str) -> bool:
    """Whether a parameter belongs to a layer, by name. `*` in the layer's name matches anything."""
    return fnmatchcase(name, layer) or fnmatchcase(name, f"{layer}.*")


def is_broadcast(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is broadcast (a token, a position embedding or a scale), judged by its name and shape.

    It is broadcast over the batch (a first dimension of 1), or from a vector over at least two more dimensions
    (C x 1 x 1). N x 1 does not count, because it may be the weight of a layer with a single input. A parameter named
    `weight` is a factor in a product, whatever its shape, and does not count either.
    """
    vector = len(shape) > 2 and math.prod(shape) == max(shape)
    return len(shape) > 1 and (shape[0] == 1 or vector) and name.rpartition(".")[2] != "weight"


def _layers(names: Sequence[str]) -> list[str]:
    """Returns the layers to suggest to the user: the outermost ones, and the head."""
    return [*dict.fromkeys(name.partition(".")[0] for name in names), HEAD]


class ParamRow(NamedTuple):
    """The properties of a trainable parameter that `GroupSummary` counts."""

    name: str
    numel: int
    decayed: bool
    factor: float  # of the learning rate


@dataclass(frozen=True, slots=True)
class Count:
    tensors: int
    parameters: int

    @classmethod
    def of(cls, rows: Sequence[ParamRow]) -> Self:
        return cls(len(rows), sum(row.numel for row in rows))


@dataclass(frozen=True, slots=True)
class LayerFactor:
    """The parameters with the same factor of the learning rate."""

    factor: float
    count: Count
    first: str  # the first weight among them


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """How many trainable parameters have weight decay, and how many have each factor of the learning rate, sorted by
    factor."""

    decayed: Count
    undecayed: Count
    factors: tuple[LayerFactor, ...]  # empty if all factors are 1

    @classmethod
    def of(cls, rows: Iterable[ParamRow]) -> Self:
        rows = list(rows)
        by_factor: dict[float, list[ParamRow]] = {}
        for row in rows:
            by_factor.setdefault(row.factor, []).append(row)
        layers = tuple(
            LayerFactor(factor, Count.of(part), part[0].name)
            for factor, part in sorted(by_factor.items(), key=lambda item: item[0])
        )
        return cls(
            Count.of([row for row in rows if row.decayed]),
            Count.of([row for row in rows if not row.decayed]),
            () if by_factor.keys() <= {1.0} else layers,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
