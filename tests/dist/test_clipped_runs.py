"""Whole runs with clipped gradients: equal over world sizes, accumulation and the sharded update; exact on resume."""

import pytest
from test_training import train
from toy import same_bits

CLIPPED = {"precision": "fp64", "max_steps": 6, "optimizer": "sgd", "lr": 0.5, "clip_norm": 0.3}


def test_ranks_accumulation_and_shards_agree_with_one_process_in_float64(tmp_path):
    _, alone = train(1, tmp_path / "1", **CLIPPED)
    for name, world_size, values in (
        ("accumulated", 1, {"accumulate": 3}),
        ("ranks", 2, {}),
        ("sharded", 2, {"sharded_update": True, "algorithm": "torus", "grid": "1x2"}),
    ):
        _, other = train(world_size, tmp_path / name, **CLIPPED, **values)
        for key, tensor in alone.items():
            assert (tensor - other[key]).abs().max() <= 1e-10, (name, key)
    _, loose = train(1, tmp_path / "loose", **{**CLIPPED, "clip_norm": 0.0})
    assert any((alone[key] - loose[key]).abs().max() > 1e-3 for key in alone)


def test_a_sharded_adamw_clips_as_a_plain_one(tmp_path):
    values = {**CLIPPED, "optimizer": "adamw", "lr": 0.01}
    _, plain = train(1, tmp_path / "plain", **values)
    _, sharded = train(2, tmp_path / "sharded", sharded_update=True, **values)
    assert all((plain[key] - sharded[key]).abs().max() <= 1e-9 for key in plain)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_stop_and_resume_equals_no_stop(tmp_path, optimizer):
    values = {"optimizer": optimizer, "lr": 0.01, "clip_norm": 0.3, "precision": "bf16"}
    _, unbroken = train(1, tmp_path / "whole", max_steps=8, **values)
    train(1, tmp_path / "parts", max_steps=5, final_eval=False, **values)
    _, resumed = train(1, tmp_path / "parts", max_steps=8, resume=True, **values)
    assert same_bits(unbroken, resumed)
