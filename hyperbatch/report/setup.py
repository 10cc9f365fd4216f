"""The configuration of a run, its differences from the recipe, and the command that repeats the run."""

from __future__ import annotations

import shlex
from typing import Any

from hyperbatch.config import fields, format_value
from hyperbatch.recipes import all_recipes
from hyperbatch.record import RunRecord
from hyperbatch.report.markup import Html, el, table
from hyperbatch.report.runs import Run
from hyperbatch.report.sections import card

OWN_COUNTS = ("train_samples", "eval_samples", "classes")  # of the actual data; the recipe may have others


def own_count(record: RunRecord, section: str, name: str) -> int | None:
    """Returns the data's own count. None if the field is not a count, or an older version wrote the record."""
    return record.data.get(name) if section == "data" and name in OWN_COUNTS else None


def changed_fields(record: RunRecord) -> dict[str, tuple[Any, Any]] | None:
    """Maps each changed field to (the recipe's value, this run's value). None if the recipe is not a built-in one.

    Only built-in recipes are looked up, because drawing a report must never import code that a run's folder names.
    """
    recipe = all_recipes().get(record.recipe)
    if recipe is None:
        return None
    # `auto` is kept: its meaning depends on the GPU, and the record says too little about that.
    usual = recipe.config().with_precision("auto", on_gpu=record.environment.get("device_type") == "cuda").to_dict()
    changed = {}
    for spec in fields():
        here = record.config.get(spec.section)
        if not isinstance(here, dict) or spec.name not in here or not spec.repeated:
            continue
        before, now = usual[spec.section][spec.name], spec.coerce(here[spec.name])
        chosen = spec.name == "nproc" and before == 0  # it was left to the launcher, which recorded the number of ranks
        if spec.coerce(before) != now and not chosen:
            changed[spec.name] = (before, now)
    return changed


def config(run: Run) -> Html | None:
    if run.record is None or not run.record.config:
        return None
    help_of = {spec.name: spec.help for spec in fields()}
    changed = changed_fields(run.record)
    parts = []
    for section, values in run.record.config.items():
        if not isinstance(values, dict):
            continue
        rows = []
        for name, value in values.items():
            label = el("span", name.replace("_", " "), title=help_of.get(name))
            own = own_count(run.record, section, name)
            if own is not None and own != value:
                stated = el("small", f" (the recipe was written for {field_text(value)})")
                rows.append(el("div", label, el("b", field_text(own), stated)))
                continue
            if changed and name in changed:
                usual = el("small", f" (recipe {field_text(changed[name][0])})")
                rows.append(el("div", label, el("b", field_text(value), usual), cls="changed"))
            else:
                rows.append(el("div", label, el("b", field_text(value))))
        parts.append(el("section", el("h3", section), rows))
    lead = f"Recipe {run.record.recipe}."
    if changed is not None:
        lead += " Highlighted: what this run changed." if changed else " Nothing was changed."
    return card("Configuration", lead, el("div", parts, cls="config"), long=True)


def field_text(value: Any) -> str:
    """A field's value as text: as on the command line, but rounded to six digits."""
    return format_value(_rounded(value)) or "none"


def _rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_rounded(item) for item in value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def command(record: RunRecord) -> str | None:
    """Returns the command that repeats the run, as far as the record knows; None for some custom recipes."""
    changed = changed_fields(record)
    if changed is None and ":" not in record.recipe:
        return None
    words = ["hyperbatch", "train", record.recipe]
    flags = {spec.name: spec.flag for spec in fields()}
    for name, (_, value) in (changed or {}).items():
        if isinstance(value, bool):
            words.append(flags[name] if value else flags[name].replace("--", "--no-", 1))
        else:
            words += [flags[name], format_value(value)]
    if "--nproc" not in words:
        words += ["--nproc", str(record.world_size)]
    return shlex.join(words)


def reproduce(run: Run) -> Html | None:
    record = run.record
    if record is None:
        return None
    environment = [
        [name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else value]
        for name, value in record.environment.items()
        if value not in (None, "") and name != "command"  # a worker's own command if a launcher started it
    ]
    note, again = None, command(record)
    if again is None:
        note = (
            f"{record.recipe} is a recipe of your own: run `hyperbatch train MODULE:FUNCTION --nproc "
            f"{record.world_size}` with the module and function that make it, and the flags that it was given."
        )
    elif changed_fields(record) is None:
        note = f"{record.recipe} is not a built-in recipe: the command assumes that it still gives the values above."
    elif not record.grid.startswith("1x"):
        note = (
            f"On several hosts start the {record.world_size} ranks with torchrun, srun or mpirun in place of --nproc."
        )
    return card(
        "How to repeat it",
        "The same seed on as many ranks of the same hardware gives the same result, bit for bit: on GPUs with "
        "--deterministic, on CPUs with as many threads.",
        el("pre", again) if again else None,
        el("p", note, cls="note") if note else None,
        el("h3", "Environment") if environment else None,
        table([], environment) if environment else None,
    )
