"""Plans of sweeps: what they become, and what is said of those that are wrong."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from hyperbatch import cli
from hyperbatch.cli.parser import parse
from hyperbatch.cli.train import config_of
from hyperbatch.config import BatchPhase, fields
from hyperbatch.errors import InputError
from hyperbatch.recipes import get_recipe
from hyperbatch.sweep.plan import load_plan, parse_plan, title

PLAN = """
name = "lars_against_sgd"
recipe = "cifar10_resnet"
seeds = 2
[fixed]
epochs = 30
lr_scaling = "none"
[grid]
global_batch = [256, 8192]
[[arms]]
name = "LARS"
grid.lr = [1, 2.5]
[[arms]]
name = "SGD"
optimizer = "sgd"
seeds = [7]
lr = 0.1
flip = false
"""


def parsed(text: str, **options):
    return parse_plan(tomllib.loads(text), **options)


def test_the_command_of_a_run_names_the_recipe_as_the_plan_does():
    """And not the label of its config: recipes of one's own often change a built-in one."""
    (run,) = parsed('recipe = "hyperbatch.recipes.everyday:digits"').runs
    assert run.config.recipe == "digits"
    assert run.command == "hyperbatch train hyperbatch.recipes.everyday:digits --nproc 1 --seed 0"


def test_arms_grids_and_seeds_become_runs():
    plan = parsed(PLAN)
    assert [(title(run.point), run.seed) for run in plan.runs] == [
        *(
            (f"LARS, global batch {batch}, lr {lr}", seed)
            for batch in (256, 8192)
            for lr in ("1", "2.5")
            for seed in (0, 1)
        ),
        ("SGD, global batch 256", 7),
        ("SGD, global batch 8192", 7),
    ]
    assert [run.number for run in plan.runs] == list(range(1, 11))
    run = plan.runs[6]
    assert run.config.global_batch == 8192
    assert (run.config.schedule.lr, run.config.schedule.epochs, run.config.run.nproc) == (2.5, 30.0, 1)
    assert run.config.optim.trust_coefficient == 0.02, "the recipe's"
    assert run.point.conditions == {"global_batch": 8192}
    assert run.point.search == {"lr": 2.5}
    assert plan.runs[-1].config.optim.optimizer == "sgd"


def test_a_plan_without_arms_is_one():
    plan = parsed('recipe = "digits"\nseeds = [4, 2]', name="alone")
    assert [(run.point.arm, run.seed) for run in plan.runs] == [("alone", 4), ("alone", 2)]


def test_an_arm_may_search_elsewhere_under_other_conditions():
    plan = parsed("""
recipe = "cifar10_resnet"
[grid]
global_batch = [256, 8192]
[[arms]]
name = "LARS"
when.global_batch = [256]
grid.lr = [1]
[[arms]]
name = "LARS"
when.global_batch = [8192]
grid.lr = [2]
grid.trust_coefficient = [0.1]
""")
    assert [title(run.point) for run in plan.runs] == [
        "LARS, global batch 256, lr 1",
        "LARS, global batch 8192, lr 2, trust coefficient 0.1",
    ]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('batch_phases = "0:64,3:128"', (BatchPhase(0, 64), BatchPhase(3, 128))),
        ("batch_phases = [[0, 64], [3, 128]]", (BatchPhase(0, 64), BatchPhase(3, 128))),
        ('target_top1 = "none"', None),
        ("milestones = [1, 2.5]", (1, 2.5)),
        ("stop_at_target = false", False),
        ('lr = "0.5"', 0.5),
    ],
)
def test_values_are_read_as_on_the_command_line_or_as_toml_has_them(line, value):
    config = parsed(f'recipe = "digits"\n[fixed]\n{line}').runs[0].config
    name = line.split(" ")[0]
    assert next(getattr(part, name) for part in (config.schedule, config.run) if hasattr(part, name)) == value


@pytest.mark.parametrize("data", [None, "somewhere"])
def test_the_command_of_a_run_gives_its_config(data):
    for run in parsed(PLAN, data=data).runs:
        words = shlex.split(run.command)[1:]
        assert words[:2] == ["train", "cifar10_resnet"]
        if data is not None:
            assert words[-2:] == ["--data", "DIR"], "a row says nothing of the machine's folders"
            words[-1] = data
        assert config_of(parse(words)) == run.config


def test_a_run_is_known_by_what_it_computes():
    digests = [run.digest for run in parsed(PLAN).runs]
    assert len(set(digests)) == len(digests)
    tables = tomllib.loads(PLAN)
    tables["arms"].reverse()
    tables["grid"]["global_batch"].reverse()
    tables["arms"][1]["name"] = "another name"
    tables["fixed"] = {"lr_scaling": "none", "epochs": 30.0}
    again = parse_plan(tables, data="elsewhere")
    assert {run.digest for run in again.runs} == set(digests)
    assert [run.digest for run in again.runs] != digests

    def of(line: str) -> str:
        return parsed(f'recipe = "digits"\n[fixed]\n{line}').runs[0].digest

    usual = of("")
    assert of("epochs = 3") != usual
    assert of('data = "here"') == usual, "wherever the data lies"
    assert of("lr = 1") == usual, "the recipe's own value"
    assert of("nproc = 2") != usual, "a matter of how the work is cut counts where the plan sets it"


WRONG = {
    "recipe is missing": "seeds = 3",
    "unknown recipe 'digit'; did you mean 'digits'?": 'recipe = "digit"',
    "the plan must not have 'seed'; did you mean 'seeds'?": "seed = 3",
    "epochs is a field of the config; write it below [fixed], [grid] or [[arms]]": "epochs = 3",
    "[fixed] has an unknown config field 'epoch'; did you mean 'epochs'?": "[fixed]\nepoch = 3",
    "[fixed]: seeds does not belong there": "[fixed]\nseeds = 3",
    "[fixed]: --epochs: 'long' is not a number": '[fixed]\nepochs = "long"',
    "plan: --epochs: True is not a number": "[fixed]\nepochs = true",
    "plan, lr -1: --lr -1: must be positive": "[grid]\nlr = [-1]",
    "plan: --optimizer: 'larz' is not one of": '[fixed]\noptimizer = "larz"',
    "plan: --warmup-epochs 50 is longer than the whole run": "[fixed]\nwarmup_epochs = 50",
    "plan: --batch-phases: (1, 2) is not a list EPOCH:VALUE": "[fixed]\nbatch_phases = [1, 2]",
    "[grid]: lr is an empty list": "[grid]\nlr = []",
    "[grid]: lr = 1 is not a list": "[grid]\nlr = 1",
    "[grid]: lr = [1, 1.0] has a value twice": "[grid]\nlr = [1, 1.0]",
    "[fixed]: global_batch = 'x' is not a positive whole number": '[fixed]\nglobal_batch = "x"',
    "batch_phases sets the batch of every phase": '[fixed]\nglobal_batch = 64\nbatch_phases = "0:64"',
    "lr is set in [fixed] and in [grid]": "[fixed]\nlr = 1\n[grid]\nlr = [1, 2]",
    "lr is set in arm 'a' and in [grid]": '[grid]\nlr = [1, 2]\n[[arms]]\nname = "a"\nlr = 3',
    "arm 'a' has an unknown config field 'gird'; did you mean 'grid'?": '[[arms]]\nname = "a"\ngird.lr = [1]',
    "two arms have the point 'a'; give one of them another name": '[[arms]]\nname = "a"\n[[arms]]\nname = "a"\nlr = 2',
    "arm 'a', when: lr = 3 is not in [grid]": '[grid]\nlr = [1, 2]\n[[arms]]\nname = "a"\nwhen.lr = [3]',
    "runs 1 (a) and 2 (b) are the same": '[[arms]]\nname = "a"\n[[arms]]\nname = "b"',
    "arms is empty": "arms = []",
    "arms = 3 is not a list of tables": "arms = 3",
    "seeds = 0: contains no seed": "seeds = 0",
    "seeds = [1, 1]: contains a seed twice": "seeds = [1, 1]",
    "seeds = true": "seeds = true",
    "confirm = true: give how many fresh seeds": "confirm = true",
    "confirm = -1: give how many fresh seeds": "confirm = -1",
    "confirm = [2, 2]: contains a seed twice": "confirm = [2, 2]",
    "arm 'a', confirm = 'x': give how many": '[[arms]]\nname = "a"\nconfirm = "x"',
    "arm 'a', confirm = [3, 0]: its search already uses seed 0": (
        'confirm = [3, 0]\n[[arms]]\nname = "a"\ngrid.lr = [1, 2]'
    ),
    "arm 'a' has two values of confirm for one search": (
        '[[arms]]\nname = "a"\nlr = 1\nconfirm = 2\n[[arms]]\nname = "a"\ngrid.lr = [2]\nconfirm = 3'
    ),
    "[fixed]: confirm does not belong there": "[fixed]\nconfirm = 3",
    "name = 'a b'": 'name = "a b"',
    "name = '..'": 'name = ".."',
    "name = 'a\\x07'": 'name = "a\\u0007"',
    "use at most 200 bytes without blanks": f'name = "{"ü" * 101}"',
    "arm name = '': give a name": '[[arms]]\nname = ""',
    "arm name = 'a\\nb': give a name of 1 to 200 printable characters": '[[arms]]\nname = "a\\nb"',
    "recipe = 'runs/1/config.toml' is a file; give the name of a recipe": 'recipe = "runs/1/config.toml"',
    "is not a list of tables; write [[arms]] above each": "[arms]\nlr = 1",
    "it has 1,000,000,000,000 runs": "seeds = 1000000000000",
    "it has 100,000,000,000 runs": "confirm = 100000000000\n[[arms]]\ngrid.lr = [1, 2]",
    "it has 40,000 runs, including those that may confirm a search; a plan may have at most 20,000": (
        f"confirm = 3\n[grid]\nlr = {[i + 1 for i in range(100)]}\nweight_decay = {[i / 1000 for i in range(100)]}"
    ),
    "not valid TOML": "seeds = ",
}


@pytest.mark.parametrize(("words", "text"), WRONG.items(), ids=WRONG)
def test_a_bad_plan_is_one_clear_line(words, text, tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text(text if "recipe" in text or words == "recipe is missing" else f'recipe = "digits"\n{text}')
    with pytest.raises(InputError) as caught:
        load_plan(path)
    assert words.lower() in str(caught.value).lower()
    assert str(caught.value).startswith(f"plan {path}: ")
    assert cli.main(["sweep", str(path), "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_plan_that_is_not_there(tmp_path, capsys):
    assert cli.main(["sweep", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--part", "3/2"], "'3/2' is not K/N"),
        (["--part", "0/2"], "'0/2' is not K/N"),
        (["--until", "soon"], "'soon' is not a number of seconds"),
        (["--row", "1"], "--row trains one run, prints its row and writes nothing; leave out --out"),
        (["--row", "1", "--part", "1/2"], "leave out --part"),
        (["--side-by-side", "2", "--part", "1/2"], "--side-by-side starts all parts itself; leave out --part"),
        (["--data", "nowhere"], "plan: --data nowhere: the digits data set needs no folder"),
    ],
)
def test_wrong_flags_are_one_line(flags, words, tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text('recipe = "digits"\nseeds = 2')
    assert cli.main(["sweep", str(path), "--out", str(tmp_path / "out"), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_row_that_the_plan_does_not_have(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text('recipe = "digits"\nseeds = 2')
    assert cli.main(["sweep", str(path), "--row", "9"]) == 2
    assert "--row 9: the plan has runs 1 to 2" in capsys.readouterr().err


def test_a_plan_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "größe.toml"
    path.write_text('recipe = "digits"\n[[arms]]\nname = "η = ½, 学習"\n', encoding="utf-8-sig")
    plan = load_plan(path)
    assert (plan.name, title(plan.runs[0].point)) == ("größe", "η = ½, 学習")


def test_a_data_folder_below_the_home(tmp_path, monkeypatch, capsys):
    """A shell expands `--data ~/images`, and neither `--data=~/images` nor a plan."""
    (tmp_path / "images").mkdir()
    (path := tmp_path / "plan.toml").write_text('recipe = "imagenette"\n[fixed]\ndata = "~/images"\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["sweep", str(path), "--dry-run"]) == 2
    assert f"data folder {tmp_path / 'images'} is empty" in capsys.readouterr().err


def test_no_path_of_a_config_makes_a_folder_named_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("data", "init_from", "plan", "out")
    config = get_recipe("imagenette", **dict.fromkeys(names, "~/x"))
    values = [spec.of(config) for spec in fields() if spec.name in names]
    assert values == [spec.parse("~/x") for spec in fields() if spec.name in names] == [str(tmp_path / "x")] * 4


def test_a_home_folder_that_nobody_has_is_a_name_like_any_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "cifar10", "--data=~nobody-here/x"]) == 2
    assert "data folder ~nobody-here/x does not exist" in capsys.readouterr().err
    assert cli.main(["sweep", "plan.toml", "--out=~nobody-here/x"]) == 2
    assert "plan plan.toml: cannot be read" in capsys.readouterr().err


def test_a_mistake_that_only_the_data_shows_is_told_before_anything_is_run(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text('recipe = "digits"\n[fixed]\nnproc = 2\n[grid]\nglobal_batch = [64, 65]\n')
    assert cli.main(["sweep", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "plan, global batch 65: global batch 65 cannot be divided by 2 ranks" in said
    assert not (tmp_path / "out").exists()
    path.write_text('recipe = "digits"\n[fixed]\nmodel = "resnet9"\n')
    assert cli.main(["sweep", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "unknown model 'resnet9'; did you mean 'resnet8'?" in capsys.readouterr().err


def test_the_example_of_the_documentation_is_a_plan():
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    plan = parsed(page.partition("```toml\n")[2].partition("```")[0])
    assert (len(plan.runs), plan.count) == (2 * 3 * 2 + 3 * 2, 2 * 3 * 2 + 3 * 2 + 3 * 5)


def test_dry_run_lists_the_runs(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text('recipe = "digits"\nseeds = 2\n[grid]\nlr = [0.5, 1]')
    assert cli.main(["sweep", str(path), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "4 runs of digits" in text
    assert "hyperbatch train digits --nproc 1 --lr 0.5 --seed 1" in text
