"""Config: unique names, parsing, overrides and one clear line for each mistake."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from hyperbatch.config import RULES, BatchPhase, Config, SizePhase, fields, format_value, without_effect
from hyperbatch.errors import InputError


def test_every_field_name_is_unique_and_has_help():
    names = [spec.name for spec in fields()]
    assert len(names) == len(set(names))
    assert all(len(spec.help) > 5 for spec in fields())


def test_every_default_reads_back_from_its_own_text():
    for spec in fields():
        assert spec.parse(format_value(spec.default)) == spec.default, spec.name


def test_config_survives_json():
    config = Config(recipe="x").override(batch_phases=(BatchPhase(0, 64), BatchPhase(5, 128)), crop_area=(0.1, 0.9))
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert isinstance(again.schedule.batch_phases[1], BatchPhase)


def test_fields_that_no_longer_exist_are_left_out_of_a_saved_config():
    config = Config(recipe="old").override(lr=3.0)
    values = config.to_dict()
    values["schedule"]["lr_follows_phases"] = True
    values["of another version"] = {"lr": 4.0}
    assert Config.from_dict(values) == config


def test_global_batch_scales_every_phase_and_keeps_the_rate_where_it_was_given():
    config = Config().override(batch_phases=(BatchPhase(0, 64), BatchPhase(5, 128)), lr=2.0)
    scaled = config.override(global_batch=128)
    assert [p.global_batch for p in scaled.schedule.batch_phases] == [128, 256]
    assert scaled.schedule.lr_batch == 64
    assert scaled.schedule.lr == 2.0


def test_global_batch_that_does_not_scale_the_phases():
    config = Config().override(batch_phases=(BatchPhase(0, 64), BatchPhase(5, 96)))
    with pytest.raises(InputError, match="--batch-phases"):
        config.override(global_batch=33)


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("epochs", "many", "--epochs: 'many' is not a number"),
        ("flip", "maybe", "true or false"),
        ("batch_phases", "0:64,x", "EPOCH:VALUE"),
        ("crop_area", "0.5", "2 numbers LOW,HIGH"),
        ("nproc", "1.5", "whole number"),
    ],
)
def test_text_that_cannot_be_read(field, text, words):
    spec = next(spec for spec in fields() if spec.name == field)
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        spec.parse(text)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"momentum": 1.0}, "--momentum 1: must be in"),
        ({"lr": -1.0}, "--lr -1: must be positive"),
        ({"warmup_epochs": 1000.0}, "--warmup-epochs 1000 is longer than the whole run (90 epochs); use"),
        ({"batch_phases": (BatchPhase(1, 64),)}, "must start at epoch 0"),
        ({"batch_phases": (BatchPhase(0, 64), BatchPhase(0, 32))}, "epochs must increase"),
        ({"algorithm": "tree"}, "--algorithm: 'tree' is not one of flat"),
        ({"target_top1": 99.0}, "--target-top1 99: must be in (0, 1]; for 99 % write 0.99"),
        ({"target_top1": 0.0}, "for 75.9 % write 0.759"),
        ({"nproc": -1}, "must not be negative"),
        ({"prefetch": -1}, "--prefetch -1: must not be negative"),
        ({"cache_bytes": -1}, "--cache-bytes -1: must not be negative"),
        ({"size_phases": (SizePhase(0, 0),)}, "--size-phases 0:0: every image size must be positive"),
        ({"size_phases": (SizePhase(0, -8),)}, "--size-phases 0:-8: every"),
        ({"size_phases": (SizePhase(4, 64), SizePhase(2, 32))}, "--size-phases 4:64,2:32: epochs must increase"),
        ({"milestones": (-1.0, 3.0)}, "--milestones -1,3: must not be negative"),
        ({"milestones": (float("nan"),)}, "--milestones nan: must be a finite number"),
        ({"flip": False, "flip_alternates": True}, "--flip-alternates true: needs --flip"),
        ({"optimizer": "adamw", "decoupled_weight_decay": True}, "adamw always decouples weight decay"),
        ({"seed": 10**400}, "must be below 2^63"),
        ({"momentun": 0.9}, "did you mean 'momentum'"),
    ],
)
def test_values_no_run_could_use(values, words):
    with pytest.raises(InputError) as caught:
        Config().override(**values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lr": "abc"}, "--lr: 'abc' is not a number"),
        ({"lr": None}, "--lr: None is not a number"),
        ({"seed": 1.5}, "--seed: 1.5 is not a whole number"),
        ({"nproc": True}, "--nproc: True is not a whole number"),
        ({"flip": 1}, "--flip: 1 is not true or false"),
        ({"data": 3}, "--data: 3 is not a text or none"),
        ({"model": None}, "--model: None is not a text"),
        ({"target_top1": "0.7"}, "--target-top1: '0.7' is not a number or none"),
        ({"crop_area": (0.1,)}, "--crop-area: (0.1,) is not 2 numbers LOW,HIGH"),
        ({"milestones": 30.0}, "--milestones: 30.0 is not a list of numbers"),
        ({"milestones": ("30",)}, "--milestones: ('30',) is not a list of numbers"),
        ({"batch_phases": (64,)}, "--batch-phases: (64,) is not a list EPOCH:VALUE"),
    ],
)
def test_values_of_another_type(values, words):
    with pytest.raises(InputError) as caught:
        Config().override(**values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_may_be_what_a_program_has():
    config = Config().override(
        batch_phases=[(0, 64), [np.float64(5), np.int64(128)]],
        milestones=[3, 6],
        lr=np.float32(0.5),
        seed=np.int64(7),
        out=Path("runs") / "five",
    )
    assert config == Config().override(
        batch_phases=(BatchPhase(0, 64), BatchPhase(5, 128)), milestones=(3, 6), lr=0.5, seed=7, out="runs/five"
    )
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config, "a run of it can be resumed"
    assert config.override(global_batch=np.int64(32)).global_batch == 32


@pytest.mark.parametrize("batch", ["x", 0, -5, 1.5, True])
def test_a_batch_that_is_none(batch):
    with pytest.raises(InputError, match=r"global_batch is .*; give a whole number of at least 1"):
        Config().override(global_batch=batch)


def test_a_whole_number_is_a_number():
    assert Config().override(lr=2, epochs=9, seed=(1 << 63) - 1).schedule.lr == 2


def test_fields_without_effect_are_named():
    config = Config().override(optimizer="lars", muon_steps=3, averaging_decay=0.9, trust_coefficient=0.02, beta2=0.999)
    names = ["optimizer", "muon_steps", "averaging_decay", "trust_coefficient", "beta2"]  # beta2: as it was
    assert without_effect(config, names) == [
        "--muon-steps has no effect with --optimizer lars; it needs --optimizer muon",
        "--averaging-decay has no effect with --averaging none; it needs --averaging ema or lookahead",
    ]
    assert without_effect(config.override(optimizer="muon", averaging="ema"), names[:3]) == []


def test_what_a_field_needs_are_values_of_another_one():
    known = {spec.name: spec for spec in fields()}
    needs = [spec.needs for spec in fields() if spec.needs]
    assert needs
    for name, *values in needs:
        assert set(values) < set(known[name].choices)


def test_phases_may_be_pairs():
    """As in a config file."""
    config = Config().override(batch_phases=[(0, 64), [5, 128]], layer_rates=[("head", 1.0)], milestones=[3.0])
    assert config.schedule.batch_phases == (BatchPhase(0, 64), BatchPhase(5, 128))
    assert isinstance(config.schedule.batch_phases[1], BatchPhase)
    assert config.schedule.milestones == (3.0,)


def test_only_numbers_have_rules_and_only_names_have_choices():
    for spec in fields():
        if isinstance(spec.allowed, str):
            assert spec.allowed in RULES, spec.name
            assert isinstance(spec.default, int | float | None), spec.name
        elif spec.allowed:
            assert spec.default is None or spec.default in spec.allowed, spec.name


def test_a_number_just_outside_its_rule_is_refused_with_the_rule():
    outside = {"be positive": 0, "not be negative": -1, "be in [0, 1)": 1, "be in (0, 1]": 0}
    for spec in fields():
        if isinstance(spec.allowed, str):
            with pytest.raises(
                InputError, match=re.escape(f"{spec.flag} {outside[spec.allowed]}: must {spec.allowed}")
            ):
                Config().override(**{spec.name: outside[spec.allowed]})
