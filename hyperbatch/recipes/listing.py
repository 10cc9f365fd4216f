"""The output of `hyperbatch recipes`: a line for each recipe, or some recipes in full."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hyperbatch.config import format_epochs
from hyperbatch.recipes import DEFAULT, Recipe, all_recipes, find_recipe

NARROW = 60  # terminal width in columns, below which ranks and batch are omitted
UNCUT = 10_000  # width that every line fits into
LABEL = 10  # width in columns of the labels in the full view


def list_recipes(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns one row per recipe, in the order of the list or of `names`."""
    return [_row(recipe) for recipe in _chosen(names)]


def _chosen(names: Sequence[str]) -> list[Recipe]:
    return [find_recipe(name) for name in names] if names else list(all_recipes().values())


def _row(recipe: Recipe) -> dict[str, Any]:
    config = recipe.config()
    return {
        "name": recipe.name,
        "claim": recipe.claim,
        "source": recipe.source,
        "chosen": list(recipe.chosen),
        "notes": recipe.notes,
        "ranks": recipe.ranks,
        "cluster": recipe.cluster,
        "model": config.model.model,
        "dataset": config.data.dataset,
        "data": recipe.data or None,
        "train_samples": config.data.train_samples,
        "image_size": config.data.image_size,
        "epochs": config.schedule.epochs,
        "global_batch": config.global_batch,
        "target": config.run.target_top1,
        "command": recipe.command,
        "record": recipe.record or None,
        "evidence": recipe.evidence,
    }


def format_recipes(names: Sequence[str] = ()) -> str:
    """Formats the list, or the named recipes in full, in the width of the terminal. A pipe gets the list uncut."""
    from io import StringIO

    from rich.console import Console

    # One console finds the width and colour of the real terminal; another draws into a string.
    terminal = Console()
    width = terminal.width if names or terminal.is_terminal or "COLUMNS" in os.environ else UNCUT
    console = Console(file=StringIO(), width=width, force_terminal=terminal.is_terminal)
    with console.capture() as capture:
        for drawn in [_in_full(recipe) for recipe in _chosen(names)] if names else _listed(width):
            console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _listed(width: int) -> list[Any]:
    """Returns the lines of the list. Claims are cut at the width of the terminal."""
    from rich.text import Text

    rows = [("recipe", "ranks", "batch", "evidence", "claim")]
    for recipe in _chosen(()):
        name = f"{recipe.name} *" if recipe.name == DEFAULT else recipe.name
        rows.append((name, f"{recipe.ranks:,}", f"{recipe.config().global_batch:,}", recipe.standing, recipe.claim))
    names, ranks, batch, standing = (max(len(row[i]) for row in rows) for i in range(4))
    lines = []
    for row in rows:
        sizes = f"  {row[1]:>{ranks}}  {row[2]:>{batch}}" if width >= NARROW else ""
        line = f"{row[0]:{names}}{sizes}  {row[3]:{standing}}  {row[4]}"
        line = line if len(line) <= width else f"{line[: width - 1].rstrip()}…"
        lines.append(Text.assemble((line[:names], "bold"), line[names:]) if lines else Text(line, style="dim"))
    note = (
        "* the default. `hyperbatch recipes NAME` shows one in full: claim, source, what it trains, and its commands."
    )
    return [*lines, Text(note)]


def _in_full(recipe: Recipe) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    row, stops = _row(recipe), recipe.config().run.stop_at_target
    images = f"{row['train_samples']:,} images" if row["train_samples"] else "its images"
    work = f"{row['model']} on {row['dataset']}, {format_epochs(row['epochs'])} of {images} at {row['image_size']} px"
    target = (
        "none"
        if row["target"] is None
        else f"{row['target'] * 100:g} % top-1" + ("; the run ends there" if stops else "")
    )
    about = [part for part in recipe.notes.split("\n\n") if not part.startswith("hyperbatch ")]  # without the command
    ranks = f"{recipe.ranks:,} rank" + ("" if recipe.ranks == 1 else "s")
    lines = [
        ("claim", recipe.claim),
        ("evidence", recipe.evidence),
        ("source", recipe.source),
        ("trains", f"{work}, global batch {row['global_batch']:,}"),
        ("target", target),
        ("claimed on", ranks + ("" if recipe.cluster == "local" else f" of `{recipe.cluster}`")),
        ("about", " ".join(" ".join(about).split())),
        *(("chosen" if i == 0 else "", text) for i, text in enumerate(recipe.chosen)),
        ("data", f"your copy, or the published one: --data {recipe.data}" if recipe.data else ""),
        ("train", recipe.command),
        ("dry run", f"{recipe.command} --dry-run"),
    ]
    if recipe.cluster != "local":
        lines.append(
            ("simulate", f"hyperbatch simulate {recipe.name} --cluster {recipe.cluster} --gpus {recipe.ranks}")
        )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=LABEL)
    table.add_column(overflow="fold")
    for label, text in lines:
        if text:
            table.add_row(label, Text(text))
    return Group(Text(recipe.name, style="bold"), table)
