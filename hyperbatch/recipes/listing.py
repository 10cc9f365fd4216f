"""What `hyperbatch recipes` prints."""

from __future__ import annotations

from typing import Any

from hyperbatch.recipes import DEFAULT, all_recipes


def list_recipes() -> list[dict[str, Any]]:
    """One row per recipe, in listing order."""
    rows = []
    for name, recipe in all_recipes().items():
        config = recipe.config()
        rows.append(
            {
                "name": name,
                "claim": recipe.claim,
                "source": recipe.source,
                "chosen": list(recipe.chosen),
                "ranks": recipe.ranks,
                "cluster": recipe.cluster,
                "model": config.model.model,
                "global_batch": config.global_batch,
                "target": config.run.target_top1,
                "command": recipe.command,
            }
        )
    return rows


def format_recipes() -> str:
    """The rows as a table for a terminal, as wide as the terminal is."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", row_styles=["", "dim"])
    table.add_column("recipe", no_wrap=True)
    table.add_column("model", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("claim", ratio=1)
    for row in list_recipes():
        name = f"{row['name']} *" if row["name"] == DEFAULT else row["name"]
        table.add_row(name, row["model"], f"{row['global_batch']:,}", f"{row['ranks']:,}", row["claim"])
    # The console finds width and colour from the real terminal; what it draws is captured and returned.
    terminal = Console()
    console = Console(file=StringIO(), width=terminal.width, force_terminal=terminal.is_terminal)
    with console.capture() as capture:
        console.print(table)
        console.print("* the default. `hyperbatch train NAME --data DIR --dry-run` shows everything a recipe sets.")
    return capture.get().rstrip("\n")
