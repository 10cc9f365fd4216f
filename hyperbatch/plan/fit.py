"""The memory of a step and the batch that fits: one rule for `train`, `--dry-run`, `plan` and `simulate`.

    | weights masters gradients momentum products | kept for backward, sample x batch x HEADROOM | not to be filled |
      fixed by the model                            grows with the micro-step                      1 - USABLE

The numbers may come from a model's table (planning, without torch), from a probe that counts what autograd keeps, or
from peaks measured on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hyperbatch.plan.types import TensorSpec
from hyperbatch.vocabulary import DTYPE_BYTES, HALF_DTYPES

USABLE = 0.8  # fraction of a device's memory that a step may fill; the rest is for fragmentation and libraries
# A step takes more than autograd keeps: gradients of activations, workspaces, prefetched batches, cached images.
HEADROOM = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The bytes that one rank stores in a micro-step, by role. Workspaces of libraries are not included."""

    weights: int
    masters: int
    gradients: int
    momentum: int  # and the second moments of LAMB and AdamW
    products: int  # buffers of Muon, which a checkpoint does not contain
    activations: int

    @property
    def total(self) -> int:
        return self.stored + self.gradients + self.products + self.activations

    @property
    def stored(self) -> int:
        """The bytes that a checkpoint contains."""
        return self.weights + self.masters + self.momentum

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def step_memory(specs: Sequence[TensorSpec], kept_bytes: int, optimizer: str = "lars") -> StepMemory:
    """Returns the memory of a step. kept_bytes: what autograd keeps for the backward of the whole micro-step.

    LAMB and AdamW have two moments. Muon has two 16-bit buffers for products, which together are as large as its
    momentum.
    """
    moment = sum(spec.numel * max(4, DTYPE_BYTES[spec.dtype]) for spec in specs)
    return StepMemory(
        weights=sum(spec.nbytes for spec in specs),
        masters=sum(spec.numel * 4 for spec in specs if spec.dtype in HALF_DTYPES),
        gradients=sum(spec.nbytes for spec in specs),
        momentum=moment * (2 if optimizer in ("lamb", "adamw") else 1),
        products=moment if optimizer == "muon" else 0,
        activations=kept_bytes,
    )


def fitting_batch(
    memory_bytes: float, fixed_bytes: float, sample_bytes: float, *, usable: float = USABLE, headroom: float = HEADROOM
) -> int:
    """Returns how many samples of one micro-step fit, at least one. sample_bytes: what autograd keeps per sample.

    The numbers of `split_peaks` need no allowance for other memory: use headroom=1.
    """
    return max(1, int((memory_bytes * usable - fixed_bytes) / (sample_bytes * headroom)))


def split_peaks(small: tuple[int, int], large: tuple[int, int]) -> tuple[float, float]:
    """Returns a step's (fixed bytes, bytes per sample) from its peak memory at two batches, as (samples, bytes)."""
    sample_bytes = (large[1] - small[1]) / (large[0] - small[0])
    return small[1] - small[0] * sample_bytes, sample_bytes
