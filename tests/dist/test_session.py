"""Runs that follow each other in one process give the bits of runs in processes of their own."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from test_step_runner import Played
from torch import nn
from toy import config, flat_weights, same_bits

from hyperbatch.config import BatchPhase, fields
from hyperbatch.engine import loop
from hyperbatch.engine import session as session_module
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.runner import StepRunner
from hyperbatch.engine.session import READ_ANEW, Session, data_key, key_of
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.recipes import get_recipe


def alone(out, **values):
    """As `hyperbatch train` runs it; (record, weights and state, losses and accuracies)."""
    torch.set_num_threads(1)
    record = loop.run(config(out=str(out), **values), Ranks())
    return record, flat_weights(out), metrics(out)


def within(session, out, **values):
    torch.set_num_threads(1)
    record = session.run(config(**values), out)
    return record, flat_weights(out), metrics(out)


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("lr"), line.get("top1")) for line in lines]


NORMED = {"model": "toy:normed"}
# In one session, one after the other: what follows must not see what came before.
FOLLOWING = {
    "seed": {**NORMED, "seed": 3},
    "rate and schedule": {**NORMED, "seed": 1, "lr": 0.1, "decay": "cosine", "warmup_epochs": 0.5, "epochs": 3.0},
    "weight decay": {**NORMED, "seed": 3, "weight_decay": 0.05},
    "batch": {**NORMED, "seed": 2, "batch_phases": (BatchPhase(0, 30),)},
    "another learner": {**NORMED, "trust_coefficient": 0.02},
    "the first again": NORMED,
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
def test_a_run_in_a_session_equals_a_run_alone_bit_for_bit(tmp_path, precision, captured):
    kind = functools.partial(StepRunner, backend=Played(), warm=True) if captured else StepRunner
    with Session(runner=kind) as session:
        session.run(config(**NORMED, precision=precision))
        for name, values in FOLLOWING.items():
            ours = within(session, tmp_path / f"{name} warm", **values, precision=precision)
            theirs = alone(tmp_path / name, **values, precision=precision)
            assert ours[2] == theirs[2], name
            assert same_bits(ours[1], theirs[1]), name
            for part in ("reached", "top1", "epochs", "steps"):
                assert getattr(ours[0].result, part) == getattr(theirs[0].result, part)
            assert ours[0].trust_ratios == theirs[0].trust_ratios
            assert ours[0].skipped_steps == theirs[0].skipped_steps


def test_a_folder_may_be_a_text(tmp_path):
    with Session() as session:
        record = session.run(config(**NORMED), str(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert record.folder == str(tmp_path / "run")


@pytest.mark.parametrize(
    "values",
    [{"optimizer": "lamb", "lr": 0.02}, {"momentum_rule": "rescaled"}, {"sharded_update": True}, {"accumulate": 3}],
    ids=lambda values: next(iter(values)),
)
def test_every_kind_of_learner_starts_anew(tmp_path, values):
    with Session(runner=functools.partial(StepRunner, backend=Played(), warm=True)) as session:
        session.run(config(**NORMED, **values, seed=5))
        ours = within(session, tmp_path / "warm", **NORMED, **values)
    theirs = alone(tmp_path / "alone", **NORMED, **values)
    assert ours[2] == theirs[2]
    assert same_bits(ours[1], theirs[1])


class Drawn(nn.Module):
    """A buffer and a frozen parameter that the seed decides, too."""

    def __init__(self, classes, in_channels):
        super().__init__()
        self.register_buffer("mix", torch.randn(64, 64))
        self.frozen = nn.Parameter(torch.randn(64), requires_grad=False)
        self.head = nn.Linear(64 * in_channels, classes)

    def forward(self, images):
        return self.head((images.flatten(1) @ self.mix.to(images)) * self.frozen)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buffers_and_frozen_parameters_are_drawn_anew(tmp_path, precision):
    values = {"model": "test_session:Drawn", "precision": precision}
    with Session() as session:
        session.run(config(**values, seed=5))
        ours = within(session, tmp_path / "warm", **values)
    theirs = alone(tmp_path / "alone", **values)
    assert ours[2] == theirs[2]
    assert same_bits(ours[1], theirs[1])


def test_a_run_after_one_that_diverged_is_as_if_it_had_not_been(tmp_path):
    backend = Played()
    with Session(runner=functools.partial(StepRunner, backend=backend, warm=True)) as session:
        with pytest.raises(RunFailed, match="the loss became nan"):
            session.run(config(**NORMED, optimizer="sgd", lr=1e30, warmup_epochs=0.0))
        captured = backend.captured
        values = {**NORMED, "optimizer": "sgd", "lr": 0.1}
        ours = within(session, tmp_path / "warm", **values)
        assert backend.captured - captured <= 4, "only the shape that the failed run did not come to"
    theirs = alone(tmp_path / "alone", **values)
    assert ours[2] == theirs[2]
    assert same_bits(ours[1], theirs[1])


def test_steps_are_captured_once_for_runs_that_differ_in_what_is_read_anew(monkeypatch):
    backend, built, opened = Played(), [], []
    build, read = session_module.build_run, session_module.open_data
    monkeypatch.setattr(session_module, "open_data", lambda data: opened.append(data) or read(data))
    monkeypatch.setattr(session_module, "build_run", lambda *a, **options: built.append(1) or build(*a, **options))
    with Session(runner=functools.partial(StepRunner, backend=backend, warm=True)) as session:
        for seed, lr in ((0, 0.3), (1, 0.1), (2, 0.2)):
            session.run(config(seed=seed, lr=lr))
        captured = backend.captured
        assert len(built) == 1
        session.run(config(label_smoothing=0.2))
    assert len(built) == 2
    assert backend.captured == 2 * captured
    assert len(opened) == 1


def test_what_the_runner_said_is_in_every_record_and_notes_only_in_their_own(monkeypatch):
    monkeypatch.setattr("hyperbatch.engine.run.cpu_has_bf16", lambda: False)  # else there is no note
    backend = Played()
    backend.fail = RuntimeError("no capture today")
    with Session(runner=functools.partial(StepRunner, backend=backend, warm=True)) as session:
        first = session.run(config(precision="bf16"))
        second = session.run(config(precision="bf16", seed=1))
    said = [[line for line in record.warnings if "no capture today" in line] for record in (first, second)]
    assert said[0] == said[1] != []
    assert [sum("bf16" in line for line in record.warnings) for record in (first, second)] == [1, 1]


def test_a_run_without_a_folder_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with Session() as session:
        record = session.run(config())
    assert record.result.top1 is not None
    assert record.folder == ""
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_keys_name_fields_that_exist():
    names = {spec.name for spec in fields()}
    assert names >= READ_ANEW
    assert key_of(config(seed=1, lr=5.0)) == key_of(config())
    assert key_of(config(weight_decay=0.0)) != key_of(config()), "a captured step without decay knows of none"
    assert key_of(config(label_smoothing=0.3)) != key_of(config())
    assert data_key(config(dataset="digits", shift_pixels=3).data) == data_key(config(dataset="digits").data)
    assert data_key(config(dataset="synthetic", image_size=9).data) != data_key(config(dataset="synthetic").data)


@pytest.mark.parametrize(
    "values", [{"nproc": 2}, {"resume": "auto"}, {"max_restarts": 1}, {"tracker": "mlflow"}], ids=str
)
def test_what_only_train_does_is_refused(values):
    ((name, value),) = values.items()
    with pytest.raises(InputError, match=f"{name}={value!r}: a session trains new runs in this process"):
        Session().run(get_recipe("digits", **values))
