"""How a config field is declared: its default, the help text of its flag, and what its value may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

# What a number must do or be, by the words an error says it with
RULES: dict[str, Callable[[float], bool]] = {
    "be positive": lambda value: value > 0,
    "not be negative": lambda value: value >= 0,
    "be in [0, 1)": lambda value: 0 <= value < 1,
    "be in (0, 1]": lambda value: 0 < value <= 1,
}
POSITIVE, NOT_NEGATIVE, BELOW_ONE, SHARE = RULES


class BatchPhase(NamedTuple):
    """The number of samples per step over all ranks, from an epoch on (Sony's batch-size control)."""

    from_epoch: float
    global_batch: int


class SizePhase(NamedTuple):
    """From this epoch on, training images of this many pixels a side (progressive resizing)."""

    from_epoch: float
    image_size: int


class LayerRate(NamedTuple):
    """A layer, and all in it, takes this factor of the rate; 0: it is frozen (hyperbatch/schedule/layers.py)."""

    layer: str
    factor: float


def option(
    default: Any,
    help: str,
    allowed: tuple[str, ...] | str = (),
    *,
    free: bool = False,
    repeated: bool = True,
    needs: tuple[str, ...] = (),
) -> Any:
    """A field and what is known of it: the help text of its flag, and the names it may be or the rule a number obeys.

    free: a resumed run may change it, because it says where things are or how the work is cut, not what is computed.
    repeated=False: a command that does the run again leaves it out. needs: another field, and the values of it with
    which alone this one has an effect.
    """
    about = {"help": help, "allowed": allowed, "free": free, "repeated": repeated, "needs": needs}
    return field(default=default, metadata=about)
