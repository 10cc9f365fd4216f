"""hyperbatch: train image classifiers to a target accuracy in the shortest time.

The public names are resolved on first use, so importing the package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hyperbatch.arena import Arena as Arena
    from hyperbatch.comm import GradSync as GradSync
    from hyperbatch.comm import GridComm as GridComm
    from hyperbatch.comm import all_reduce as all_reduce
    from hyperbatch.comm import ddp_kwargs as ddp_kwargs
    from hyperbatch.comm import register_ddp_hook as register_ddp_hook
    from hyperbatch.config import Config as Config
    from hyperbatch.errors import InputError as InputError
    from hyperbatch.launch import train as train
    from hyperbatch.models import create_model as create_model
    from hyperbatch.optim import LAMB as LAMB
    from hyperbatch.optim import LARS as LARS
    from hyperbatch.optim import param_groups as param_groups
    from hyperbatch.plan.strategies import plan_groups as plan_groups
    from hyperbatch.plan.types import GroupPlan as GroupPlan
    from hyperbatch.plan.types import RankGrid as RankGrid
    from hyperbatch.plan.types import StepTiming as StepTiming
    from hyperbatch.recipes import get_recipe as get_recipe
    from hyperbatch.record import RunRecord as RunRecord
    from hyperbatch.sim.sweep import simulate as simulate

_HOME = {
    "Arena": "arena",
    "Config": "config",
    "GradSync": "comm",
    "GridComm": "comm",
    "GroupPlan": "plan.types",
    "InputError": "errors",
    "LAMB": "optim",
    "LARS": "optim",
    "RankGrid": "plan.types",
    "RunRecord": "record",
    "StepTiming": "plan.types",
    "all_reduce": "comm",
    "create_model": "models",
    "ddp_kwargs": "comm",
    "get_recipe": "recipes",
    "param_groups": "optim",
    "plan_groups": "plan.strategies",
    "register_ddp_hook": "comm",
    "simulate": "sim.sweep",
    "train": "launch",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hyperbatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hyperbatch.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
