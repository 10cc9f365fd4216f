"""hyperbatch: train image classifiers to a target accuracy in the shortest time.

The public names are resolved on first use, so importing the package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hyperbatch.arena import Arena as Arena
    from hyperbatch.callbacks import Callback as Callback
    from hyperbatch.comm import GradSync as GradSync
    from hyperbatch.comm import GridComm as GridComm
    from hyperbatch.comm import GridHookState as GridHookState
    from hyperbatch.comm import all_reduce as all_reduce
    from hyperbatch.comm import broadcast_weights as broadcast_weights
    from hyperbatch.comm import check_collectives as check_collectives
    from hyperbatch.comm import ddp_bucket_bytes as ddp_bucket_bytes
    from hyperbatch.comm import ddp_kwargs as ddp_kwargs
    from hyperbatch.comm import grid_hook as grid_hook
    from hyperbatch.comm import param_specs as param_specs
    from hyperbatch.comm import register_ddp_hook as register_ddp_hook
    from hyperbatch.config import BatchPhase as BatchPhase
    from hyperbatch.config import Config as Config
    from hyperbatch.config import ModelConfig as ModelConfig
    from hyperbatch.config import ScheduleConfig as ScheduleConfig
    from hyperbatch.data.digits import open_digits as open_digits
    from hyperbatch.data.source import ArraySource as ArraySource
    from hyperbatch.data.source import EncodedSource as EncodedSource
    from hyperbatch.engine.session import Session as Session
    from hyperbatch.errors import InputError as InputError
    from hyperbatch.errors import RunFailed as RunFailed
    from hyperbatch.launch import train as train
    from hyperbatch.models import create_model as create_model
    from hyperbatch.models.fused import fuse as fuse
    from hyperbatch.models.fused import why_not_fused as why_not_fused
    from hyperbatch.optim import LAMB as LAMB
    from hyperbatch.optim import LARS as LARS
    from hyperbatch.optim import AdamW as AdamW
    from hyperbatch.optim import Muon as Muon
    from hyperbatch.optim.build import set_rate as set_rate
    from hyperbatch.optim.precision import LossScaler as LossScaler
    from hyperbatch.optim.sharded import ShardedUpdate as ShardedUpdate
    from hyperbatch.params import backward_order as backward_order
    from hyperbatch.params import param_groups as param_groups
    from hyperbatch.plan.clusters import format_machine_file as format_machine_file
    from hyperbatch.plan.clusters import load_cluster as load_cluster
    from hyperbatch.plan.planner import format_plan as format_plan
    from hyperbatch.plan.planner import make_plan as make_plan
    from hyperbatch.plan.strategies import plan_groups as plan_groups
    from hyperbatch.plan.types import GroupPlan as GroupPlan
    from hyperbatch.plan.types import RankGrid as RankGrid
    from hyperbatch.plan.types import StepTiming as StepTiming
    from hyperbatch.predict import Classifier as Classifier
    from hyperbatch.predict import Prediction as Prediction
    from hyperbatch.predict import load_model as load_model
    from hyperbatch.recipes import get_recipe as get_recipe
    from hyperbatch.recipes.files import load_config as load_config
    from hyperbatch.recipes.files import save_config as save_config
    from hyperbatch.record import RunRecord as RunRecord
    from hyperbatch.record import write_trace as write_trace
    from hyperbatch.sim.sweep import format_simulation as format_simulation
    from hyperbatch.sim.sweep import simulate as simulate

# Public name -> the module it comes from. The imports above say the same to type checkers; a test compares them.
_HOME = {
    "AdamW": "optim",
    "Arena": "arena",
    "ArraySource": "data.source",
    "BatchPhase": "config",
    "Callback": "callbacks",
    "Classifier": "predict",
    "Config": "config",
    "EncodedSource": "data.source",
    "GradSync": "comm",
    "GridComm": "comm",
    "GridHookState": "comm",
    "GroupPlan": "plan.types",
    "InputError": "errors",
    "LAMB": "optim",
    "LARS": "optim",
    "LossScaler": "optim.precision",
    "ModelConfig": "config",
    "Muon": "optim",
    "Prediction": "predict",
    "RankGrid": "plan.types",
    "RunFailed": "errors",
    "RunRecord": "record",
    "ScheduleConfig": "config",
    "Session": "engine.session",
    "ShardedUpdate": "optim.sharded",
    "StepTiming": "plan.types",
    "all_reduce": "comm",
    "backward_order": "params",
    "broadcast_weights": "comm",
    "check_collectives": "comm",
    "create_model": "models",
    "ddp_bucket_bytes": "comm",
    "ddp_kwargs": "comm",
    "format_machine_file": "plan.clusters",
    "format_plan": "plan.planner",
    "format_simulation": "sim.sweep",
    "fuse": "models.fused",
    "get_recipe": "recipes",
    "grid_hook": "comm",
    "load_cluster": "plan.clusters",
    "load_config": "recipes.files",
    "load_model": "predict",
    "make_plan": "plan.planner",
    "open_digits": "data.digits",
    "param_groups": "params",
    "param_specs": "comm",
    "plan_groups": "plan.strategies",
    "register_ddp_hook": "comm",
    "save_config": "recipes.files",
    "set_rate": "optim.build",
    "simulate": "sim.sweep",
    "train": "launch",
    "why_not_fused": "models.fused",
    "write_trace": "record",
}

__all__ = ["__version__", *sorted(_HOME)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hyperbatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hyperbatch.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
