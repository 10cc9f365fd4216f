"""A trained model in use: predicted, exported, evaluated again, without running code that its file names."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hyperbatch
from hyperbatch import checkpoint
from hyperbatch import export as exporting
from hyperbatch.cli import main
from hyperbatch.config import BatchPhase, Config
from hyperbatch.data.source import open_eval
from hyperbatch.engine import loop
from hyperbatch.engine.evaluate import evaluate_checkpoint
from hyperbatch.engine.folder import keep_config
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError
from hyperbatch.export import export, load_trained
from hyperbatch.predict import Preprocessing, find_images

CLASSES = ("daisy", "rose", "tulip")


def make_folder(root: Path) -> None:
    """Photographs of three colours under noise; no two have the same shape."""
    generator = np.random.default_rng(5)
    for split, count in (("train", 8), ("val", 5)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                shape = (30 + 3 * i, 24 + 5 * label, 3)
                pixels = generator.normal(90, 50, shape) + 70 * np.eye(3)[label]
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / split / name / f"{i}.png")


def config(**values) -> Config:
    settings = {
        "model": "resnet8",
        "image_size": 16,
        "eval_size": 16,
        "eval_resize": 20,
        "epochs": 3.0,
        "warmup_epochs": 0.0,
        "lr": 0.05,
        "optimizer": "sgd",
        "batch_phases": (BatchPhase(0, 8),),
        "eval_every_epochs": 3.0,
        "device": "cpu",
    }
    return Config(recipe="flowers").override(**{**settings, **values})


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    root = tmp_path_factory.mktemp("flowers")
    make_folder(root / "data")
    record = loop.run(config(data=str(root / "data"), out=str(root / "run"), averaging="ema"), Ranks())
    return root, record


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "run"
    grey = config(dataset="digits", image_size=8, eval_size=8, eval_resize=8, augment="none", max_steps=60, lr=0.1)
    loop.run(grey.override(out=str(out), epochs=1.0, batch_phases=(BatchPhase(0, 24),), eval_every_epochs=0.5), Ranks())
    return out


def files_of(source):
    return [str(source.path(i)) for i in range(len(source))]


def test_predictions_are_those_of_the_evaluation(flowers):
    root, record = flowers
    source = open_eval(config(data=str(root / "data")).data)
    classifier = hyperbatch.load_model(root / "run", device="cpu")
    assert classifier.classes == CLASSES == tuple(record.classes)
    answers = classifier.predict(files_of(source))
    assert [answer.image for answer in answers] == files_of(source)
    right = [answer.top[0][0] == CLASSES[label] for answer, label in zip(answers, source.labels, strict=True)]
    assert np.mean(right) == record.result.top1
    for answer in answers:
        assert sum(share for _, share in answer.top) == pytest.approx(1)
        assert [share for _, share in answer.top] == sorted((share for _, share in answer.top), reverse=True)
    # The definition: Pillow's resize, the centre, ImageNet's colours, softmax.
    image = Image.open(files_of(source)[0])
    width, height = image.size
    image = image.resize((20, int(20 * height / width)), Image.Resampling.BILINEAR)
    left, top = round((20 - 16) / 2), round((image.height - 16) / 2)
    pixels = torch.tensor(np.array(image.crop((left, top, left + 16, top + 16)))).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    shown = classifier.preprocess(files_of(source)[0])
    torch.testing.assert_close(shown, (pixels - mean) / std, atol=0.036, rtol=0)  # two roundings
    with torch.no_grad():
        expected = classifier.model(shown[None]).softmax(1)[0]
    for name, share in answers[0].top:
        assert share == pytest.approx(expected[CLASSES.index(name)].item(), abs=1e-6)


def test_paths_pixels_and_pillow_images_give_the_same_answer(flowers):
    root, _ = flowers
    path = root / "data" / "val" / "rose" / "1.png"
    classifier = hyperbatch.load_model(root / "run", device="cpu")
    with Image.open(path) as image:
        one = classifier.predict([path, np.asarray(image), image])
        single = [classifier.predict(given)[0].top for given in (path, np.asarray(image), image)]
    assert all(dict(one[0].top) == pytest.approx(dict(other.top)) for other in one[1:])
    assert [answer.image for answer in one] == [str(path), "1", "2"]
    assert all(top[0][0] == one[0].top[0][0] for top in single)
    assert len(classifier.predict(path, top=1)[0].top) == 1
    assert len(classifier.predict(path, top=99)[0].top) == 3
    with pytest.raises(InputError, match="pixels must be uint8"):
        classifier.predict(np.zeros((4, 4, 3)))
    with pytest.raises(InputError, match="takes images of 3 channels, this one has 2"):
        classifier.predict(np.zeros((4, 4, 2), dtype=np.uint8))


def test_what_is_no_picture(flowers):
    classifier = hyperbatch.load_model(flowers[0] / "run", device="cpu")
    for nothing in (np.zeros((0, 4, 3), dtype=np.uint8), Image.new("RGB", (0, 0)), [None]):
        with pytest.raises(InputError, match=r"pixels must be uint8\[height, width, channels\], got"):
            classifier.predict(nothing)


def test_arguments_of_another_kind(flowers):
    run = flowers[0] / "run"
    classifier = hyperbatch.load_model(run, device="cpu")
    with pytest.raises(InputError, match="images is None; give a path, pixels or a list of them"):
        classifier.predict(None)
    for top in (0, 1.5, "3"):
        with pytest.raises(InputError, match=r"top is .*; give a whole number of at least 1"):
            classifier.predict([], top=top)
    with pytest.raises(InputError, match="path is None; give the folder of a run"):
        hyperbatch.load_model(None)
    with pytest.raises(InputError, match="device is 'tpu'; give auto, cpu, cuda or a torch"):
        hyperbatch.load_model(run, device="tpu")


def test_many_images_come_in_order_and_the_unreadable_one_is_told(flowers, tmp_path):
    root, _ = flowers
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"not an image")
    good = [str(root / "data" / "val" / name / "0.png") for name in CLASSES] * 50
    classifier = hyperbatch.load_model(root / "run", device="cpu")
    answers = list(classifier.stream([*good[:70], bad, *good[70:]]))
    assert answers[70] == hyperbatch.Prediction(image=str(bad), error=f"{bad}: not a readable image")
    assert [answer.image for answer in answers] == [*good[:70], str(bad), *good[70:]]
    assert dict(answers[0].top) == pytest.approx(dict(answers[-3].top))


def test_grey_models_take_grey_and_coloured_files_whole(digits, tmp_path):
    source = open_eval(config(dataset="digits").data)
    for i in range(40):
        Image.fromarray(source.image(i)[:, :, 0]).save(tmp_path / f"{i:02}.png")
    Image.fromarray(source.image(0)[:, :, 0]).convert("RGB").resize((40, 40)).save(tmp_path / "large.png")
    classifier = hyperbatch.load_model(digits, device="cpu")
    assert classifier.preprocess.resize is None
    answers = classifier.predict(find_images([tmp_path]))
    arrays = classifier.predict(source.image(i) for i in range(40))
    assert [a.top for a in answers[:40]] == [a.top for a in arrays]
    assert np.mean([a.top[0][0] == str(label) for a, label in zip(answers, source.labels[:40])]) > 0.8
    assert len(answers) == 41


def test_the_command_prints_text_json_and_csv(flowers, capsys):
    root, _ = flowers
    folder = root / "data" / "val" / "tulip"
    assert main(["predict", str(root / "run"), str(folder), "--device", "cpu", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [str(folder / f"{i}.png") for i in range(5)]
    assert all(line.count(" %") == 0 and line.count("%") == 2 for line in lines)
    assert main(["predict", str(root / "run"), str(folder), "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["images"]
    assert [set(row) for row in told] == [{"image", "top"}] * 5
    assert {best["class"] for row in told for best in row["top"]} == set(CLASSES)
    assert main(["predict", str(root / "run"), str(folder), "--device", "cpu", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 15
    for row in rows:
        best = told[int(Path(row["image"]).stem)]["top"][int(row["rank"]) - 1]
        assert (row["class"], float(row["probability"])) == (best["class"], best["probability"])


@pytest.mark.parametrize("form", ["--json", "--csv", "--top=2"])
def test_answers_that_find_no_room_are_an_error_of_one_line(flowers, monkeypatch, capsys, form):
    root, folder = flowers[0], flowers[0] / "data" / "val"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["predict", str(root / "run"), str(folder), "--device", "cpu", form]) == 1
    assert capsys.readouterr().err.startswith("hyperbatch: the output cannot be written: No space left on device")


def test_mistakes_are_one_line(flowers, tmp_path, capsys):
    root, _ = flowers
    run, image = str(root / "run"), str(root / "data" / "val" / "rose" / "0.png")
    foreign, empty = tmp_path / "foreign.safetensors", tmp_path / "empty"
    save_file({"weight": torch.ones(2)}, foreign)
    (tmp_path / "broken.safetensors").write_bytes(b"x")
    (tmp_path / "text.jpg").write_text("no image")
    (onnx := tmp_path / "model.onnx").write_bytes(b"")
    empty.mkdir()
    for arguments, code, told in (
        ([run, "nowhere.jpg"], 2, "nowhere.jpg does not exist; give image files or folders of them"),
        ([run, "https://host/a.jpg"], 2, "https://host/a.jpg is an address; fetch the image first, and give the file"),
        ([run, str(empty)], 2, "has no images"),
        ([run, image, "--json", "--csv"], 2, "--json and --csv cannot be combined"),
        (["nowhere", image], 2, "nowhere does not exist; give the folder of a run, a checkpoint or an exported model"),
        ([str(foreign), image], 2, "contains weights, but not the names of the model and the classes"),
        ([str(tmp_path / "broken.safetensors"), image], 2, "cannot be read"),
        ([onnx, image], 2, "model.onnx is an export for other programs"),
        (["nowhere.onnx", image], 2, "nowhere.onnx does not exist"),
        ([run, image, tmp_path / "text.jpg"], 1, "text.jpg: not a readable image"),
    ):
        assert main(["predict", *map(str, arguments), "--device", "cpu"]) == code
        captured = capsys.readouterr()
        assert told in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out.count("\n") == (1 if code == 1 else 0)


def test_an_evaluation_says_which_classes_differ(flowers, tmp_path, capsys):
    shutil.copytree(flowers[0] / "data", tmp_path / "data")
    for split in ("train", "val"):
        (tmp_path / "data" / split / "rose").rename(tmp_path / "data" / split / "poppy")
    assert main(["eval", str(flowers[0] / "run"), "--data", str(tmp_path / "data"), "--device", "cpu"]) == 2
    told = (
        "differ from those of the checkpoint (only in the checkpoint: rose; only in the data set: poppy); check --data"
    )
    assert told in capsys.readouterr().err


def test_the_data_of_a_run_is_found_from_any_folder(flowers, tmp_path, monkeypatch, capsys):
    """It was started with a path that leads nowhere from here."""
    root, run = flowers[0], tmp_path / "run"
    monkeypatch.chdir(root)
    relative = config(data="data", out=str(run), averaging="ema")
    loop.run(relative, Ranks())
    keep_config(relative, run)
    monkeypatch.chdir(tmp_path)
    for path in (run, run / "checkpoints" / "best.pt"):
        assert main(["eval", str(path), "--device", "cpu"]) == 0, capsys.readouterr().err
    (run / "config.toml").unlink()
    assert main(["eval", str(run), "--device", "cpu"]) == 2
    assert "data folder data does not exist; check --data" in capsys.readouterr().err


def test_an_export_is_all_that_prediction_and_evaluation_need(flowers, tmp_path, capsys):
    root, record = flowers
    path = export(root / "run", tmp_path / "flowers.safetensors")
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == list(CLASSES)
    assert (about["model"], about["size"], about["resize"], about["channels"]) == ("resnet8", "16", "20", "3")
    assert json.loads(about["mean"]) == [0.485, 0.456, 0.406]
    assert json.loads(about["std"]) == [0.229, 0.224, 0.225]
    assert str(root) not in json.dumps(about), "nothing of the machine it was made on"
    image = root / "data" / "val" / "rose" / "0.png"
    ours, exported = (hyperbatch.load_model(p, device="cpu").predict(image)[0] for p in (root / "run", path))
    assert ours == exported
    told = evaluate_checkpoint(path, data=str(root / "data"), device="cpu")
    assert (told["top1"], told["samples"], told["weights"]) == (record.result.top1, 15, "averaged")
    assert main(["eval", str(path), "--device", "cpu"]) == 2
    assert "dataset 'images' needs --data: give a folder, an archive or an address" in capsys.readouterr().err
    assert main(["eval", str(path), "--device", "cpu", "--weights", "trained"]) == 2
    assert "holds averaged weights only" in capsys.readouterr().err
    assert main(["export", str(path), "--output", str(tmp_path / "again.safetensors")]) == 0
    assert load_file(tmp_path / "again.safetensors").keys() == load_file(path).keys()
    assert load_trained(tmp_path / "again.safetensors").about() == load_trained(path).about()


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_an_export_has_the_permissions_of_any_new_file(flowers, tmp_path, umask):
    root, _ = flowers
    before = os.umask(umask)
    try:
        path = export(root / "run", tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_export_that_cannot_be_written_leaves_what_was_there(flowers, tmp_path, monkeypatch, capsys):
    root, _ = flowers
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")

    def full(*args, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert main(["export", str(root / "run"), "--output", str(path)]) == 2
    assert "cannot be written: No space left on device; choose another --output" in capsys.readouterr().err
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("model.safetensors", b"before")]
    assert main(["export", str(root / "run"), "--output", str(path / "below")]) == 2
    told = f"hyperbatch: {path / 'below'} cannot be written: Not a directory; choose another --output\n"
    assert capsys.readouterr().err == told


def test_a_checkpoint_of_an_older_version_says_what_it_lacks(digits, tmp_path):
    path = max((digits / "checkpoints").glob("step-*.pt"))
    values = torch.load(path, weights_only=True)
    for name in ("mean", "std", "whole", "checksums"):
        del values[name]
    torch.save(values, tmp_path / "old.pt")
    with pytest.raises(InputError, match="has no normalisation of its images"):
        hyperbatch.load_model(tmp_path / "old.pt", device="cpu")


EVIL = """
from pathlib import Path
Path("ran").touch()
from torch import nn
def net(classes, in_channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, classes))
"""


def test_code_that_a_file_names_is_not_run_unasked(tmp_path, monkeypatch, capsys):
    """Somebody's run: its model, or its data set, is a module that leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("somebodys.py").write_text(EVIL)
    grey = config(dataset="digits", image_size=8, eval_size=8, eval_resize=8, augment="none", max_steps=2)
    loop.run(grey.override(model="somebodys:net", out="run"), Ranks())
    main(["export", "run", "--output", "run.safetensors", "--trust-code"])
    saved = checkpoint.load(Path("run"))
    Image.new("L", (8, 8)).save("image.png")

    def forget():
        sys.modules.pop("somebodys", None)
        Path("ran").unlink(missing_ok=True)

    needs_code = [["eval", "run"], ["eval", "run.safetensors"], ["predict", "run", "image.png"]]
    needs_code += [["predict", "run.safetensors", "image.png"], ["export", "run", "--format", "onnx"]]
    for arguments in needs_code:
        forget()
        capsys.readouterr()
        assert main([*arguments, *(["--device", "cpu"] if arguments[0] != "export" else [])]) == 2, arguments
        told = capsys.readouterr().err
        assert (
            "names somebodys:net as its model, which is Python code that would be imported and run; use --trust-code"
            in told
        )
        assert not Path("ran").exists()
    for arguments in (
        ["report", "run"],
        ["export", "run"],
        ["export", "run", "--format", "dcp"],
        ["watch", "run", "--once"],
    ):
        forget()
        assert main(arguments) == 0
        assert not Path("ran").exists(), arguments
    forget()
    assert main(["predict", "run", "image.png", "--device", "cpu", "--trust-code"]) == 0
    assert Path("ran").exists()

    forget()
    trained = load_trained(Path("run"))
    assert not Path("ran").exists()
    assert trained.config == saved.config
    own_data = saved.config.override(model="resnet8", dataset="somebodys:data")
    with pytest.raises(InputError, match="names somebodys:data as its data set"):
        type(trained).of_file({**trained.about(), "config": json.dumps(own_data.to_dict())}, {}, "x").check_trust(
            False, data=True
        )


onnx = pytest.mark.skipif(
    subprocess.run(
        [sys.executable, "-c", "import onnxruntime, onnxscript"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="onnxruntime and onnxscript are not installed",
)


@pytest.fixture(scope="module")
def onnx_file(flowers):
    """Torch's exporter takes ten seconds."""
    path = flowers[0] / "onnx" / "flowers.onnx"
    path.parent.mkdir()
    assert main(["export", str(flowers[0] / "run"), "--format", "onnx", "--output", str(path)]) == 0
    return path


@onnx
@pytest.mark.slow
def test_an_onnx_export_answers_as_torch_does(flowers, onnx_file):
    import onnxruntime

    root, _ = flowers
    assert [p.name for p in onnx_file.parent.iterdir()] == ["flowers.onnx"]
    session = onnxruntime.InferenceSession(onnx_file, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == list(CLASSES)
    preprocess = Preprocessing(
        size=int(about["size"]),
        resize=json.loads(about["resize"]),
        channels=int(about["channels"]),
        mean=tuple(json.loads(about["mean"])),
        std=tuple(json.loads(about["std"])),
    )
    classifier = hyperbatch.load_model(root / "run", device="cpu")
    paths = find_images([root / "data" / "val"])
    images = torch.stack([preprocess(path) for path in paths])
    (logits,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), classifier.model(images), rtol=1e-4, atol=1e-4)
    best = [classifier.predict(path, top=1)[0].top[0][0] for path in paths]
    assert [CLASSES[index] for index in logits.argmax(1)] == best


@onnx
def test_an_onnx_file_that_computes_something_else_is_not_written(flowers, onnx_file, tmp_path, monkeypatch, capsys):
    class Made:
        """What the exporter gives, for a model of other weights."""

        model = SimpleNamespace(metadata_props={})

        def save(self, path, external_data):
            path.write_bytes(onnx_file.read_bytes())

    run = flowers[0] / "run"
    monkeypatch.setattr(exporting, "_onnx_program", lambda model, images: Made())
    command = ["export", str(run), "--format", "onnx", "--output", str(tmp_path / "x.onnx")]
    assert main(command) == 0
    (tmp_path / "x.onnx").unlink()
    assert main([*command, "--weights", "trained"]) == 2
    assert "onnxruntime's logits differ from torch's" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_command_says_what_to_install(flowers, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    root, _ = flowers
    assert main(["export", str(root / "run"), "--format", "onnx", "--output", str(tmp_path / "x.onnx")]) == 2
    assert "--format onnx needs onnxscript; run pip install 'hyperbatch[onnx]'" in capsys.readouterr().err
