"""Opening data sets: what is found, what each kind of wrong input is told, and that hostile files stay files."""

import dataclasses
import gzip
import io
import lzma
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from hyperbatch.config import DataConfig
from hyperbatch.data import cifar, source
from hyperbatch.data.cifar import CIFAR10, count_cifar, open_cifar
from hyperbatch.data.digits import open_digits
from hyperbatch.data.folders import FolderSource, TarSource
from hyperbatch.data.gpu import reader_process
from hyperbatch.data.source import (
    ArraySource,
    BadSample,
    EncodedSource,
    Location,
    Source,
    check_data,
    open_data,
    open_eval,
)
from hyperbatch.errors import InputError


def jpeg(value=128, size=(20, 16), mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value,) * len(mode)).save(buffer, "JPEG")
    return buffer.getvalue()


def tree(folder, classes=("cat", "dog"), per_class=3, splits=("train", "val")):
    for split in splits:
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(per_class):
                (folder / split / name / f"{i}.JPEG").write_bytes(jpeg(40 * label + i))
    return folder


def write_tar(path, members):
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w:xz" if path.suffix == ".xz" else "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def images(folder, **fields):
    return DataConfig(dataset="images", data=str(folder), **fields)


def message(config):
    with pytest.raises(InputError) as caught:
        check_data(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- the embedded set


def test_digits_split_is_fixed_and_stratified():
    train, test = open_digits()
    assert (len(train), len(test)) == (1433, 364)
    assert train.images.shape[1:] == (8, 8, 1)
    assert train.images.max() == 255
    shares = np.bincount(test.labels) / np.bincount(np.concatenate([train.labels, test.labels]))
    assert abs(shares - 0.2).max() < 0.005
    # The split is part of the data set: this pins it.
    assert test.labels[:12].tolist() == [7, 8, 9, 8, 9, 1, 0, 9, 4, 5, 1, 2]
    assert int(test.images.astype(np.int64).sum()) == 1804014


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    ours = np.concatenate([part.images for part in open_digits()]).reshape(-1, 64)
    assert sorted(map(tuple, ours)) == sorted(map(tuple, np.rint(pixels * 255 / 16).astype(np.uint8)))
    counts = sum(np.bincount(part.labels) for part in open_digits())
    assert (counts == np.bincount(labels)).all()


# --- folders and tars


def test_folder_tree(tmp_path):
    train, val = open_data(images(tree(tmp_path)))
    assert isinstance(train, FolderSource)
    assert isinstance(train, Source)
    assert train.classes == val.classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.image(4).shape == (16, 20, 3)
    assert train.read(4) == (tmp_path / "train" / "dog" / "1.JPEG").read_bytes()
    assert check_data(images(tmp_path)).to_dict() == {
        "train_samples": 6,
        "eval_samples": 6,
        "classes": 2,
        "channels": 3,
    }
    assert train.sizes_bytes().tolist() == [len(train.read(i)) for i in range(6)]


def test_other_files_in_a_tree_are_passed_over(tmp_path):
    tree(tmp_path)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "cat" / ".hidden.jpg").write_bytes(b"")
    (tmp_path / "train" / ".cache").mkdir()
    assert check_data(images(tmp_path)).train_samples == 6


def test_names_that_are_not_utf8(tmp_path):
    tree(tmp_path)
    with open(os.path.join(os.fsencode(tmp_path), b"train", b"cat", b"\xff\xfe.jpg"), "wb") as file:
        file.write(jpeg())
    train, _ = open_data(images(tmp_path))
    assert train.image(3).shape == (16, 20, 3)


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_tars(tmp_path, suffix):
    files = {f"{split}/{name}/{i}.jpg": jpeg(10 * i) for split in ("train", "val") for name in "ab" for i in range(3)}
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}-0.{suffix}", [item for item in files.items() if item[0].startswith(split)])
    train, _ = open_data(images(tmp_path))
    assert isinstance(train, TarSource)
    assert train.classes == ("a", "b")
    where = [train.describe(i).partition(":")[2] for i in range(len(train))]
    assert {name: train.read(i) for i, name in enumerate(where)} == {n: d for n, d in files.items() if "train" in n}
    assert check_data(images(tmp_path)).eval_samples == 6
    (tmp_path / f"train-0.{suffix}").unlink()
    assert train.read(0) == files[where[0]], "a tar stays open: over a network, opening one for each sample is slow"


def test_odd_tar_members_are_passed_over(tmp_path):
    good = [("./train/a/0.jpg", jpeg()), ("train/b/0.jpg", jpeg())]
    odd = [
        ("/train/../a/1.jpg", jpeg()),
        ("train/../x.jpg", jpeg()),
        ("train//x.jpg", jpeg()),
        ("train/a/x.txt", b"x"),
    ]
    write_tar(tmp_path / "train.tar", good + odd)
    write_tar(tmp_path / "val.tar", [("val/a/0.jpg", jpeg()), ("val/b/0.jpg", jpeg())])
    with tarfile.open(tmp_path / "train.tar", "a") as tar:
        link = tarfile.TarInfo("train/a/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert check_data(images(tmp_path)).train_samples == 2


def test_a_damaged_tar_is_named(tmp_path):
    write_tar(tmp_path / "train.tar.xz", [("train/a/0.jpg", jpeg())])
    write_tar(tmp_path / "val.tar", [("val/a/0.jpg", jpeg())])
    whole = (tmp_path / "train.tar.xz").read_bytes()
    (tmp_path / "train.tar.xz").write_bytes(whole[: len(whole) // 2])
    assert "train.tar.xz cannot be read" in message(images(tmp_path))
    (tmp_path / "train.tar.xz").unlink()
    (tmp_path / "train.tar").write_bytes(b"")
    assert "train.tar cannot be read" in message(images(tmp_path))
    (tmp_path / "train.tar").write_bytes(b"x" * 2048)
    assert "train.tar cannot be read as a tar" in message(images(tmp_path))


# --- wrong input


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_tar_that_is_cut_is_named(tmp_path, suffix):
    write_tar(tmp_path / "val.tar", [("val/a/0.jpg", jpeg())])
    path = tmp_path / "train.tar"
    write_tar(path, [("train/a/0.jpg", jpeg()), ("train/a/1.jpg", jpeg())])
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        second = tar.getmembers()[1]
    path.unlink()
    end = (second.offset_data + second.size + 511) // 512 * 512
    for cut in (second.offset, second.offset + 100, second.offset_data + 10, end, end + 100):
        data = gzip.compress(whole[:cut]) if suffix.endswith("gz") else whole[:cut]
        (tmp_path / f"train.{suffix}").write_bytes(data)
        told = message(images(tmp_path))
        assert f"train.{suffix}" in told, cut
        assert "fetch or write it again" in told, cut
        assert "\n" not in told, cut


def test_missing_empty_and_wrong_folders(tmp_path):
    assert "--data" in message(DataConfig(dataset="images"))
    assert "--data" in message(DataConfig(dataset="cifar10"))
    assert "does not exist" in message(images(tmp_path / "nowhere"))
    assert "is empty" in message(images(tmp_path))
    (tmp_path / "file").write_text("x")
    assert "is neither a folder nor a supported file" in message(images(tmp_path / "file"))
    assert "no train/ and val/ folders" in message(images(tmp_path))
    assert "does not hold CIFAR-10" in message(DataConfig(dataset="cifar10", data=str(tmp_path)))


def test_a_missing_split(tmp_path):
    assert "has no val/ folder" in message(images(tree(tmp_path, splits=("train",))))


def test_evaluation_needs_the_validation_set_alone(tmp_path):
    alone = open_eval(DataConfig(data=str(tree(tmp_path / "alone", splits=("val",)))))
    beside = open_eval(DataConfig(data=str(tree(tmp_path / "beside"))))
    assert alone.classes == beside.classes == ("cat", "dog")
    assert len(alone) == len(beside) == 6
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "val.tar", [(f"val/{name}/0.jpg", jpeg()) for name in ("cat", "dog")])
    assert len(open_eval(DataConfig(data=str(tmp_path / "tars")))) == 2


def test_a_split_without_classes(tmp_path):
    tree(tmp_path, splits=("val",))
    (tmp_path / "train").mkdir()
    assert "train has no class folders" in message(images(tmp_path))


def test_a_class_without_images(tmp_path):
    tree(tmp_path)
    for file in (tmp_path / "train" / "dog").iterdir():
        file.unlink()
    assert f"{tmp_path / 'train' / 'dog'} has no images" in message(images(tmp_path))


def test_splits_with_other_classes_are_named(tmp_path):
    tree(tmp_path)
    (tmp_path / "train" / "emu").mkdir()
    (tmp_path / "val" / "fox").mkdir()
    text = message(images(tmp_path))
    assert "only in train: emu" in text
    assert "only in val: fox" in text


def test_tars_with_other_classes_or_no_members(tmp_path):
    write_tar(tmp_path / "train.tar", [("train/a/0.jpg", jpeg()), ("train/b/0.jpg", jpeg())])
    assert "has no val*.tar" in message(images(tmp_path))
    write_tar(tmp_path / "val.tar", [("val/a/0.jpg", jpeg())])
    assert "only in train: b" in message(images(tmp_path))
    write_tar(tmp_path / "val.tar", [("0.jpg", jpeg())])
    assert "no members named val/CLASS/IMAGE.jpg" in message(images(tmp_path))


def test_class_names_that_only_look_alike_are_told(tmp_path):
    """macOS may write the letters of a name in another Unicode form than Linux."""
    for split, name in (("train", "caf\u00e9"), ("val", "cafe\u0301")):
        (tmp_path / split / name).mkdir(parents=True)
    assert "they look the same, but their letters have different Unicode forms" in message(images(tmp_path))


def test_an_unknown_data_set_gets_the_nearest_name():
    assert "did you mean 'digits'" in message(DataConfig(dataset="digit"))


def test_options_that_do_not_fit_are_found_before_loading():
    assert "--shift-pixels 9" in message(DataConfig(dataset="digits", image_size=8, augment="shift", shift_pixels=9))
    assert "--color-noise 0.1" in message(DataConfig(dataset="digits", color_noise=0.1))
    assert "--decoder nvjpeg" in message(DataConfig(dataset="digits", decoder="nvjpeg"))


# --- cifar10


def cifar_records(rng, n):
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n, dtype=np.uint8)


def cifar_forms(folder, name, flat, labels, form):
    pixels = flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    if form == "binary":
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], flat], axis=1).tobytes())
    elif form == "pickle":
        (folder / name).write_bytes(pickle.dumps({b"data": flat, b"labels": labels.tolist()}, protocol=2))
    else:
        stem = "test_images" if name == "test_batch" else name.replace("data_batch", "train_images")
        with lzma.open(folder / f"{stem}.npy.xz", "wb") as file:
            np.save(file, pixels)


@pytest.mark.parametrize("form", ["binary", "pickle", "arrays"])
def test_cifar10_forms_agree(tmp_path, monkeypatch, form):
    monkeypatch.setattr(cifar, "SAMPLES", {"train": 35, "test": 7})
    rng = np.random.default_rng(0)
    flat, labels = cifar_records(rng, 7)
    if form == "arrays":
        np.save(tmp_path / "train_labels.npy", np.tile(labels, 5))
        np.save(tmp_path / "test_labels.npy", labels)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        cifar_forms(tmp_path, name, flat, labels, form)
    train, test = open_cifar(CIFAR10, tmp_path)
    assert (len(train), len(test)) == (35, 7)
    assert train.images[3, 1, 2, 1] == flat[3, 1024 + 32 + 2]
    assert (train.labels == np.tile(labels, 5)).all()
    assert count_cifar(CIFAR10, tmp_path).classes == 10


@pytest.mark.parametrize("form", ["binary", "pickle", "arrays"])
def test_cifar10_is_kept_as_arrays_until_its_files_change(tmp_path, monkeypatch, form):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar, "_WORTH_KEEPING_BYTES", 0)
    monkeypatch.setattr(cifar, "SAMPLES", {"train": 35, "test": 7})
    decoded = []
    for name in ("_read_arrays", "_read_binary", "_read_pickle"):
        read = getattr(cifar, name)
        monkeypatch.setattr(cifar, name, lambda item, read=read: decoded.append(item) or read(item))

    def write(seed):
        flat, labels = cifar_records(np.random.default_rng(seed), 7)
        np.save(tmp_path / "train_labels.npy", np.tile(labels, 5))
        np.save(tmp_path / "test_labels.npy", labels)
        for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
            cifar_forms(tmp_path, name, flat, labels, form)

    def opened():
        decoded.clear()
        found = [(source.images.tolist(), source.labels.tolist()) for source in open_cifar(CIFAR10, tmp_path)]
        return found, len(decoded)

    write(0)
    first, count = opened()
    assert count == 6
    assert opened() == (first, 0)
    (kept,) = (tmp_path / "cache" / "hyperbatch").iterdir()
    (kept / "test_images.npy").write_bytes((kept / "test_images.npy").read_bytes()[:-1])  # not whole
    assert opened() == (first, 6)
    assert opened() == (first, 0)
    write(1)
    second, count = opened()
    assert count == 6
    assert second != first
    assert opened() == (second, 0)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder can be made here")
    assert opened() == (second, 6)


def test_a_hostile_pickle_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (tmp_path / name).write_bytes(pickle.dumps(Attack()))
    with pytest.raises(InputError, match="refers to"):
        open_cifar(CIFAR10, tmp_path)
    assert not (tmp_path / "owned").exists()


def test_a_cut_binary_file_is_named(tmp_path, monkeypatch):
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (tmp_path / f"{name}.bin").write_bytes(bytes(3073 * 2 - 5))
    with pytest.raises(InputError, match="records"):
        open_cifar(CIFAR10, tmp_path)
    monkeypatch.setattr(cifar, "SAMPLES", {"train": 10, "test": 2})
    for path in tmp_path.iterdir():
        path.write_bytes(bytes(3073 * 2))
    open_cifar(CIFAR10, tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(3073))  # between two images
    with pytest.raises(InputError, match="holds 9 images of CIFAR-10's train set, which has 10; fetch it again"):
        open_cifar(CIFAR10, tmp_path)


# --- synthetic and own data


def test_synthetic_is_deterministic_and_of_the_asked_shape():
    config = DataConfig(dataset="synthetic", image_size=32, train_samples=50, eval_samples=20, classes=4)
    train, val = open_data(config)
    again, _ = open_data(dataclasses.replace(config))
    assert train.image(7).shape == (32, 32, 3)
    assert (train.image(7) == again.image(7)).all()
    assert (train.image(7) != val.image(7)).any()
    assert check_data(config).to_dict() == {"train_samples": 50, "eval_samples": 20, "classes": 4, "channels": 3}
    assert (len(train), len(val), set(train.labels)) == (50, 20, {0, 1, 2, 3})


def test_a_large_synthetic_set_repeats_its_images_with_their_labels():
    config = DataConfig(dataset="synthetic", image_size=224, train_samples=1_281_167, eval_samples=5)
    train, _ = open_data(config)
    assert isinstance(train, ArraySource)
    n = len(train.images)
    assert train.images.nbytes < 100 << 20
    assert (train.image(n + 3) == train.image(3)).all()
    assert train.labels[n + 3] == train.labels[3]


def own_data(config):
    pixels = np.zeros((4, 8, 8, 2), dtype=np.uint8)
    made = ArraySource("own", pixels, np.arange(4), classes=tuple("abcd"), mean=(0.5, 0.5), std=(1, 1))
    return made, made


def own_wrong(config):
    return "no pair"


def test_own_data_by_callable(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    assert check_data(DataConfig(dataset="test_data_source:own_data")).channels == 2
    assert "must return (train, val)" in message(DataConfig(dataset="test_data_source:own_wrong"))
    assert "give package.module:callable" in message(DataConfig(dataset="test_data_source:nothing"))


class Own:
    """A set of somebody's own, with what `wrong` says."""

    def __init__(self, **wrong):
        self.name, self.classes, self.channels, self.mean, self.std = "own", ("a", "b"), 1, (0.5,), (0.2,)
        self.labels, self.pixels = np.array([0, 1, 1]), np.zeros((8, 8, 1), np.uint8)
        self.__dict__.update(wrong)

    def __len__(self):
        return 3

    def image(self, index):
        return self.pixels


OWN = {
    "labels": (np.array([0, 1, 2]), r"own: labels must be in \[0, 2\), found 0 to 2"),
    "negative": (np.array([0, 1, -1]), r"own: labels must be in \[0, 2\), found -1 to 1"),
    "fraction": (np.array([0.0, 0.5, 1.0]), "own: labels must be whole numbers"),
    "table": (np.array([[0], [1], [1]]), "own: labels must be whole numbers"),
    "list": ([0, 1, 1], "own: labels must be a numpy array, got list"),
    "few": (np.array([0, 1]), "own has 3 samples and 2 labels"),
    "mean": ((0.5, 0.5), "own: mean must be 1 numbers"),
    "std": ((0.0,), "own: std must be 1 numbers"),
    "pixels": (np.zeros((8, 8), np.uint8), r"own: image\(0\) must be uint8\[height, width, 1\], got uint8\(8, 8\)"),
    "floats": (np.zeros((8, 8, 1)), r"own: image\(0\) must be uint8\[height, width, 1\], got float64"),
}


@pytest.mark.parametrize("split", ["train", "both"])
@pytest.mark.parametrize(
    ("classes", "told"),
    [
        ((0, 1), r"own: classes must be a tuple of str, got \(0, 1\); convert them with str\(\)"),
        (np.array(["a", "b"]), "own: classes must be a tuple of str, got array"),
        (tuple(np.array(["a", "b"])), "own: classes must be a tuple of str"),
        (2, "own: classes must be a tuple of str, got 2"),
        ("ab", "own: classes must be a tuple of str, got 'ab'"),
        (("a", "b", "a"), "own: 2 classes are called 'a'; give each of them another name"),
    ],
)
def test_own_classes_are_names(monkeypatch, classes, told, split):
    """With others, a run trained to its end, and its checkpoints could not be read."""
    val = Own(classes=classes) if split == "both" else Own()
    monkeypatch.setattr(source, "load_object", lambda *_: lambda config: (Own(classes=classes), val))
    with pytest.raises(InputError, match=told):
        check_data(DataConfig(dataset="some:data"))


def test_own_classes_may_be_a_list_in_one_split(monkeypatch):
    monkeypatch.setattr(source, "load_object", lambda *_: lambda config: (Own(classes=["a", "b"]), Own()))
    assert check_data(DataConfig(dataset="some:data")).classes == 2


def test_an_error_in_the_first_own_image_is_told(monkeypatch):
    monkeypatch.setattr(source, "load_object", lambda *_: lambda config: (Own(image=lambda i: {}[i]), Own()))
    assert "own: image(0) raised KeyError: 0 (in <lambda>" in message(DataConfig(dataset="some:data"))


@pytest.mark.parametrize("kind", OWN)
def test_own_data_is_checked_when_it_is_opened(monkeypatch, kind):
    value, text = OWN[kind]
    name = kind if kind in ("mean", "std", "pixels") else "pixels" if kind == "floats" else "labels"
    monkeypatch.setattr(source, "load_object", lambda *_: lambda config: (Own(), Own(**{name: value})))
    with pytest.raises(InputError, match=text):
        check_data(DataConfig(dataset="some:data"))
    monkeypatch.setattr(source, "load_object", lambda *_: lambda config: (Own(), Own()))
    assert check_data(DataConfig(dataset="some:data")).train_samples == 3


class OwnFiles(EncodedSource):
    """Of somebody's own, as the documented LMDB set: of a key that is not there LMDB gives None."""

    def __init__(self, files):
        super().__init__("own", ("a", "b"), np.array([0, 1]))
        self.files = files

    def read(self, index):
        if self.files[index] == "gone":
            raise KeyError("gone")
        return self.files[index]


@pytest.mark.parametrize(
    ("first", "told"),
    [(None, "own: read(0) must return bytes, got NoneType"), ("gone", "dataset 'some:data': read(0) raised KeyError")],
)
def test_own_files_are_read_when_they_are_opened(monkeypatch, first, told):
    sets = OwnFiles([first, jpeg()]), OwnFiles([jpeg(), None])
    monkeypatch.setattr(source, "load_object", lambda *_: lambda config: (sets[0], sets[1]))
    assert told in message(DataConfig(dataset="some:data"))
    monkeypatch.setattr(source, "load_object", lambda *_: lambda config: (sets[1], sets[1]))
    check_data(DataConfig(dataset="some:data"))
    with pytest.raises(BadSample, match=r"own\[1\]: read returned NoneType, not bytes"):
        sets[1].read_buffer(1)


def test_own_arrays_need_an_image_for_every_label(monkeypatch):
    short = ArraySource("short", np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 1, 0]), classes=("a", "b"))
    monkeypatch.setattr(source, "load_object", lambda *_: lambda config: (short, short))
    with pytest.raises(InputError, match="short has 3 labels and 2 images"):
        check_data(DataConfig(dataset="some:data"))


def test_arrays_are_checked():
    with pytest.raises(InputError, match="whole numbers"):
        ArraySource("x", np.zeros((2, 8, 8, 1), np.uint8), np.array([0.0, 0.7]), classes=("a",))
    with pytest.raises(InputError, match="std must be 1 numbers"):
        ArraySource("x", np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 0]), classes=("a",), std=(1.0, 1.0))
    with pytest.raises(InputError, match="uint8"):
        ArraySource("x", np.zeros((2, 8, 8, 1)), np.zeros(2), classes=("a",))
    with pytest.raises(InputError, match="labels must be in"):
        ArraySource("x", np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 3]), classes=("a",))


def test_a_file_that_disappears_is_a_bad_sample(tmp_path):
    train, _ = open_data(images(tree(tmp_path)))
    (tmp_path / "train" / "cat" / "0.JPEG").unlink()
    with pytest.raises(BadSample, match=r"0\.JPEG"):
        train.image(0)


@pytest.mark.parametrize("size_bytes", [3 << 30, 1 << 42])
def test_a_file_too_large_for_an_image_is_a_bad_sample(tmp_path, size_bytes):
    """It is neither cut off at the 2 GiB that one read gives, nor does it fill the memory."""
    train, _ = open_data(images(tree(tmp_path)))
    os.truncate(tmp_path / "train" / "cat" / "0.JPEG", size_bytes)
    with pytest.raises(BadSample, match=r"0\.JPEG: [\d,]+ bytes are too many for an image"):
        train.read(0)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    """Emulated, because a test may run as root, whom no permission stops."""
    tree(tmp_path)
    list_folder = os.scandir

    def refuse(folder):
        if str(folder).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(folder))
        return list_folder(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert f"{tmp_path / 'train' / 'dog'} cannot be listed: Permission denied" in message(images(tmp_path))


def test_a_dangling_link_has_no_size_and_is_a_bad_sample(tmp_path):
    tree(tmp_path)
    (tmp_path / "train" / "cat" / "9.jpg").symlink_to(tmp_path / "nowhere")
    train, _ = open_data(images(tmp_path))
    assert np.flatnonzero(train.sizes_bytes() < 0).tolist() == [3]
    with pytest.raises(BadSample, match=r"9\.jpg: No such file"):
        train.read(3)


def test_pipes_and_folders_with_the_name_of_an_image_are_passed_over(tmp_path):
    tree(tmp_path)
    os.mkfifo(tmp_path / "train" / "cat" / "pipe.jpg")
    (tmp_path / "train" / "cat" / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "train" / "dog" / "pipe")
    (tmp_path / "train" / "dog" / "9.jpg").symlink_to(tmp_path / "train" / "dog" / "pipe")
    train, _ = open_data(images(tmp_path))
    assert len(train) == 7
    with pytest.raises(BadSample, match=r"9\.jpg: not a readable image"):  # and does not wait for a writer
        train.image(6)
    location = train.locations([6])[0]
    assert reader_process._read(location, memoryview(bytearray(100))) == 0


def test_a_tar_that_goes_on_after_its_end_is_named(tmp_path):
    """A header of zeros is the end for tarfile, as is the end mark of the first of two tars in one file."""
    write_tar(tmp_path / "val.tar", [("val/a/0.jpg", jpeg())])
    path = tmp_path / "train.tar"
    write_tar(path, [(f"train/a/{i}.jpg", jpeg()) for i in range(5)])
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        third = tar.getmembers()[2].offset
    path.write_bytes(whole[:third] + bytes(512) + whole[third + 512 :])
    assert f"{path} cannot be read as a tar: there is data after its end mark" in message(images(tmp_path))
    path.write_bytes(whole + whole)
    assert f"{path} cannot be read as a tar: there is data after its end mark" in message(images(tmp_path))
    path.write_bytes(whole + bytes(3 << 20))  # padding, of whatever length
    assert check_data(images(tmp_path)).train_samples == 5


def test_an_evaluation_crop_that_does_not_fit_is_refused(tmp_path):
    tree(tmp_path)
    assert "--eval-resize 16 is smaller than --eval-size 32" in message(
        images(tmp_path, image_size=32, eval_size=32, eval_resize=16)
    )
    check_data(images(tmp_path, image_size=32, eval_size=32, eval_resize=32))
    check_data(DataConfig(dataset="digits", image_size=16, eval_size=16, eval_resize=8))  # arrays are shown whole


def test_gzip_that_is_cut(tmp_path):
    (tmp_path / "train.tar.gz").write_bytes(gzip.compress(b"x" * 5000)[:-9])
    write_tar(tmp_path / "val.tar", [("val/a/0.jpg", jpeg())])
    assert "train.tar.gz cannot be read" in message(images(tmp_path))


def test_a_reading_process_keeps_few_files_open(tmp_path, monkeypatch):
    """It left those open that it no longer used. A set of 1,024 shards reached the limit of the process, and then the
    training process read the images."""
    monkeypatch.setattr(reader_process, "_open", opened := {})
    monkeypatch.setattr(reader_process, "max_open_files", lambda: 5)
    for number in range(40):
        (tmp_path / str(number)).write_bytes(b"..%02d.." % number)
    before, room = len(os.listdir("/proc/self/fd")), memoryview(bytearray(100))
    for number in (*range(40), *range(40)):
        assert reader_process._read(Location(str(tmp_path / str(number)), 2, 2), room) == 2
        assert bytes(room[:2]) == b"%02d" % number
    assert len(os.listdir("/proc/self/fd")) - before == len(opened) == 5
    for descriptor in opened.values():
        os.close(descriptor)
