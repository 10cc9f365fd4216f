"""The frozen dataclasses that planner, simulator, runner and report share, without torch.

TensorSpec   one parameter of the arena
RankGrid     rows x columns of ranks; a row is the fast direction, the ranks of one node
GroupPlan    which gradients are sent together, in the order in which they are sent
StepTiming   one step, predicted or measured: the same columns for both
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from typing import Any, Self

from hyperbatch.errors import InputError, shown
from hyperbatch.schedule.layers import is_broadcast
from hyperbatch.vocabulary import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One trainable parameter. `kind` is "weight", "bias" or "norm"; the optimizer treats the last two differently."""

    name: str
    shape: tuple[int, ...]
    kind: str = "weight"
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies to it, judged by name and shape; see `hyperbatch.params.undecayed`."""
        return self.kind == "weight" and not is_broadcast(self.name, self.shape)


def param_specs(module: Any, order: Sequence[str] | None = None) -> tuple[TensorSpec, ...]:
    """Returns the specs of the trainable parameters of a torch module.

    order: the names in backward's order; by default the reverse order of definition.
    """
    if not hasattr(module, "named_parameters"):  # this room does not import torch
        raise InputError(f"{shown(module)} has no named parameters; give a torch module")
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    odd = next((name for name in order or () if name not in params), None)
    if odd is not None:
        raise InputError(f"order names {odd!r}, which is not a trainable parameter of the model")
    return tuple(
        TensorSpec(name=name, shape=tuple(params[name].shape), dtype=str(params[name].dtype).removeprefix("torch."))
        for name in (reversed(params) if order is None else order)
    )


@dataclass(frozen=True, slots=True)
class RankGrid:
    """rows x columns ranks, e.g. 4 nodes of 8 GPUs.

    columns ->        row = one node (fast links)
    0  1  2  3
    4  5  6  7        rank = row * columns + column
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if not all(isinstance(size, Integral) and size >= 1 for size in (self.rows, self.columns)):
            raise InputError(f"grid {self.rows}x{self.columns}: rows and columns must be positive whole numbers")

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @classmethod
    def parse(cls, text: str) -> Self:
        rows, cross, columns = text.lower().partition("x")
        if not (cross and rows.isdecimal() and columns.isdecimal()):
            raise InputError(f"grid {text!r} is not ROWSxCOLUMNS, e.g. 4x8 for 4 nodes of 8 GPUs")
        return cls(int(rows), int(columns))

    @classmethod
    def of_hosts(cls, world_size: int, ranks_per_host: int) -> Self:
        """The default grid: one row per host, or one row of all ranks if they do not fill whole hosts."""
        columns = min(ranks_per_host, world_size)
        return cls(world_size // columns, columns) if world_size % columns == 0 else cls(1, world_size)

    @classmethod
    def square(cls, world_size: int) -> Self:
        """The grid closest to a square that the world size allows, with no more columns than rows."""
        columns = next(n for n in range(math.isqrt(world_size), 0, -1) if world_size % n == 0)
        return cls(world_size // columns, columns)

    def check_world(self, world_size: int) -> None:
        if self.size != world_size:
            raise InputError(
                f"grid {self} holds {self.size} ranks, but there are {world_size}; "
                f"choose ROWSxCOLUMNS with a product of {world_size}"
            )

    def row_ranks(self, row: int) -> list[int]:
        return [row * self.columns + column for column in range(self.columns)]

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GradGroup:
    """Gradients that are sent in one all-reduce. They are neighbours in the arena of one dtype."""

    index: int
    parameters: tuple[str, ...]
    bytes: int
    dtype: str
    algorithm: str | None = None  # None: the algorithm of the run


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """The groups of one step, in the order in which they are launched on every rank."""

    strategy: str
    groups: tuple[GradGroup, ...]

    def check_covers(self, params: Sequence[TensorSpec]) -> None:
        """Raises ValueError unless each parameter is in exactly one group."""
        planned = [name for group in self.groups for name in group.parameters]
        known = [spec.name for spec in params]
        twice = (
            sorted({name for name in planned if planned.count(name) > 1}) if len(set(planned)) < len(planned) else []
        )
        missing = sorted(set(known) - set(planned))
        foreign = sorted(set(planned) - set(known))
        if twice or missing or foreign:
            raise ValueError(f"group plan {self.strategy!r}: twice {twice}, missing {missing}, unknown {foreign}")

    @property
    def hash(self) -> str:
        """Returns a hash that is the same on two ranks if and only if they would exchange the same groups."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)

    def with_algorithms(self, algorithms: Sequence[str]) -> Self:
        pairs = zip(self.groups, algorithms, strict=True)
        return replace(self, groups=tuple(replace(group, algorithm=name) for group, name in pairs))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` returned, or any dict with at least these fields, such as a whole plan's."""
        names = [field.name for field in fields(GradGroup) if field.name != "parameters"]
        groups = tuple(
            GradGroup(parameters=tuple(g["parameters"]), **{name: g[name] for name in names}) for g in values["groups"]
        )
        return cls(strategy=values["strategy"], groups=groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTiming:
    """One group's all-reduce within a step. Times are from the start of the step."""

    index: int
    algorithm: str
    bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """The time of each part of a step. `exposed_comm_s` is the communication that does not overlap with backward."""

    step_s: float
    forward_s: float
    backward_s: float
    exposed_comm_s: float
    update_s: float
    data_wait_s: float = 0.0
    groups: tuple[GroupTiming, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` returned, or any dict with at least these fields, such as a plan's or a record's."""

        def known(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
            return {field.name: given[field.name] for field in fields(kind) if field.name in given}

        own = known(cls, values)
        own["groups"] = tuple(GroupTiming(**known(GroupTiming, group)) for group in own.get("groups", ()))
        return cls(**own)

    def parts(self) -> list[tuple[str, float, float]]:
        """Returns (part, start_s, end_s) of the parts one after another. Parts that take no time are skipped."""
        found, at = [], 0.0
        for name in ("data_wait", "forward", "backward", "exposed_comm", "update"):
            seconds = getattr(self, f"{name}_s")
            if seconds > 0:
                found.append((name, at, at + seconds))
            at += max(0.0, seconds)
        return found
