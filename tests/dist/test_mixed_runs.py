"""Runs with mixup, CutMix and TrivialAugment: exact over world sizes, accumulation and a resume."""

import json

import torch
from harness import run_ranks
from test_training import metrics, train
from toy import same_bits

from hyperbatch.cli import main

MIXED = {"mixup": 0.2, "cutmix": 1.0, "auto_augment": "trivial"}


def test_ranks_and_accumulation_agree_with_one_process_in_float64(tmp_path):
    values = {"precision": "fp64", "max_steps": 12, **MIXED}
    _, alone = train(1, tmp_path / "1", **values)
    for name, world_size, accumulate in (("accumulated", 1, 4), ("ranks", 2, 3)):
        _, other = train(world_size, tmp_path / name, accumulate=accumulate, **values)
        assert all((alone[key] - other[key]).abs().max() <= 1e-10 for key in alone)
    _, plain = train(1, tmp_path / "plain", **{**values, "mixup": 0.0, "cutmix": 0.0})
    assert any((alone[key] - plain[key]).abs().max() > 1e-4 for key in alone)


def test_binary_cross_entropy_of_mixed_images_on_two_ranks(tmp_path):
    values = {"precision": "fp64", "max_steps": 8, **MIXED}
    bce = {**values, "loss": "bce", "bce_threshold": 0.2, "lr": 4.0}
    _, alone = train(1, tmp_path / "1", **bce)
    _, other = train(2, tmp_path / "2", **bce)
    assert all((alone[key] - other[key]).abs().max() <= 1e-10 for key in alone)
    _, softmax = train(1, tmp_path / "softmax", **values)
    assert any((alone[key] - softmax[key]).abs().max() > 1e-4 for key in alone)
    first = next(line for line in (tmp_path / "1" / "metrics.jsonl").read_text().splitlines() if '"step"' in line)
    assert 0.3 < json.loads(first)["loss"] < 1.0  # log 2 for a network that knows nothing


def test_stop_and_resume_equals_no_stop(tmp_path):
    _, unbroken = train(1, tmp_path / "whole", **MIXED)
    train(1, tmp_path / "parts", max_steps=13, final_eval=False, **MIXED)
    _, resumed = train(1, tmp_path / "parts", resume=True, **MIXED)
    assert same_bits(unbroken, resumed)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def train_digits(rank, out):
    torch.set_num_threads(1)
    flags = "--mixup 0.2 --cutmix 1 --auto-augment trivial --max-steps 30 --device cpu --nproc 1"
    assert main(["train", "digits", *flags.split(), "--out", str(out)]) == 3  # 30 steps do not reach the target


def test_the_flags_train_the_digits(tmp_path):
    run_ranks(1, train_digits, tmp_path / "run", timeout_s=120)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["config"]["data"]["mixup"], record["config"]["data"]["cutmix"]) == (0.2, 1.0)
    assert record["result"]["top1"] > 0.2  # a guess is right one time in ten
