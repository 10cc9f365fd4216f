"""The command as a user types it: what it prints, what it loads, and one line with exit code 2 for every mistake."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperbatch.cli import RANK_0_S, main
from hyperbatch.cli import sweep as sweep_verb
from hyperbatch.cli.flags import SYNONYMS, translated
from hyperbatch.cli.parser import build_parser
from hyperbatch.config import fields, section_titles
from hyperbatch.errors import InputError

ROOT = Path(__file__).parents[2]


def command(capsys, *arguments):
    """(exit code, stdout, stderr) of one call in this process."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def loaded_by(code):
    """Modules a fresh interpreter has loaded after running `code`."""
    script = f"import sys\n{code}\nprint('\\n'.join(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_import_loads_nothing_heavy():
    heavy = {"torch", "numpy", "rich", "sklearn", "PIL", "scipy"}
    assert not heavy & loaded_by("import hyperbatch; dir(hyperbatch)")


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipes"],
        ["recipes", "--json"],
        ["plan", "fujitsu_resnet50", "--cluster", "abci", "--gpus", "64"],
        ["simulate", "fujitsu_resnet50", "--cluster", "abci", "--gpus", "512,2048", "--json"],
        ["train", "fujitsu_resnet50", "--dry-run", "--world-size", "2048"],
        ["sweep", str(ROOT / "records" / "2026-11-15_digits_10_seeds" / "plan.toml"), "--dry-run"],
    ],
)
def test_verbs_that_need_no_torch(arguments):
    modules = loaded_by(f"from hyperbatch.cli import main\nassert main({arguments!r}) == 0")
    assert "torch" not in modules


def test_public_names_are_these():
    import hyperbatch

    assert hyperbatch.__all__ == [
        "__version__",
        "AdamW",
        "Arena",
        "ArraySource",
        "BatchPhase",
        "Callback",
        "Classifier",
        "Config",
        "EncodedSource",
        "GradSync",
        "GridComm",
        "GridHookState",
        "GroupPlan",
        "InputError",
        "LAMB",
        "LARS",
        "LossScaler",
        "ModelConfig",
        "Muon",
        "Prediction",
        "RankGrid",
        "RunFailed",
        "RunRecord",
        "ScheduleConfig",
        "Session",
        "ShardedUpdate",
        "StepTiming",
        "all_reduce",
        "backward_order",
        "broadcast_weights",
        "check_collectives",
        "create_model",
        "ddp_bucket_bytes",
        "ddp_kwargs",
        "format_machine_file",
        "format_plan",
        "format_simulation",
        "fuse",
        "get_recipe",
        "grid_hook",
        "load_cluster",
        "load_config",
        "load_model",
        "make_plan",
        "open_digits",
        "param_groups",
        "param_specs",
        "plan_groups",
        "register_ddp_hook",
        "save_config",
        "set_rate",
        "simulate",
        "train",
        "why_not_fused",
        "write_trace",
    ]
    with pytest.raises(AttributeError):
        _ = hyperbatch.trian


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipes"],
        ["plan", "resnet50", "--cluster", "h200x8", "--gpus", "8"],
        ["simulate", "resnet50", "--cluster", "h200x8", "--gpus", "8,16"],
        ["train", "digits", "--dry-run"],
    ],
)
def test_json_is_one_object_and_nothing_else(capsys, arguments):
    code, out, _ = command(capsys, *arguments, "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "fujitsu_resnet5"], "unknown recipe 'fujitsu_resnet5'; did you mean 'fujitsu_resnet50'?"),
        (["train", "--momentun", "0.9"], "unknown argument '--momentun'; did you mean '--momentum'?"),
        (["simulate", "--epochs", "90"], "unknown argument '--epochs'; see `hyperbatch simulate --help`"),
        (["train", "--epochs", "ten"], "--epochs: 'ten' is not a number"),
        (["train", "--algorithm", "tree"], "--algorithm: 'tree' is not one of"),
        (["train", "--global-batch", "0"], "is not a positive whole number"),
        (["train", "--global-batch", "64", "--batch-per-rank", "8"], "cannot be combined; give only one"),
        (["train", "--global-batch", "33", "--nproc", "2"], "cannot be divided by 2 ranks; use a multiple of 2"),
        (["train", "--nproc", "2", "--grid", "3x2"], "grid 3x2 holds 6 ranks, but there are 2"),
        (["train", "--nproc", "2", "--accumulate", "48"], "--accumulate 48 is more than the 32 samples of a rank"),
        (["train", "--global-batch", "90000"], "is more than the whole run (20 epochs of 1,433 images)"),
        (
            ["train", "--epochs", "1", "--warmup-epochs", "0", "--global-batch", "1434"],
            "is more than the whole run (1 epoch of 1,433 images)",
        ),
        (["train", "resnet50"], "resnet50 needs --data: give a folder, an archive or an address"),
        (["train", "tinyimagenet"], "with --data http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
        (["train", "resnet50", "--data", "nowhere"], "nowhere does not exist"),
        (["train", "--batch-phases", "0:64", "--global-batch", "64"], "--batch-phases sets the batch of every phase"),
        (["train", "--world-size", "4"], "--world-size needs --dry-run"),
        (["train", "--lr", "inf"], "--lr inf: must be a finite number"),
        (["train", "--eval-size", "0"], "--eval-size 0: must be positive"),
        (["train", "digits", "cifar10"], "'cifar10' is an unexpected argument"),
        (["train", "--resume", "."], "'.' is a path and not a recipe; give data with --data"),
        (["train", "a" * 300], "unknown recipe 'aaa"),
        (["train", "--out", "a" * 300], "a: File name too long; give a shorter one"),
        (["report", "a" * 300], "a: File name too long; give a shorter one"),
        (["train", "--recipe", "digits"], "write the name of the recipe without a flag"),
        (["train", "--resume", "--out", "nowhere"], "nowhere does not exist"),
        (["train", "--resume"], "--resume needs the folder of the run to continue; add --out DIR"),
        (["sweep", "plan.toml", "--out", "gs://bucket/x"], "--out gs://bucket/x is an address; give a folder of this"),
        (["train", "--out", "s3://bucket/run"], "--out s3://bucket/run is an address; give a folder of this machine"),
        (["train", "--data", "somewhere"], "--data somewhere: the digits data set needs no folder"),
        (["train", "--init-from", "nowhere.pt"], "--init-from nowhere.pt: no such file"),
        (["train", "--init-from", "nowhere.pt", "--dry-run"], "--init-from nowhere.pt: no such file"),
        (["train", "--model", "resnet9"], "unknown model 'resnet9'; did you mean 'resnet8'?"),
        (["train", "--model", "alexnet_bn"], "image size too small: features.3.maxpool"),
        (["train", "nomodule:recipe"], "nomodule"),
        (["train", ":recipe"], "recipe ':recipe': give package.module:callable"),
        (["train", "json:"], "recipe 'json:': give package.module:callable"),
        (["train", ".json:loads"], "recipe '.json:loads': give package.module:callable"),
        (["train", "json:loads"], "recipe 'json:loads' cannot be called: missing a required"),
        (["train", "os:sep"], "recipe 'os:sep' cannot be called"),
        (["train", "gc:collect"], "recipe 'gc:collect' returned a int; it must return a Config"),
        (["train", "os:getcwd", "--dry-run"], "recipe 'os:getcwd' returned a str; it must return a Config"),
        (["simulate", "os:getcwd", "--gpus", "8"], "recipe 'os:getcwd' returned a str; it must return a Config"),
        (["plan", "os:getcwd", "--gpus", "8"], "recipe 'os:getcwd' returned a str; it must return a Config"),
        (["trian"], "unknown verb 'trian'; did you mean 'train'?"),
        (["digits"], "digits is a recipe; train it with `hyperbatch train digits`"),
        (["train", "--batch-size", "64"], "--batch-size: use --global-batch N for the samples per step over all"),
        (["train", "--bs=64"], "--bs: use --global-batch N"),
        (["train", "--batch_size", "64"], "--batch-size: use --global-batch N"),
        (["train", "--dry-run=yes"], "argument --dry-run: it takes no value, but was given 'yes'"),
        (["train", "--amp=yes"], "--amp takes no value; it stands for --precision auto"),
        (["train", "--learning-rate", "fast"], "--lr: 'fast' is not a number"),
        (["doctor", "--nproc", "2"], "--nproc is the number of processes for --collectives; add --collectives"),
        (["eval", "nowhere"], "nowhere does not exist; give the folder of a run, a checkpoint or an exported model"),
        (
            ["export", "nowhere", "--output", "model.onnx"],
            "--output model.onnx: --format safetensors writes no .onnx file; add --format onnx",
        ),
        (["simulate", "digits", "--plot", "time.png"], "time.png: pictures are written as SVG; use the suffix .svg"),
        (["bench", "gpu"], "argument PART: invalid choice: 'gpu'"),
        (["report", "nowhere"], "nowhere is not a run folder"),
        (["watch", ".", "--once"], "has neither record.json nor metrics.jsonl"),
        (["watch", ".", "--json"], "add --once"),
        (["data", "info", "nowhere"], "nowhere does not exist\n"),
        (["data", "pack", "nowhere", "packed"], "nowhere does not exist\n"),
        (["data", "verify", "nowhere"], "nowhere does not exist\n"),
        (["simulate", "--gpus", ""], "--gpus '' is not a list of positive numbers"),
        (["profile", "--batches", ""], "--batches '' is not a list of positive numbers"),
        (["simulate", "--gpus", "many"], "--gpus 'many' is not a list of positive numbers"),
        (["simulate", "--gpus", "²"], "--gpus '²' is not a list of positive numbers"),
        (["simulate", "--gpus", "8", "--grid", "²x4"], "grid '²x4' is not ROWSxCOLUMNS"),
        (["simulate", "--gpus", "8", "--cluster", "abcy"], "did you mean 'abci'?"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(capsys, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hyperbatch.launch.OPENING_S", 1e6)  # else a slow machine says that it reads the data
    code, out, err = command(capsys, *arguments)
    assert code == 2, err
    assert out == ""
    assert words in err
    assert err.startswith("hyperbatch: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists(), "what is refused leaves nothing behind"


def test_a_flag_that_does_nothing_is_named(capsys):
    assert main(["train", "digits", "--nproc", "1", "--ema-decay", "0.9", "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "note: --averaging-decay has no effect with --averaging none; it needs --averaging ema or lookahead\n"
    assert json.loads(out)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "is empty"),
        (["train/a/1.jpg", "val/a/1.jpg", "train/b/", "val/b/1.jpg"], "train/b"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"], "only in train: b"),
        (["train/a/1.HEIC", "val/a/1.jpg"], "train/a has no images (1.HEIC is none of .jpg, .jpeg, .png,"),
        (["train/a/1.jpg", "val/a/1.jpg"], "has only one class; use at least two"),
        (["a/1.jpg", "b/1.jpg"], "has class folders but no train/ and val/ folders; move each CLASS/ to"),
    ],
)
def test_data_folders_that_cannot_be_trained_on(capsys, tmp_path, monkeypatch, files, words):
    """Empty; a class without images; a class that validation lacks; a single class; classes that are not split."""
    monkeypatch.setattr("hyperbatch.launch.OPENING_S", 1e6)
    (tmp_path / "data").mkdir()
    for name in files:
        path = tmp_path / "data" / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(b"not read before workers start")
    code, out, err = command(capsys, "train", "imagenette", "--data", str(tmp_path / "data"), "--nproc", "2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err.replace(str(tmp_path), "")


def test_unwritable_output_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = command(capsys, "train", "--nproc", "2", "--out", str(tmp_path / "file" / "run"))
    assert code == 2
    assert "cannot be written" in err


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_the_whole_help_names_every_field_under_its_section(capsys):
    text = help_of(capsys, "train", "--help-all")
    assert all(f"  {spec.flag}" in text for spec in fields())
    assert all(f"\n{title}:\n" in text for title in section_titles().values())


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_what_most_people_need_and_where_the_rest_is(capsys, flag):
    text = help_of(capsys, "train", flag)
    shown = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  -")]
    assert len(shown) <= 16
    assert {"--data", "--epochs", "--lr", "--global-batch", "--nproc", "--out", "--resume", "--config"} <= set(shown)
    assert "`hyperbatch train --help-all` lists them by section" in " ".join(text.split())


def test_help_loads_next_to_nothing():
    """It answers in a tenth of a second because of that."""
    code = "from hyperbatch.cli import main\ntry:\n main(['--help'])\nexcept SystemExit: pass"
    modules = loaded_by(code)
    assert not {"torch", "numpy", "rich", "tensorboard", "sklearn", "PIL", "multiprocessing"} & modules
    assert not {"hyperbatch.engine", "hyperbatch.recipes.everyday", "hyperbatch.plan"} & modules


@pytest.mark.parametrize(("typed", "meant"), SYNONYMS.items())
def test_names_of_other_trainers_find_the_flag(typed, meant):
    """Each stands for a flag that there is, takes the value behind it, and is no flag of its own."""
    flags = {spec.flag: spec for spec in fields()}
    assert typed not in flags
    assert meant[0] in flags
    if len(meant) == 2:
        assert translated(["train", typed, "x"]) == ["train", *meant, "x"]
        flags[meant[0]].parse(meant[1])
    else:
        assert translated(["train", typed, "1", f"{typed}=2"]) == ["train", meant[0], "1", f"{meant[0]}=2"]


@pytest.mark.parametrize(
    ("words", "line"), [(["help"], "usage: hyperbatch [-h]"), (["help", "eval"], "usage: hyperbatch eval")]
)
def test_help_is_no_unknown_verb(capsys, words, line):
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().out.startswith(line)


def test_underscores_in_flags_are_dashes():
    words = ["train", "--label_smoothing=0.1", "--learning_rate", "1", "--out", "my_run", "--data=a_b=c_d"]
    assert translated(words) == ["train", "--label-smoothing=0.1", "--lr", "1", "--out", "my_run", "--data=a_b=c_d"]


def test_synonyms_reach_the_config(capsys):
    words = ["--wd", "0.25", "--workers=3", "--learning-rate", "0.5", "--bf16"]
    code, out, _ = command(capsys, "train", "digits", *words, "--dry-run", "--json")
    assert code == 0
    config = json.loads(out)["config"]
    assert (config["optim"]["weight_decay"], config["data"]["data_threads"]) == (0.25, 3)
    assert (config["schedule"]["lr"], config["optim"]["precision"]) == (0.5, "bf16")


def test_every_recipe_passes_a_dry_run_alone_and_as_published(capsys):
    from hyperbatch.recipes import all_recipes

    for name, recipe in all_recipes().items():
        if recipe.config().model.model.startswith("timm/"):
            continue  # knows its tensors where timm is installed
        for ranks in (1, recipe.ranks):
            code, out, err = command(capsys, "train", name, "--dry-run", "--json", "--world-size", str(ranks))
            assert code == 0, (name, err)
            values = json.loads(out)
            assert values["steps"] > 0
            assert values["groups"]
            assert values["memory_bytes_per_rank"]["total"] > 0
            for phase in values["phases"]:
                assert phase["global_batch"] == phase["share_per_rank"] * ranks
                assert phase["batch_per_rank"] == -(-phase["share_per_rank"] // phase["accumulation"])


def helps():
    """(verb and flag, help) of everything that any verb's help shows."""

    def walk(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for choice in action._choices_actions:
                    yield f"{parser.prog} {choice.dest}", choice.help
                for sub in action.choices.values():
                    yield from walk(sub)
            elif action.help != argparse.SUPPRESS:
                yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", action.help

    return dict(walk(build_parser()))


def test_every_help_text_is_a_sentence():
    """It begins with a capital or a name of the interface and ends with a full stop; the default comes after it."""
    names = {"images", "safetensors"}
    odd = {
        flag: text
        for flag, text in helps().items()
        if not (text and (text[0].isupper() or text.split()[0] in names) and re.search(r"[.?](?: \[[^]]+\])?$", text))
    }
    assert odd == {}


def test_no_word_at_all_gets_the_help():
    done = subprocess.run([sys.executable, "-m", "hyperbatch"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Train a recipe until it reaches its target accuracy." in done.stdout


def test_simulate_takes_the_recipe_s_own_number_of_gpus(capsys):
    assert main(["simulate", "fujitsu_resnet50", "--json"]) == 0
    assert [point["gpus"] for point in json.loads(capsys.readouterr().out)["points"]] == [2048]


@pytest.mark.parametrize("name", ["cifar10", "cifar10_96"])
def test_a_claim_made_on_an_h200_is_simulated_on_one(capsys, name):
    assert main(["simulate", name, "--json"]) == 0
    simulation = json.loads(capsys.readouterr().out)
    assert (simulation["device"][:4], [point["gpus"] for point in simulation["points"]]) == ("H200", [1])


def test_the_dry_run_s_tables_are_as_wide_as_their_columns(capsys):
    assert main(["train", "fujitsu_resnet50", "--dry-run", "--world-size", "2048"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("gradient groups (cubic, 51.2 MB per step)")  # in one line, however narrow the table is
    assert lines[start + 1].split() == ["group", "tensors", "kB", "dtype"]
    assert len(set(map(len, lines[start + 1 : start + 7]))) == 1, "numbers end below each other"


def test_the_opening_line_comes_before_torch_is_loaded(tmp_path):
    """What makes it come within a second of Enter, on any machine."""
    script = (
        "import os, sys, hyperbatch.launch\n"
        "def say(line):\n"
        "    print('torch' in sys.modules, line, flush=True)\n"
        "    os._exit(0)\n"
        "hyperbatch.launch._say = say\n"
        "from hyperbatch.cli import main\n"
        "main(['train', '--nproc', '1', '--device', 'cpu', '--out', sys.argv[1]])\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("False digits: resnet8 on digits"), done.stderr


@pytest.mark.parametrize(
    ("rank", "local_rank", "said"),
    [(0, 0, "hyperbatch: "), (1, 1, None), (2, 0, "hyperbatch: rank 2 (host "), (3, 1, None)],
)
def test_each_host_says_what_is_wrong_and_waits_for_rank_0(capsys, monkeypatch, rank, local_rank, said):
    """On two hosts of two ranks. A file, say, may be missing on one of them, and the first rank that ends takes all of
    them with it."""
    waited = []
    monkeypatch.setattr("hyperbatch.cli.time.sleep", waited.append)
    for name, value in (("RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    code, _, err = command(capsys, "train", "--epoch", "3")
    assert code == 2
    assert waited == [RANK_0_S] * (rank > 0)
    if said is None:
        assert err == ""
    else:
        assert err.startswith(said)
        assert err.count("did you mean '--epochs'?") == 1


def test_a_mistake_that_only_one_rank_of_a_host_sees_is_printed_by_it(capsys, monkeypatch):
    """Its local rank may have no GPU."""
    monkeypatch.setattr("hyperbatch.cli.time.sleep", lambda _: None)
    for name, value in (("RANK", 3), ("WORLD_SIZE", 4), ("LOCAL_RANK", 3), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    error = InputError("there is no GPU")
    error.on_host = False

    def fails(_):
        raise error

    monkeypatch.setattr("hyperbatch.cli.parse", fails)
    assert main([]) == 2
    assert re.fullmatch(r"hyperbatch: rank 3 \(host .*\): there is no GPU\n", capsys.readouterr().err)


def test_a_dry_run_under_a_launcher_is_printed_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ("train", "digits", "--device", "cpu", "--json")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        for more in (("--dry-run",), ("--save-config", str(tmp_path / "config.toml"))):
            code, out, _ = command(capsys, *words, *more)
            assert (code, out.count("\n")) == (0, 1 - rank)


def test_a_sweep_writes_each_line_in_one_piece(monkeypatch):
    """Parts side by side share stderr, and with PYTHONUNBUFFERED every write is one of the system's."""
    written = []
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    sweep_verb._say("a line")
    assert written == ["a line\n"]
