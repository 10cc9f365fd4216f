"""The public API is closed: what examples, README and docs import comes from `hyperbatch` itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hyperbatch

ROOT = Path(hyperbatch.__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SCRIPTS = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "records").glob("*/*.py")])
IMPORT = re.compile(r"\b(?:from|import) +(hyperbatch\.[\w.]+)")
FROM_ROOT = re.compile(r"\bfrom hyperbatch import ([\w, ]+)")


def test_every_public_name_resolves():
    assert [name for name in hyperbatch.__all__ if not hasattr(hyperbatch, name)] == []
    assert len(set(hyperbatch.__all__)) == len(hyperbatch.__all__)


def test_every_public_name_is_documented():
    """By hand: a dataclass without a docstring would show its signature."""
    public = {name: getattr(hyperbatch, name).__doc__ or "" for name in hyperbatch._HOME}
    assert [name for name, text in public.items() if not text or text.startswith(f"{name}(")] == []


def test_type_checkers_see_the_same_names():
    """The lazy table and the imports under TYPE_CHECKING say the same."""
    tree = ast.parse((ROOT / "hyperbatch" / "__init__.py").read_text())
    imported = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hyperbatch.")
        for alias in node.names
    }
    assert imported == {name: f"hyperbatch.{home}" for name, home in hyperbatch._HOME.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_import_public_names_only(page):
    text = page.read_text()
    assert IMPORT.findall(text) == []
    names = {name.strip() for line in FROM_ROOT.findall(text) for name in line.split(",")}
    assert names <= set(hyperbatch.__all__)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_import_public_names_only(script):
    private, public = [], set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            private += [alias.name for alias in node.names if alias.name.startswith("hyperbatch.")]
        elif isinstance(node, ast.ImportFrom) and node.module == "hyperbatch":
            public |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hyperbatch."):
            private.append(node.module)
    assert private == []
    assert public <= set(hyperbatch.__all__)
