"""`make docs`: the pages, the config fields and the API reference as one site, without a warning."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hyperbatch
from hyperbatch.config import fields

ROOT = Path(__file__).parents[2]


def test_the_reference_names_every_public_name_once():
    named = re.findall(r"^::: hyperbatch\.(\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(f"{home}.{name}" for name, home in hyperbatch._HOME.items())


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings_handlers.python", reason="the extra `docs` is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reference, flags, start = (
        html.unescape((tmp_path / "site" / f"{page}.html").read_text()) for page in ("api", "fields", "index")
    )
    assert [name for name in hyperbatch._HOME if f'.{name}"' not in reference] == []
    assert [spec.name for spec in fields() if f"<code>{spec.name}</code>" not in flags] == []
    assert 'href="finetune.html"' in start
    assert "a plain loop with LARS (<code>examples/own_loop.py</code>)" in start, "not a page of the site"
