"""docs/walk.md names files and functions that exist, in at most fifteen hops."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| `([\w/.]+)` \| `([\w.]+)` \| .+ \|$", re.MULTILINE)


def functions(path: Path) -> set[str]:
    """The functions of a file, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_every_hop_of_the_walk_exists():
    hops = ROW.findall((ROOT / "docs" / "walk.md").read_text())
    assert [int(number) for number, _, _ in hops] == list(range(1, len(hops) + 1))
    assert 10 <= len(hops) <= 15
    lost = [f"{file}: {name}" for _, file, name in hops if name not in functions(ROOT / file)]
    assert lost == []
