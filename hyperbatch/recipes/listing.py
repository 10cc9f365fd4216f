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
                "record": recipe.record or None,
                "evidence": recipe.evidence,
            }
        )
    return rows


def format_recipes() -> str:
    """A line a recipe for a terminal, below it claim, source and evidence, wrapped to the terminal's width."""
    from io import StringIO

    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    rows = list_recipes()
    names = {row["name"]: f"{row['name']} *" if row["name"] == DEFAULT else row["name"] for row in rows}
    wide = max(map(len, names.values()))
    model_wide = max(len(row["model"]) for row in rows)
    # The console finds width and colour from the real terminal; what it draws is captured and returned.
    terminal = Console()
    console = Console(file=StringIO(), width=terminal.width, force_terminal=terminal.is_terminal)
    with console.capture() as capture:
        for row in rows:
            sizes = f"batch {row['global_batch']:>6,}  ranks {row['ranks']:>5,}"
            console.print(
                Text.assemble((f"{names[row['name']]:{wide}}", "bold"), f"  {row['model']:{model_wide}}  {sizes}")
            )
            console.print(Padding(Text(row["claim"]), (0, 0, 0, 4), expand=False))
            for line in (f"source: {row['source']}", row["evidence"]):
                console.print(Padding(Text(line, style="dim"), (0, 0, 0, 4), expand=False))
        console.print(
            Text("* the default. `hyperbatch train NAME --data DIR --dry-run` shows everything a recipe sets.")
        )
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
