"""A run goes on only on the data it began with, wherever they lie and in whatever form they have the same order."""

import io
import json
import os
import shutil
import tarfile
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from toy import config, flat_weights, same_bits
from web_server import WebServer

from hyperbatch import checkpoint
from hyperbatch.config import BatchPhase
from hyperbatch.data.decoders import resolve_decoders
from hyperbatch.data.identity import check_same_data, sample_list
from hyperbatch.data.pack import pack
from hyperbatch.data.remote import store
from hyperbatch.data.source import ArraySource, DataError, EncodedSource, Location, open_data
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError
from hyperbatch.launch import train as launch_train

CLASSES = ("ant", "bee", "cow")
PER_CLASS = 8


@pytest.fixture
def tree(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in CLASSES:
            (tmp_path / "tree" / split / name).mkdir(parents=True)
            for i in range(PER_CLASS):
                pixels = Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8))
                pixels.save(tmp_path / "tree" / split / name / f"{i}.png")
    return tmp_path / "tree"


def write_tars(tree, folder, order=sorted):
    folder.mkdir()
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.tar", "w") as tar:
            for path in order((tree / split).rglob("*.png")):
                data, member = path.read_bytes(), tarfile.TarInfo(str(path.relative_to(tree)))
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


def settings(data, out, **values):
    fixed = {
        "dataset": "images",
        "model": "toy:pooled",
        "augment": "none",
        "batch_phases": (BatchPhase(0, 8),),
        "epochs": 3.0,
    }
    return config(**{**fixed, "data": str(data), "out": str(out), **values})


def train(data, out, **values):
    torch.set_num_threads(1)
    run(settings(data, out, **values), Ranks())
    return flat_weights(out)


def test_the_same_data_elsewhere_and_in_another_form_continue_the_run(tree, tmp_path):
    unbroken = train(tree, tmp_path / "unbroken")
    moved = shutil.copytree(tree, tmp_path / "moved")
    for name, data in (("folder", moved), ("tars", write_tars(tree, tmp_path / "as_tars"))):
        train(tree, tmp_path / name, max_steps=4)  # in the middle of the second epoch
        assert same_bits(train(data, tmp_path / name, resume=True), unbroken)


def rename_class(tree):
    for split in ("train", "val"):
        (tree / split / "cow").rename(tree / split / "asp")


def add_class(tree):
    for split in ("train", "val"):
        shutil.copytree(tree / split / "cow", tree / split / "dog")


def swap(tree):
    """The same names, as many in each class, but two images are in each other's class."""
    (tree / "train" / "ant" / "0.png").rename(tree / "train" / "cow" / "90.png")
    (tree / "train" / "cow" / "0.png").rename(tree / "train" / "ant" / "90.png")


OTHER_DATA = {
    "fewer": (lambda tree: (tree / "train" / "cow" / "3.png").unlink(), "train had 24 samples and now has 23"),
    "class": (rename_class, r"3 classes then and 3 now \(only then: cow; only now: asp\)"),
    "more": (add_class, r"3 classes then and 4 now \(only now: dog\); train had 24 samples and now has 32"),
    "names": (
        lambda tree: os.rename(tree / "train/ant/0.png", tree / "train/ant/9.png"),
        "train has the same number of samples",
    ),
    "swap": (swap, "train has the same number of samples, but other samples"),
    "val": (lambda tree: (tree / "val" / "cow" / "3.png").unlink(), "val had 24 samples and now has 23"),
}


@pytest.fixture
def begun(tree, tmp_path):
    train(tree, tmp_path / "run", max_steps=4)
    return tmp_path / "run"


@pytest.mark.parametrize("kind", OTHER_DATA)
def test_other_data_are_refused(tree, begun, kind):
    change, text = OTHER_DATA[kind]
    change(tree)
    with pytest.raises(InputError, match=rf"--resume: the data set differs from that of the saved run: {text}"):
        train(tree, begun, resume=True)


def test_a_resume_that_is_refused_leaves_the_config_of_the_run(tree, tmp_path):
    """The next --resume without --data would look for the wrong data."""
    first = settings(tree, tmp_path / "run", max_steps=4, nproc=1)
    launch_train(first)
    before = (tmp_path / "run" / "config.toml").read_bytes()
    other = shutil.copytree(tree, tmp_path / "other")
    rename_class(other)
    with pytest.raises(InputError, match="the data set differs from that of the saved run"):
        launch_train(first.override(data=str(other), epochs=4.0, max_steps=0, resume=True))
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    launch_train(first.override(max_steps=5, resume=True))
    assert (tmp_path / "run" / "config.toml").read_bytes() != before


def test_another_order_is_refused(tree, begun, tmp_path):
    pack(tree, tmp_path / "packed")
    with pytest.raises(InputError, match="train was read from folders and is now read from packed shards"):
        train(tmp_path / "packed", begun, resume=True)
    write_tars(tree, tmp_path / "one")
    write_tars(tree, tmp_path / "other", order=lambda paths: sorted(paths, key=lambda path: path.name))
    train(tmp_path / "one", tmp_path / "of_tars", max_steps=4)
    with pytest.raises(InputError, match="train has the same samples in another order; val has the same"):
        train(tmp_path / "other", tmp_path / "of_tars", resume=True)


def test_a_continued_run_keeps_its_decoder_and_the_cpus_share(tree, begun):
    saved = checkpoint.load(begun)
    assert (saved.fixed.decoder, saved.fixed.cpu_decode_share) == (resolve_decoders("auto", torch.device("cpu"))[0], 0)
    path = max((begun / "checkpoints").glob("*.pt"))
    values = torch.load(path, weights_only=True)
    values["fixed"] |= {
        "decoder": "pillow",
        "cpu_decode_share": 0.25,
    }  # as on a machine with a GPU, but for its decoder
    del values["checksums"]
    torch.save(values, path)
    train(tree, begun, resume=True)
    again = checkpoint.load(begun)
    assert again.progress.step > saved.progress.step
    assert (again.fixed.decoder, again.fixed.cpu_decode_share) == ("pillow", 0.25)
    data = json.loads((begun / "record.json").read_text())["data"]
    assert (data["decoder"], data["cpu_decode_share"]) == ("pillow", 0)  # it has no other to share with


def test_a_run_saved_before_there_were_lists_is_continued(tree, begun):
    path = max((begun / "checkpoints").glob("*.pt"))
    values = torch.load(path, weights_only=True)
    del values["fixed"]["data"], values["checksums"]  # which came later
    torch.save(values, path)
    (tree / "train" / "ant" / "0.png").rename(tree / "train" / "ant" / "9.png")
    train(tree, begun, resume=True)
    assert checkpoint.load(begun).fixed.data["train"]["samples"] == 24


def test_arrays_are_told_apart_by_labels_and_pixels():
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (30, 4, 4, 1), dtype=np.uint8), np.arange(30) % 2
    classes = ("a", "b")

    def of(images, labels, classes=classes):
        return sample_list(ArraySource("own", images, labels, classes=classes))

    same = of(images, labels)
    assert same == of(images.copy(), labels.copy())
    order = np.r_[2:30, 0:2]
    assert of(images[order], labels).order != same.order
    assert of(images[order], labels[order]).members == same.members
    assert of(images, 1 - labels).members != same.members
    assert of(images, labels, ("b", "a")).members != same.members


def test_sets_that_cannot_be_keys_are_compared_too():
    class Own:
        __hash__ = None
        name, classes, channels, mean, std = "own", ("a", "b"), 1, (0.5,), (0.2,)

        def __init__(self, labels):
            self.labels = np.array(labels)

        def __len__(self):
            return len(self.labels)

        def image(self, index):
            return np.zeros((4, 4, 1), np.uint8)

    one, other = Own([0, 1, 0]), Own([0, 0, 1])
    saved = {split: sample_list(one).to_dict() for split in ("train", "val")}
    check_same_data(saved, classes=["a", "b"], samples=3, train=one, val=one)
    with pytest.raises(InputError, match="val has the same samples in another order"):
        check_same_data(saved, classes=["a", "b"], samples=3, train=one, val=other)


def test_samples_of_a_larger_file_are_told_apart_by_their_place():
    class Records(EncodedSource):
        def __init__(self, offsets):
            super().__init__("own", ("a",), np.zeros(len(offsets), dtype=np.int64))
            self.offsets = offsets

        def locations(self, ids):
            return [Location("/data/all.bin", self.offsets[i], 100) for i in ids]

    assert sample_list(Records([0, 100])) == sample_list(Records([0, 100]))
    assert sample_list(Records([0, 100])).order != sample_list(Records([100, 0])).order


def test_a_packed_set_is_the_same_wherever_it_lies(tree, tmp_path):
    pack(tree, tmp_path / "packed")
    moved = shutil.copytree(tmp_path / "packed", tmp_path / "moved")
    lists = [[sample_list(s) for s in open_data(settings(d, "").data)] for d in (tmp_path / "packed", moved)]
    assert lists[0] == lists[1]


def test_a_run_whose_server_dies_is_continued_exactly(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "READING_WAITS_S", (0.0, 0.0))
    pack(tree, tmp_path / "packed", shard_bytes=4000)
    unbroken = train(tmp_path / "packed", tmp_path / "unbroken")
    server = WebServer(tmp_path)
    reads = iter(range(10**9))

    def drop(path, start, stop):
        if "train-" in path and path.endswith(".tar"):
            number = next(reads)
            if number == 50:  # 24 samples make an epoch
                threading.Thread(target=server.die).start()
            return 40 if number % 3 == 0 or number >= 50 else None
        return None

    server.drop = drop
    remote = {"data_cache_gb": 0.0, "checkpoint_every_steps": 1, "cache": "none"}
    with pytest.raises(DataError, match=r"packed/(train|val)-.*\.tar cannot be read: .*continue the run with --resume"):
        train(f"{server.url}/packed", tmp_path / "run", **remote)
    assert 0 < checkpoint.load(tmp_path / "run").progress.step < 9
    server.drop = lambda path, start, stop: None
    server.start()
    assert same_bits(train(f"{server.url}/packed", tmp_path / "run", resume=True, **remote), unbroken)
    server.die()
