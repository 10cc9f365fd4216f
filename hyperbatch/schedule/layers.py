"""Which layers take another rate, and which none at all: `--layer-rates '*:0.1,head:1,conv1:0'`.

A name stands for a layer and all in it (`layer1`, `layer1.0.conv2`, `blocks.*.norm1`), `head` for the last linear
layer, `*` for everything. Where several match a parameter, the last one counts. A factor of 0 freezes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hyperbatch.config import LayerRate, format_value
from hyperbatch.errors import InputError, nearest

HEAD = "head"


def layer_factors(rates: Sequence[LayerRate], names: Sequence[str], head: str | None) -> dict[str, float]:
    """Each parameter's factor on the rate. names: of all parameters; head: of the last linear layer, if there is one.

    InputError for a layer that the model does not have, or when nothing is left to train.
    """
    factors = dict.fromkeys(names, 1.0)
    for layer, factor in rates:
        found = [name for name in names if _is_in(name, layer)]
        if not found and layer == HEAD and head is not None:
            found = [name for name in names if _is_in(name, head)]
        if not found:
            raise InputError(f"--layer-rates: the model has no layer {layer!r}{nearest(layer, _layers(names))}")
        factors.update(dict.fromkeys(found, factor))
    if rates and not any(factors.values()):
        raise InputError(f"--layer-rates {format_value(tuple(rates))} freezes every layer; leave one to train")
    return factors


def _is_in(name: str, layer: str) -> bool:
    return fnmatchcase(name, layer) or fnmatchcase(name, f"{layer}.*")


def _layers(names: Sequence[str]) -> list[str]:
    """What a person would name: the outermost layers, and the head."""
    return [*dict.fromkeys(name.partition(".")[0] for name in names), HEAD]
