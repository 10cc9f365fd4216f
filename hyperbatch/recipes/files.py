"""Config files: a recipe and the changes to it, in TOML.

    recipe = "digits"
    epochs = 5                # a field by its name, as on the command line
    global_batch = 128        # scales every batch phase, as --global-batch does

    [optim]                   # or in its section, as `hyperbatch train --help-all` lists it
    lr = 0.5

`format_config` writes every field, so that a run can be repeated even if a later version changes its recipe.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperbatch.config import Config, FieldSpec, fields, section_titles
from hyperbatch.durable import replace_text
from hyperbatch.errors import InputError, check_kind, check_number, nearest
from hyperbatch.recipes import DEFAULT, adapted, find_recipe, stretched

CUSTOM = Config().recipe  # the label of a config without a recipe
RUN_CONFIG = "config.toml"  # in a run's folder: the config that it was started with
GLOBAL_BATCH = "global_batch"  # not a config field; it scales every batch phase


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The contents of a file: the recipe, if it names one, and the fields that it sets."""

    recipe: str | None
    values: dict[str, Any]  # by name, including `global_batch`


def read_toml(path: Path, what: str, *, errors: str = "strict") -> tuple[str, dict[str, Any]]:
    """Returns the text of a TOML file and its values. InputError names the file and what it is."""
    try:
        text = path.read_text(encoding="utf-8-sig", errors=errors)  # some editors begin a file with a byte-order mark
        return text, tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{what} {path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{what} {path}: not valid TOML ({error})") from None


def read_config(path: Path) -> ConfigFile:
    """Reads a config file, or that of a run's folder. InputError names the file and the mistake in it."""
    if path.is_dir():
        path = path / RUN_CONFIG
    _, tables = read_toml(path, "--config", errors="surrogateescape")  # paths in it need not be valid UTF-8
    try:
        return parse_config(tables)
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None


def parse_config(tables: Mapping[str, Any]) -> ConfigFile:
    known = {spec.name: spec for spec in fields()}
    sections = section_titles()
    recipe = tables.get("recipe")
    if recipe is not None and not isinstance(recipe, str):
        raise InputError(f"recipe = {recipe!r} is not a text")
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if key in sections and isinstance(value, dict):
            part = {name: _value(name, inner, known, section=key) for name, inner in value.items()}
        elif key == "recipe":
            continue
        elif isinstance(value, dict):  # e.g. [optimizer], which is a field
            raise InputError(f"unknown section [{key}]{nearest(key, list(sections))}")
        else:
            part = {key: _value(key, value, known)}
        if twice := sorted(part.keys() & values.keys()):
            raise InputError(f"{twice[0]} is set twice; leave it in one place")
        values |= part
    if GLOBAL_BATCH in values and "batch_phases" in values:
        raise InputError("batch_phases sets the batch of every phase; leave out global_batch")
    return ConfigFile(recipe, values)


def _value(name: str, value: Any, known: Mapping[str, FieldSpec], *, section: str | None = None) -> Any:
    if name == GLOBAL_BATCH:
        if type(value) is not int or value < 1:
            raise InputError(f"{name} = {value!r} is not a positive whole number")
        return value
    if name not in known:
        raise InputError(f"unknown config field {name!r}{nearest(name, [*known, GLOBAL_BATCH])}")
    spec = known[name]
    if section not in (None, spec.section):
        raise InputError(f"{name} is in [{section}], but belongs in [{spec.section}]")
    if not spec.repeated:
        raise InputError(f"{name} does not belong in a config file; use {spec.flag} on the command line")
    return spec.read(value)


def layered(
    recipe: str | None, file: ConfigFile | None, flags: Mapping[str, Any], *, global_batch: int | None = None
) -> Config:
    """Applies the file's values and then the flags' to the recipe (`recipe`, else the file's, else the default).

    global_batch: that of the flags.
    """
    values = {} if file is None else dict(file.values)
    own_batch = values.pop(GLOBAL_BATCH, None)
    wanted = own_batch if global_batch is None and "batch_phases" not in flags else global_batch
    # If the file sets the batch of every phase, these are scaled. Otherwise the recipe gets the batch, for its table.
    scaled = {GLOBAL_BATCH: wanted} if "batch_phases" in values and wanted is not None else {}
    config = _base(recipe or (file.recipe if file is not None else None) or DEFAULT, None if scaled else wanted)
    before = values.get("epochs", config.schedule.epochs)
    if "size_phases" in values and "epochs" in flags:  # the file's phases refer to its epochs
        phases = config.override(size_phases=values["size_phases"]).data.size_phases
        check_number("epochs", before, lambda epochs: epochs > 0, "a positive number")
        values["size_phases"] = stretched(phases, flags["epochs"] / before)
    return adapted(config, {**values, **flags, **scaled})


def _base(recipe: str, global_batch: int | None) -> Config:
    if recipe != CUSTOM:
        return find_recipe(recipe).config(global_batch)
    return Config() if global_batch is None else Config().override(global_batch=global_batch)


def load_config(path: str | Path, **values: Any) -> Config:
    """Reads the config of a file, or of a run's folder, and replaces fields by name."""
    path = Path(path)
    if path.is_dir():
        config = run_config(path)
        if config is None:
            raise InputError(f"{path} has no {RUN_CONFIG}; give a config file or the folder of a run")
        return config.override(**values)
    return layered(None, read_config(path), values, global_batch=values.pop(GLOBAL_BATCH, None))


def run_config(folder: Path) -> Config | None:
    """Returns the config with which a run was started, from its folder. None if it has none."""
    path = folder / RUN_CONFIG
    if not path.exists():
        return None
    file = read_config(path)  # it sets every field
    return Config(recipe=file.recipe or CUSTOM).override(**file.values)


def located(config: Config) -> Config:
    """Returns the config with absolute paths, so that they are valid in any folder."""
    paths = {"data": config.data.data, "init_from": config.model.init_from}
    found = {name: str(Path(path).resolve()) for name, path in paths.items() if path and Path(path).exists()}
    return config.override(**found)


def format_config(config: Config, *, recipe: str | None = None) -> str:
    """Returns the text of a file for this config. recipe: the name to find it by, if not the config's label."""
    lines = [f"recipe = {_toml(recipe or config.recipe)}"]
    for section, title in section_titles().items():
        lines += ["", f"[{section}]  # {title}"]
        specs = [spec for spec in fields() if spec.section == section and spec.repeated]
        lines += [f"{spec.name} = {_toml(spec.of(config))}" for spec in specs]
    return "\n".join(lines) + "\n"


def save_config(config: Config, path: str | Path, *, recipe: str | None = None) -> None:
    """Writes the config to a TOML file that `load_config` and `--config` can read. Raises InputError if it cannot.

    recipe: the name by which the recipe is found, if that is not the config's label.
    """
    check_kind("config", config, Config, "give a Config, as get_recipe(NAME) returns")
    try:
        replace_text(Path(path), format_config(config, recipe=recipe))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}; choose another file") from None


def _toml(value: Any) -> str:
    """Formats a value. TOML has no null, so None is `none`, as on the command line."""
    if value is None:
        return '"none"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(part) for part in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if isinstance(value, bool) else repr(value)
