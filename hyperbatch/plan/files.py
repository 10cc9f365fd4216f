"""Plans as files: `hyperbatch plan --output FILE` writes one, and `hyperbatch train --plan FILE` uses its groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperbatch.errors import InputError
from hyperbatch.plan.types import GroupPlan, TensorSpec

_MAKE_ONE = "make one with `hyperbatch plan RECIPE --output FILE`"


def save_plan(values: dict[str, Any], path: Path) -> None:
    """Writes the result of `planner.Plan.to_dict` to a file."""
    try:
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror}; give a file in a folder that exists") from error


def load_groups(path: Path) -> GroupPlan:
    """Reads the groups of a plan file, each with its all-reduce."""
    try:
        return GroupPlan.from_dict(json.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"--plan {path}: {error.strerror}; {_MAKE_ONE}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"--plan {path} is not a plan file; {_MAKE_ONE}") from error


def check_names(plan: GroupPlan, names: Iterable[str], path: Path, model: str) -> None:
    """Raises InputError unless each of the model's trained parameters is in exactly one group, and nothing else is."""
    planned, known = [name for group in plan.groups for name in group.parameters], set(names)
    missing, foreign = sorted(known - set(planned)), sorted(set(planned) - known)
    if missing or foreign:
        what = f"parameter {missing[0]} is in no group" if missing else f"it has no trained parameter {foreign[0]}"
        raise InputError(f"--plan {path} does not fit {model}: {what}; {_MAKE_ONE} for this recipe")
    if len(planned) != len(known):
        twice = next(name for name in planned if planned.count(name) > 1)
        raise InputError(f"--plan {path}: parameter {twice} is in two groups; {_MAKE_ONE}")


def fitted_groups(path: Path, specs: Sequence[TensorSpec], model: str) -> GroupPlan:
    """Reads the file's groups for a model whose gradients become ready in this order. InputError if they do not fit."""
    plan = load_groups(path)
    check_names(plan, (spec.name for spec in specs), path, model)
    known, groups = {spec.name: spec for spec in specs}, []
    for group in plan.groups:
        members = [known[name] for name in group.parameters]
        dtypes = sorted({spec.dtype for spec in members})
        if dtypes != [group.dtype]:
            raise InputError(
                f"--plan {path} was made for another precision: group {group.index} holds {group.dtype} gradients "
                f"there and {' and '.join(dtypes)} here; {_MAKE_ONE} for the precision of this run"
            )
        same = [spec.name for spec in specs if spec.dtype == group.dtype]
        first = same.index(group.parameters[0])
        if tuple(same[first : first + len(members)]) != group.parameters:
            raise InputError(
                f"--plan {path} does not fit {model}: backward finishes the parameters of group {group.index} in "
                f"another order here; use --grouping optimal, which measures it"
            )
        groups.append(replace(group, bytes=sum(spec.nbytes for spec in members)))
    return replace(plan, groups=tuple(groups))
