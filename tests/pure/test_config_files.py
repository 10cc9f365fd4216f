"""Config files: what they may say, which layer wins, and that what is written is read back."""

import json
import os
from pathlib import Path

import pytest

import hyperbatch
from hyperbatch.cli import main
from hyperbatch.config import BatchPhase, Config, SizePhase, fields
from hyperbatch.errors import InputError
from hyperbatch.plan.clusters import format_machine_file, load_cluster
from hyperbatch.recipes import all_recipes, find_recipe
from hyperbatch.recipes.files import layered, load_config, parse_config, read_config, run_config, save_config


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def resolved(capsys, *arguments: object) -> Config:
    """What `train` would run."""
    assert main(["train", *map(str, arguments), "--dry-run", "--json"]) == 0
    return Config.from_dict(json.loads(capsys.readouterr().out)["config"])


def test_a_flag_beats_the_file_and_the_file_beats_the_recipe(capsys, tmp_path):
    path = written(tmp_path, 'recipe = "digits"\nepochs = 7\n[optim]\nmomentum = 0.5\nlabel_smoothing = 0.2\n')
    digits = hyperbatch.get_recipe("digits")
    found = resolved(capsys, "--config", path, "--label-smoothing", 0.3)
    assert found == digits.override(epochs=7.0, momentum=0.5, label_smoothing=0.3)
    assert digits.optim.momentum != 0.5


def test_a_recipe_on_the_command_line_beats_the_files(capsys, tmp_path):
    path = written(tmp_path, 'recipe = "digits"\nepochs = 7\n')
    found = resolved(capsys, "cifar10_resnet", "--config", path)
    assert (found.recipe, found.schedule.epochs) == ("cifar10_resnet", 7.0)
    assert found.model == find_recipe("cifar10_resnet").config().model


@pytest.mark.parametrize("name", sorted(all_recipes()))
def test_what_is_saved_is_read_back(tmp_path, name):
    config = find_recipe(name).config().override(milestones=(1.5, 2.0), wire_dtype=None, data='a "b"\\c é')
    save_config(config, tmp_path / "run.toml")
    assert load_config(tmp_path / "run.toml") == config


def test_every_field_is_written_but_those_of_one_command(tmp_path):
    save_config(Config().override(out="somewhere"), tmp_path / "run.toml")
    assert set(read_config(tmp_path / "run.toml").values) == {spec.name for spec in fields() if spec.repeated}


def test_the_command_saves_a_config_and_trains_nothing(capsys, tmp_path):
    path = tmp_path / "run.toml"
    assert main(["train", "digits", "--epochs", "3", "--global-batch", "128", "--save-config", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.toml"]
    assert resolved(capsys, "--config", path) == hyperbatch.get_recipe("digits", epochs=3.0, global_batch=128)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('recipe = "digits"\nepochs = 3\n', encoding="utf-8-sig")
    assert resolved(capsys, "--config", path).schedule.epochs == 3
    path.write_text(format_machine_file(load_cluster("local")), encoding="utf-8-sig")
    assert load_cluster(str(path)).device == load_cluster("local").device


def test_the_batch_of_a_file():
    """A recipe is told it; a file that has a batch for every phase is scaled by the flag."""
    mlperf = find_recipe("mlperf_resnet50")
    batch = sorted(mlperf.batches)[0]
    assert layered("mlperf_resnet50", parse_config({"global_batch": batch}), {}) == mlperf.config(batch)
    phases = parse_config({"batch_phases": [[0, 32], [2, 64]]})
    found = layered("digits", phases, {}, global_batch=64)
    assert found.schedule.batch_phases == (BatchPhase(0, 64), BatchPhase(2, 128))
    both = layered("digits", parse_config({"global_batch": 96}), {"batch_phases": (BatchPhase(0, 32),)})
    assert both.schedule.batch_phases == (BatchPhase(0, 32),)


def test_the_image_sizes_of_a_file_follow_the_epochs_of_a_flag(tmp_path):
    save_config(hyperbatch.get_recipe("cifar10"), tmp_path / "run.toml")
    file = read_config(tmp_path / "run.toml")
    assert layered(None, file, {"epochs": 4.0}) == hyperbatch.get_recipe("cifar10", epochs=4.0)
    given = {"epochs": 4.0, "size_phases": (SizePhase(1, 24),)}
    assert layered(None, file, given).data.size_phases == given["size_phases"]
    phases_alone = parse_config({"size_phases": "0:16,10:8"})
    assert layered("digits", phases_alone, {"epochs": 10.0}).data.size_phases == (SizePhase(0, 16), SizePhase(5, 8))
    with pytest.raises(InputError, match="--epochs 0"):
        layered("digits", parse_config({"size_phases": "0:16,10:8", "epochs": 0}), {})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size_phases": [[0, 24, 1]]}, "--size-phases: .* is not a list EPOCH:VALUE"),
        ({"size_phases": 5}, "--size-phases: 5 is not a list EPOCH:VALUE"),
        ({"size_phases": [[0, 24]], "epochs": [3]}, "epochs is .* give a positive number"),
    ],
)
def test_image_sizes_that_cannot_follow_the_epochs_of_a_flag(values, words):
    with pytest.raises(InputError, match=words):
        layered("digits", parse_config(values), {"epochs": 3.0})


def test_layers_are_checked_together():
    """A file that only makes sense with the flags is no mistake."""
    file = parse_config({"warmup_epochs": 60})
    assert layered("digits", file, {"epochs": 100.0}).schedule.warmup_epochs == 60
    with pytest.raises(InputError, match="--warmup-epochs 60"):
        layered("digits", file, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch = 5", "unknown config field 'epoch'; did you mean 'epochs'?"),
        ("[optim]\nepochs = 5", "epochs is in [optim], but belongs in [schedule]"),
        ("[optimm]\nlr = 1", "unknown section [optimm]; did you mean 'optim'?"),
        ("[optimizer]\nlr = 1", "unknown section [optimizer]; did you mean 'optim'?"),
        ("epochs = 5\n[schedule]\nepochs = 6", "epochs is set twice"),
        ('epochs = "ten"', "--epochs: 'ten' is not a number"),
        ("epochs = true", "--epochs: True is not a number"),
        ('out = "here"', "out does not belong in a config file; use --out on the command line"),
        ("global_batch = 0", "global_batch = 0 is not a positive whole number"),
        ("global_batch = 64\nbatch_phases = [[0, 32]]", "leave out global_batch"),
        ("recipe = 3", "recipe = 3 is not a text"),
        ('recipe = "digit"', "unknown recipe 'digit'; did you mean 'digits'?"),
        ("optim = 3", "unknown config field 'optim'"),
        ("epochs = ", "not valid TOML"),
    ],
)
def test_mistakes_get_one_line(capsys, tmp_path, text, words):
    path = written(tmp_path, text)
    assert main(["train", "--config", str(path), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_files_that_are_not_there(capsys, tmp_path):
    assert main(["train", "--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: cannot be read (No such file or directory)" in capsys.readouterr().err
    assert main(["train", "--save-config", str(tmp_path / "none" / "run.toml")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(InputError, match="give a Config, as get_recipe"):
        save_config({}, tmp_path / "run.toml")  # pyright: ignore[reportArgumentType]
    assert run_config(tmp_path) is None
    with pytest.raises(InputError, match="give a config file or the folder of a run"):
        load_config(tmp_path)


def test_a_recipe_with_fields_replaced():
    assert hyperbatch.get_recipe("digits", epochs=5) == find_recipe("digits").config().override(epochs=5)
    assert hyperbatch.get_recipe("digits", global_batch=128) == find_recipe("digits").config(128)
    with pytest.raises(InputError, match="unknown config field 'epoch'"):
        hyperbatch.get_recipe("digits", epoch=5)
    with pytest.raises(InputError, match="leave out global_batch"):
        hyperbatch.get_recipe("digits", global_batch=128, batch_phases=(BatchPhase(0, 64),))


def test_a_run_without_a_checkpoint_begins_again_as_it_was_started(capsys, tmp_path):
    saved = hyperbatch.get_recipe("cifar10_resnet", epochs=3)
    save_config(saved, tmp_path / "config.toml")
    found = resolved(capsys, "--resume", "auto", "--out", tmp_path, "--seed", 5)
    assert (found.recipe, found.schedule, found.run.seed) == ("cifar10_resnet", saved.schedule, 5)
    assert resolved(capsys, "digits", "--resume", "auto", "--out", tmp_path).recipe == "digits"
    assert main(["train", "digits", "--resume", "--out", str(tmp_path)]) == 2
    assert "holds no checkpoint; use --resume auto to start the run again" in capsys.readouterr().err


def test_a_path_that_is_not_in_utf_8_is_kept(tmp_path):
    config = hyperbatch.get_recipe("imagenette", data=os.fsdecode(b"/data/\xe9t\xe9"))
    save_config(config, tmp_path / "config.toml")
    assert b"/data/\xe9t\xe9" in (tmp_path / "config.toml").read_bytes()
    assert run_config(tmp_path) == config


def test_the_folder_of_a_run_is_a_config_file(capsys, tmp_path):
    save_config(hyperbatch.get_recipe("cifar10_resnet", epochs=3), tmp_path / "config.toml")
    found = resolved(capsys, "--config", tmp_path, "--seed", 5)
    assert (found.recipe, found.schedule.epochs, found.run.seed) == ("cifar10_resnet", 3, 5)
    assert main(["train", "--config", str(tmp_path.parent)]) == 2
    assert "config.toml: cannot be read (No such file or directory)" in capsys.readouterr().err
