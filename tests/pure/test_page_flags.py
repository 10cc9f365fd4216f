"""Pages name only flags that exist: those of a verb, of a script of ours, or of somebody else's command."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from hyperbatch.cli.flags import SYNONYMS
from hyperbatch.cli.parser import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
SCRIPTS = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "outside").glob("*.py")]
OTHERS = """
torchrun: --nnodes --nproc-per-node --node-rank --master-addr --rdzv-backend --rdzv-endpoint --rdzv-conf --rdzv-id
    --shutdown-timeout --signals-to-handle
Slurm: --nodes --ntasks --ntasks-per-node --gpus-per-node --job-name --time --signal --requeue --open-mode
containers: --ipc --stop-timeout --restart --nv --bind
git, pip and uv: --depth --branch --filter --sparse --no-deps --target --compile-bytecode
"""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def flags(parser):
    """Those of its subcommands, too."""
    found = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*map(flags, action.choices.values()))
    return found


PARSER = build_parser()
KNOWN = flags(PARSER) | set(SYNONYMS) | set(_FLAG.findall(OTHERS))
KNOWN |= {flag for script in SCRIPTS for flag in re.findall(r'"(--[a-z0-9-]+)"', script.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_flags_that_exist(page):
    text = page.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "-->" not in line]  # the arrow of a drawing
    assert {flag for line in lines for flag in _FLAG.findall(line)} - KNOWN == set()
    for verb, rest in re.findall(r"\bhyperbatch (\w+)([^`#\n]*)", "\n".join(lines)):
        if verb in PARSER.verbs:
            assert set(_FLAG.findall(rest)) - flags(PARSER.verbs[verb]) == set(), f"hyperbatch {verb}{rest}"
