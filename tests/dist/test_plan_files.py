"""`plan --output FILE` and `train --plan FILE`, through the commands."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch

from hyperbatch.cli import main
from hyperbatch.engine.measure import probe
from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.plan.files import fitted_groups
from hyperbatch.plan.types import TensorSpec
from hyperbatch.record import RunRecord

SPECS = [TensorSpec(name=name, shape=(4,)) for name in ("c.weight", "b.weight", "a.weight")]


def written(path, *groups, dtype="float32"):
    rows = [
        {"index": i, "parameters": names, "bytes": 1, "dtype": dtype, "algorithm": "torus", "ready_s": 0.1}
        for i, names in enumerate(groups)
    ]
    path.write_text(json.dumps({"strategy": "optimal", "groups": rows, "step_s": 1.0}))
    return path


def test_a_plan_is_written_printed_and_trained(tmp_path, capsys):
    torch.set_num_threads(1)
    file = tmp_path / "my plan.json"
    assert (
        main(["plan", "digits", "--cluster", "local", "--gpus", "1", "--strategy", "equal", "--output", str(file)]) == 0
    )
    text = capsys.readouterr().out
    flags = re.search(r"train with it: hyperbatch (train digits .*)", text)
    assert flags is not None
    assert flags[1] == f"train digits --plan '{file}' --grid 1x1"
    saved = json.loads(file.read_text())
    assert main([*shlex.split(flags[1]), "--device", "cpu", "--nproc", "1", "--dry-run"]) == 0
    assert f"gradient groups (of {file}, 311.0 kB per step)" in capsys.readouterr().out
    out = tmp_path / "run"
    main([*shlex.split(flags[1]), "--device", "cpu", "--nproc", "1", "--max-steps", "1", "--out", str(out)])
    plan = RunRecord.load(out).plan
    assert plan["strategy"] == "equal"
    assert [group["parameters"] for group in plan["groups"]] == [group["parameters"] for group in saved["groups"]]
    assert len(plan["groups"]) > 1
    # The file may be gone when the run goes on.
    file.unlink()
    assert main(["train", "--resume", "--out", str(out), "--max-steps", "2"]) == 3
    assert RunRecord.load(out).plan == plan


def test_without_a_file_the_flags_say_how_to_plan_again(capsys):
    assert main(["plan", "digits", "--cluster", "local", "--gpus", "2", "--global-batch", "256"]) == 0
    text = capsys.readouterr().out
    assert (
        "train with it: hyperbatch train digits --grouping optimal --algorithm flat --grid 1x2 --global-batch 256\n"
        in text
    )
    assert "--output FILE writes these groups" in text


def test_a_plan_for_another_model_is_refused_in_one_line_and_leaves_nothing(tmp_path, capsys):
    file, out = tmp_path / "plan.json", tmp_path / "run"
    assert main(["plan", "resnet50", "--gpus", "8", "--output", str(file)]) == 0
    capsys.readouterr()
    for more in ([], ["--dry-run"]):
        assert main(["train", "digits", "--plan", str(file), "--device", "cpu", "--out", str(out), *more]) == 2
        error = capsys.readouterr().err
        assert f"hyperbatch: --plan {file} does not fit resnet8: " in error
        assert error.count("\n") == 1
    assert not out.exists()


def test_what_does_not_fit_is_named(tmp_path):
    path = tmp_path / "plan.json"
    for groups, reason in (
        ([["c.weight"], ["b.weight"]], "model: parameter a.weight is in no group"),
        ([["c.weight", "d.weight"], ["b.weight", "a.weight"]], "model: it has no trained parameter d.weight"),
        ([["c.weight", "b.weight"], ["b.weight", "a.weight"]], "parameter b.weight is in two groups"),
        ([["c.weight", "a.weight"], ["b.weight"]], "finishes the parameters of group 0 in another order"),
    ):
        with pytest.raises(InputError, match=reason):
            fitted_groups(written(path, *groups), SPECS, "model")
    with pytest.raises(
        InputError, match="made for another precision: group 0 holds float16 gradients there and float32"
    ):
        fitted_groups(written(path, ["c.weight"], ["b.weight", "a.weight"], dtype="float16"), SPECS, "model")
    plan = fitted_groups(written(path, ["c.weight"], ["b.weight", "a.weight"]), SPECS, "model")
    assert [(group.bytes, group.algorithm) for group in plan.groups] == [(16, "torus"), (32, "torus")]


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"strategy": "optimal", "groups": [{"index": 0}]}'])
def test_what_is_no_plan_is_refused(tmp_path, capsys, text):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    assert main(["train", "digits", "--plan", str(path), "--device", "cpu", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hyperbatch: --plan {path}")
    assert "make one with `hyperbatch plan" in error
    assert main(["plan", "digits", "--output", str(tmp_path / "nowhere" / "plan.json")]) == 2
    assert "give a file in a folder that exists" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["resnet8", "resnet20", "resnet18"])
def test_the_planner_knows_the_order_of_the_models(model):
    """Else no plan would fit: groups are neighbours in the order in which backward finishes."""
    from hyperbatch.plan.inventory import tensors

    network = create_model(model, classes=10)
    order, _ = probe(network, torch.zeros(2, 3, 32, 32))
    assert order == [spec.name for spec in tensors(model, classes=10, image_size=32)]
