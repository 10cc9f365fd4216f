"""Options of a run that no recipe sets: what each of them changes."""

import json

import torch
from toy import config

from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks


def train(out, **values):
    torch.set_num_threads(1)
    return run(config(out=str(out), **values), Ranks())


def test_a_run_goes_on_past_its_target_when_it_is_told_to(tmp_path):
    values = {"target_top1": 0.01, "eval_every_epochs": 0.5, "max_steps": 12}  # reached at the first evaluation
    stopped, gone_on = (train(tmp_path / str(stop), stop_at_target=stop, **values).result for stop in (True, False))
    assert stopped.reached
    assert gone_on.reached
    assert stopped.steps < gone_on.steps == 12


def test_metric_lines_and_checkpoints_are_as_many_as_asked_for(tmp_path):
    train(tmp_path, max_steps=8, log_every_steps=3, checkpoint_every_epochs=0.2, keep_checkpoints=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 4, 7]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000008.pt"]


def test_no_checkpoint_is_saved_when_none_is_to_be_kept(tmp_path):
    record = train(tmp_path, max_steps=8, keep_checkpoints=0)
    assert record.result.steps == 8
    assert not (tmp_path / "checkpoints").exists()
