"""Sets as they are published, built small with their names, keys and records: opened, described and packed alike."""

import functools
import io
import os
import pickle
import sys
import zipfile

import numpy as np
import pytest
from layout_files import Files, cache, images, is_read, jpeg, message
from scipy.io import savemat

from hyperbatch.config import DataConfig
from hyperbatch.data import cifar, kept
from hyperbatch.data.layouts import archives, devkit, imagenet
from hyperbatch.data.pack import info, pack
from hyperbatch.data.source import check_data, open_data, open_eval
from hyperbatch.errors import InputError

pytestmark = pytest.mark.usefixtures("cache")
__all__ = ("cache",)  # a fixture is used by its name


# --- Tiny-ImageNet


def tiny_imagenet(prefix=""):
    wnids = ("n02", "n01")  # not in order, as in the original
    files = Files().images(*(f"{prefix}train/{w}/images/{w}_{i}.JPEG" for w in sorted(wnids) for i in range(3)))
    train = [(data, path.split("/")[-3]) for path, data in files.items()]
    files.images(*(f"{prefix}val/images/val_{i}.JPEG" for i in range(4)))
    val = [(files[f"{prefix}val/images/val_{i}.JPEG"], wnids[i % 2]) for i in range(4)]
    files.images(f"{prefix}test/images/test_0.JPEG")
    for w in wnids:
        files[f"{prefix}train/{w}/{w}_boxes.txt"] = f"{w}_0.JPEG\t0\t0\t62\t63\n".encode()
    lines = [f"val_{i}.JPEG\t{wnids[i % 2]}\t0\t32\t44\t62\n" for i in (3, 1, 0, 2)]
    files[f"{prefix}val/val_annotations.txt"] = "".join(lines).encode()
    files[f"{prefix}wnids.txt"] = "\n".join(wnids).encode()
    files[f"{prefix}words.txt"] = b"n01\tone\nn02\ttwo\n"
    return files, train, val


def test_tiny_imagenet_as_a_folder(tmp_path):
    files, train, val = tiny_imagenet()
    files.folder(tmp_path / "set")
    is_read(tmp_path / "set", tmp_path, kind="Tiny-ImageNet", classes=("n01", "n02"), train=train, val=val)


def test_tiny_imagenet_as_its_zip(tmp_path):
    files, train, val = tiny_imagenet("tiny-imagenet-200/")
    path = files.zip(tmp_path / "tiny-imagenet-200.zip", zipfile.ZIP_DEFLATED)
    is_read(path, tmp_path, kind="Tiny-ImageNet in a zip", classes=("n01", "n02"), train=train, val=val)


def test_tiny_imagenet_in_parts(tmp_path):
    files, _, val = tiny_imagenet()
    files.folder(tmp_path / "set")
    annotations = tmp_path / "set" / "val" / "val_annotations.txt"
    lines = annotations.read_text().splitlines()
    annotations.write_text("\n".join(lines[1:]))
    assert "val_annotations.txt has no label for val_3.JPEG" in message(tmp_path / "set")
    annotations.write_text("\n".join([*lines, "val_9.JPEG\tn01\t0"]))
    assert "lacks 1 of the 5 images" in message(tmp_path / "set")
    annotations.write_text("\n".join([*lines[:3], "val_2.JPEG\tn03\t0"]))
    assert "'n03'" in message(tmp_path / "set")
    annotations.write_text("\n".join([*lines, "val_1.JPEG\tn02\t0"]))
    assert "val_annotations.txt gives val_1.JPEG the labels 'n01' and 'n02'" in message(tmp_path / "set")
    annotations.unlink()
    assert "has no val_annotations.txt" in message(tmp_path / "set")
    (tmp_path / "set" / "wnids.txt").write_text("n01\nn02\nn04\n")
    assert "n04" in message(tmp_path / "set")
    (tmp_path / "set" / "wnids.txt").unlink()
    annotations.write_text("\n".join(lines))
    assert "has no wnids.txt" in message(tmp_path / "set")
    alone = Files({path: data for path, data in files.items() if not path.startswith("train")}).folder(
        tmp_path / "alone"
    )
    source = open_eval(images(alone))
    assert [(source.read(i), source.classes[source.labels[i]]) for i in range(4)] == val
    assert "no train/ folder" in message(alone)


# --- ImageNet from Kaggle


def kaggle():
    wnids = ("n01", "n02")
    inside = "ILSVRC/Data/CLS-LOC"
    files = Files().images(*(f"{inside}/train/{w}/{w}_{i}.JPEG" for w in wnids for i in range(3)))
    train = [(data, path.split("/")[-2]) for path, data in files.items()]
    names = [f"ILSVRC2012_val_{i:08d}" for i in range(1, 5)]
    files.images(*(f"{inside}/val/{name}.JPEG" for name in names))
    val = [(files[f"{inside}/val/{name}.JPEG"], wnids[i % 2]) for i, name in enumerate(names)]
    files.images(f"{inside}/test/ILSVRC2012_test_00000001.JPEG")
    rows = [f"{names[i]},{wnids[i % 2]} 85 1 499 272 {wnids[0]} 1 2 3 4 \n" for i in (2, 0, 3, 1)]
    files["LOC_val_solution.csv"] = ("ImageId,PredictionString\n" + "".join(rows)).encode()
    files["LOC_train_solution.csv"] = b"ImageId,PredictionString\n"
    files["LOC_synset_mapping.txt"] = b"n01 one\nn02 two\n"
    files["ILSVRC/ImageSets/CLS-LOC/val.txt"] = b""
    return files, train, val


@pytest.mark.parametrize("inside", ["", "ILSVRC", "ILSVRC/Data/CLS-LOC"])
def test_imagenet_from_kaggle(tmp_path, inside):
    files, train, val = kaggle()
    path = files.folder(tmp_path / "set") / inside
    is_read(path, tmp_path, kind="ImageNet from Kaggle", classes=("n01", "n02"), train=train, val=val)


def test_imagenet_from_kaggle_as_its_zip(tmp_path):
    files, train, val = kaggle()
    path = files.zip(tmp_path / "imagenet.zip")
    is_read(path, tmp_path, kind="ImageNet from Kaggle in a zip", classes=("n01", "n02"), train=train, val=val)


def test_imagenet_from_kaggle_with_two_labels_for_an_image(tmp_path):
    files, _, _ = kaggle()
    files["LOC_val_solution.csv"] += b"ILSVRC2012_val_00000001,n02 1 2 3 4\n"
    told = "LOC_val_solution.csv gives ILSVRC2012_val_00000001.JPEG the labels 'n01' and 'n02'"
    assert told in message(files.folder(tmp_path))


def test_imagenet_from_kaggle_without_its_labels(tmp_path):
    files, _, _ = kaggle()
    del files["LOC_val_solution.csv"]
    assert "has no LOC_val_solution.csv" in message(files.folder(tmp_path))


# --- ImageNet's tars


@functools.cache
def meta_mat(wnids):
    """In the devkit's own order, with a group of classes at the end."""
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height")
    synsets = np.zeros((len(wnids) + 1, 1), dtype=[(name, object) for name in fields])
    for number, wnid in enumerate([*wnids, "n99"], start=1):
        synsets[number - 1, 0] = (number, wnid, "words", "gloss", 2 if wnid == "n99" else 0, [], 0)
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": synsets})
    return buffer.getvalue()


def official(folder, *, devkit_unpacked=False):
    """(train, val) of the tars that are written into the folder."""
    wnids = ("n02", "n01", "n03")  # the devkit's numbers are not in the order of the ids
    files = Files().images(*(f"{w}/{w}_{i}.JPEG" for w in sorted(wnids) for i in (10, 2)))
    train = sorted([(path, data) for path, data in files.items()])
    outer = Files()
    for w in wnids:
        inner = Files({path.split("/")[1]: data for path, data in files.items() if path.startswith(w)})
        outer[f"{w}.tar"] = inner.tar(folder / "inner.tar").read_bytes()
    (folder / "inner.tar").unlink()
    outer.tar(folder / "ILSVRC2012_img_train.tar")
    val = Files(files).images(*(f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 6)))
    val = Files({path: data for path, data in val.items() if "val" in path})
    Files(sorted(val.items(), reverse=True)).tar(folder / "ILSVRC2012_img_val.tar")
    numbers = [1, 2, 3, 3, 1]
    data = "ILSVRC2012_devkit_t12/data"
    kit = Files(
        {f"{data}/meta.mat": meta_mat(wnids), f"{data}/ILSVRC2012_validation_ground_truth.txt": b"1\n2\n3\n3\n1\n"}
    )
    if devkit_unpacked:
        kit.folder(folder)
    else:
        kit.tar(folder / "ILSVRC2012_devkit_t12.tar.gz")
    return (
        [(data, path.split("/")[0]) for path, data in train],
        [(data, wnids[number - 1]) for data, number in zip(val.values(), numbers)],
    )


@pytest.mark.parametrize("devkit_unpacked", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_imagenets_tars(tmp_path, monkeypatch, devkit_unpacked, kept_bytes):
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", kept_bytes)
    (tmp_path / "set").mkdir()
    train, val = official(tmp_path / "set", devkit_unpacked=devkit_unpacked)
    known = {"kind": "ImageNet's tars", "classes": ("n01", "n02", "n03"), "train": train, "val": val}
    opened = is_read(tmp_path / "set", tmp_path, **known)
    assert opened[0].locations([0]) is not None
    assert (tmp_path / "set" / "ILSVRC2012_img_train.tar.index.npz").exists() == (kept_bytes == 0)


def test_the_devkit_needs_an_extra(tmp_path, monkeypatch):
    official(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy", None)
    devkit.wordnet_ids.cache_clear()
    assert "run pip install 'hyperbatch[imagenet]'" in message(tmp_path)


def test_a_damaged_devkit_does_not_end_the_process(tmp_path):
    """Of a type that does not exist, scipy's reader takes the process along."""
    official(tmp_path, devkit_unpacked=True)
    path = tmp_path / "ILSVRC2012_devkit_t12" / "data" / "meta.mat"
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"n02") - 4] = 200
    path.write_bytes(damaged)
    assert "ILSVRC2012_devkit_t12 cannot be read: its meta.mat is damaged; fetch the devkit again" in message(tmp_path)


def test_imagenets_tars_are_indexed_in_the_cache_where_nothing_can_be_written_beside_them(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", 0)
    train, _ = official(tmp_path)
    write = kept.whole_file

    def refuse(path):
        if path.parent == tmp_path:
            raise PermissionError(13, "Permission denied")
        return write(path)

    monkeypatch.setattr(kept, "whole_file", refuse)
    open_data(images(tmp_path))
    monkeypatch.setattr(imagenet, "tar_members", None)  # found, not made
    monkeypatch.setattr(archives, "tar_members", None)
    source, _ = open_data(images(tmp_path))
    assert [source.read(i) for i in range(len(source))] == [data for data, _ in train]
    assert len(list(cache.glob("index-*.npz"))) == 3  # train, val and the devkit


def test_imagenet_unpacked_with_a_flat_val_and_the_devkit(tmp_path):
    (tmp_path / "set").mkdir()
    train, val = official(tmp_path / "set")
    for number, (data, wnid) in enumerate(train):
        Files({f"train/{wnid}/{number}.JPEG": data}).folder(tmp_path / "set")
    for number, (data, _) in enumerate(val, start=1):
        Files({f"val/ILSVRC2012_val_{number:08d}.JPEG": data}).folder(tmp_path / "set")
    known = {"kind": "ImageNet with its devkit", "classes": ("n01", "n02", "n03"), "train": train, "val": val}
    is_read(tmp_path / "set", tmp_path, **known)


def test_imagenets_tars_in_parts(tmp_path):
    official(tmp_path)
    devkit = tmp_path / "ILSVRC2012_devkit_t12.tar.gz"
    inside = "ILSVRC2012_devkit_t12/data"
    Files({f"{inside}/meta.mat": b"x" * 200, f"{inside}/ILSVRC2012_validation_ground_truth.txt": b"1\n"}).tar(devkit)
    assert "devkit_t12.tar.gz cannot be read" in message(tmp_path)
    Files({f"{inside}/meta.mat": b""}).tar(devkit)
    assert "lacks data/meta.mat or data/ILSVRC2012_validation_ground_truth.txt" in message(tmp_path)
    devkit.unlink()
    assert "has no ILSVRC2012_devkit_t12.tar.gz" in message(tmp_path)
    (tmp_path / "ILSVRC2012_img_val.tar").unlink()
    assert "has no ILSVRC2012_img_val.tar" in message(tmp_path)
    train = tmp_path / "ILSVRC2012_img_train.tar"
    train.write_bytes(train.read_bytes()[:-11000])
    assert "ILSVRC2012_img_train.tar" in message(tmp_path)
    Files({"n01_0.JPEG": jpeg(1)}).tar(train)
    assert "'n01_0.JPEG', which is not the tar of a class" in message(tmp_path)


# --- CIFAR as published


def cifar_batch(classes, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (6, 3072), dtype=np.uint8), rng.integers(0, classes, 6).tolist()


def published_cifar(classes, form):
    """(files, train, val) with the names, keys and records of the published archives, in six images a batch."""
    files, pixels, labels = Files(), [], []
    if classes == 10:
        folder = "cifar-10-batches-py" if form == "python" else "cifar-10-batches-bin"
        names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
        files[f"{folder}/{'batches.meta' if form == 'python' else 'batches.meta.txt'}"] = b"x"
    else:
        folder = f"cifar-100-{form}"
        names = ["train", "test"]
        files[f"{folder}/{'meta' if form == 'python' else 'fine_label_names.txt'}"] = b"x"
    for number, name in enumerate(names):
        flat, numbers = cifar_batch(classes, number)
        if form == "python":
            batch = {b"data": flat, b"labels" if classes == 10 else b"fine_labels": numbers}
            if classes == 100:
                batch[b"coarse_labels"] = [19 - n // 6 for n in numbers]
            files[f"{folder}/{name}"] = pickle.dumps(batch, protocol=2)
        else:
            coarse = [[7]] * 6 if classes == 100 else [[]] * 6
            rows = [bytes([*before, n]) + row.tobytes() for before, n, row in zip(coarse, numbers, flat)]
            files[f"{folder}/{name}.bin"] = b"".join(rows)
        pixels.append(flat.reshape(6, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(numbers)
    return files, (np.concatenate(pixels[:-1]), np.concatenate(labels[:-1]).tolist()), (pixels[-1], labels[-1])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_as_published(tmp_path, monkeypatch, classes, form, packed):
    files, *expected = published_cifar(classes, form)
    monkeypatch.setattr(cifar, "SAMPLES", {"train": len(expected[0][1]), "test": len(expected[1][1])})
    (tmp_path / "set").mkdir()
    if packed:
        files.tar(tmp_path / "set" / f"cifar-{classes}-{form}.tar.gz")
        paths = [tmp_path / "set", tmp_path / "set" / f"cifar-{classes}-{form}.tar.gz"]
    else:
        files.folder(tmp_path / "set")
        paths = [tmp_path / "set", tmp_path / "set" / next(iter(files)).split("/")[0]]
    for path in paths:
        for dataset in (f"cifar{classes}", "images"):
            opened = open_data(DataConfig(dataset=dataset, data=str(path)))
            for source, (pixels, labels) in zip(opened, expected, strict=True):
                assert (source.images == pixels).all()
                assert source.labels.tolist() == labels
                assert len(source.classes) == classes
    assert check_data(DataConfig(dataset=f"cifar{classes}", data=str(path))).classes == classes
    other = 110 - classes
    with pytest.raises(InputError, match=f"holds CIFAR-{classes}, not CIFAR-{other}; use --dataset cifar{classes}"):
        check_data(DataConfig(dataset=f"cifar{other}", data=str(path)))
    assert info(path).kind == f"CIFAR-{classes}"
    pack(path, tmp_path / "packed")
    for source, (pixels, labels) in zip(open_data(images(tmp_path / "packed")), expected, strict=True):
        found = [(source.image(i).tobytes(), int(label)) for i, label in enumerate(source.labels)]
        assert sorted(found) == sorted((image.tobytes(), label) for image, label in zip(pixels, labels))


def test_a_cifar_archive_that_is_cut_or_hostile(tmp_path):
    path = tmp_path / "cifar-10-python.tar.gz"
    files, _, _ = published_cifar(10, "python")
    content = files.tar(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    for dataset in ("cifar10", "images"):
        with pytest.raises(InputError, match=r"cifar-10-python\.tar\.gz cannot be read"):
            open_data(DataConfig(dataset=dataset, data=str(path)))
    path.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])  # the checksum
    assert "cifar-10-python.tar.gz cannot be read" in message(path)
    Files({name: data for name, data in files.items() if "batch_3" not in name}).tar(path)
    assert "has no data_batch_3 inside" in message(path)

    class Attack:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    Files(files, **{"cifar-10-batches-py/test_batch": pickle.dumps(Attack())}).tar(path)
    assert "tar.gz:test_batch is not a CIFAR-10 pickle: it refers to posix.mkdir" in message(path)
    assert not (tmp_path / "owned").exists()
