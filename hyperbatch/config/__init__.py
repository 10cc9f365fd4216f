"""The dataclasses that a recipe fills in. They do not need torch: a config can be read, printed and checked anywhere.

A config is a tree of sections, but every field name is unique in the whole tree. A command line flag
(`--label-smoothing 0.1`), an override (`config.override(label_smoothing=0.1)`) and an error message therefore need the
field's name only, without its section.
"""

from hyperbatch.config.option import RULES, BatchPhase, LayerRate, SizePhase
from hyperbatch.config.running import CommConfig, RunConfig
from hyperbatch.config.training import DataConfig, ModelConfig, OptimConfig, ScheduleConfig
from hyperbatch.config.tree import Config, FieldSpec, check, fields, section_titles, without_effect
from hyperbatch.config.values import format_epochs, format_value

__all__ = [
    "RULES",
    "BatchPhase",
    "CommConfig",
    "Config",
    "DataConfig",
    "FieldSpec",
    "LayerRate",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "ScheduleConfig",
    "SizePhase",
    "check",
    "fields",
    "format_epochs",
    "format_value",
    "section_titles",
    "without_effect",
]
