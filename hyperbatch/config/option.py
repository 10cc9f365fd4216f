"""The declaration of a config field: its default, the help text of its flag, and its allowed values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

# The rules for numbers. The keys are the words that an error message uses.
RULES: dict[str, Callable[[float], bool]] = {
    "be positive": lambda value: value > 0,
    "not be negative": lambda value: value >= 0,
    "be in [0, 1)": lambda value: 0 <= value < 1,
    "be in (0, 1]": lambda value: 0 < value <= 1,
}
POSITIVE, NOT_NEGATIVE, BELOW_ONE, SHARE = RULES


class BatchPhase(NamedTuple):
    """The number of samples per step over all ranks from this epoch on (Sony's batch-size control)."""

    from_epoch: float
    global_batch: int


class SizePhase(NamedTuple):
    """The side of training images in pixels from this epoch on (progressive resizing)."""

    from_epoch: float
    image_size: int


class LayerRate(NamedTuple):
    """A layer, with everything in it, and the factor of its learning rate; 0 freezes it
    (hyperbatch/schedule/layers.py).
    """

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
    """Declares a field with the help text of its flag, and its allowed names or the rule for its number.

    free: a resumed run may change it, because it affects where things are or how the work is divided, and not what is
    computed.
    repeated=False: a command that repeats the run omits it.
    needs: the name of another field, and its values; this field has an effect only with one of them.
    """
    about = {"help": help, "allowed": allowed, "free": free, "repeated": repeated, "needs": needs}
    return field(default=default, metadata=about)
