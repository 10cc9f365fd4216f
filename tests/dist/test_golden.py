"""Golden losses: a refactor must not change what the default recipe computes.

Run this file to write them anew after a change that is meant to change them: python tests/dist/test_golden.py
"""

import json
import tempfile
from pathlib import Path

import pytest

from hyperbatch.config import BatchPhase
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks
from hyperbatch.recipes import find_recipe

GOLDEN = Path(__file__).parents[1] / "golden" / "digits.json"
STEPS = 30


def losses(folder):
    """The first steps of the default recipe on one rank, in fp64: another CPU's rounding stays far below a change."""
    config = find_recipe("digits").config().override(precision="fp64", max_steps=STEPS, device="cpu", out=str(folder))
    # The batch changes within these steps, and the rate passes its peak.
    config = config.override(batch_phases=(BatchPhase(0, 64), BatchPhase(0.5, 128)), warmup_epochs=0.5)
    run(config, Ranks())
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def test_losses_are_the_golden_ones(tmp_path):
    golden = json.loads(GOLDEN.read_text())["losses"]
    assert len(golden) == STEPS
    assert losses(tmp_path) == pytest.approx(golden, rel=1e-6)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN.write_text(json.dumps({"recipe": "digits", "losses": losses(scratch)}, indent=1) + "\n")
