"""ImageNet (ILSVRC2012) as it is distributed: the official tars with the devkit, or the tree of Kaggle's archive.

DIR/ILSVRC2012_img_train.tar            n01440764.tar n01443537.tar ..., each with that class's images
DIR/ILSVRC2012_img_val.tar              ILSVRC2012_val_00000001.JPEG ...
DIR/ILSVRC2012_devkit_t12.tar.gz        data/meta.mat and data/ILSVRC2012_validation_ground_truth.txt; may be unpacked

DIR/ILSVRC/Data/CLS-LOC/train/WNID/*.JPEG   DIR/ILSVRC/Data/CLS-LOC/val/*.JPEG   DIR/LOC_val_solution.csv

Classes are in the order of their sorted WordNet ids. This is the usual numbering; only the devkit has another one.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hyperbatch.data import kept
from hyperbatch.data.folders import FolderTree, Listed, Tree, class_names, list_classes
from hyperbatch.data.layouts.archives import MemberSource, Window, open_archive, plain_rows, tar_content, tar_members
from hyperbatch.data.layouts.devkit import wordnet_ids
from hyperbatch.data.layouts.found import TRAIN, Found, labels_of
from hyperbatch.data.layouts.trees import labelled
from hyperbatch.data.source import EncodedSource
from hyperbatch.errors import InputError

_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_DEVKIT = "ILSVRC2012_devkit_t12"
_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_CSV = "LOC_val_solution.csv"

Labels = Callable[[], dict[str, str]]  # image -> WordNet id


def imagenet_tars(folder: Path) -> Found | None:
    """Recognises the official tars."""
    train, val = folder / _TRAIN_TAR, folder / _VAL_TAR
    if not train.is_file() and not val.is_file():
        return None

    def opened_val() -> EncodedSource:
        labels = _devkit(FolderTree(folder))
        if labels is None:
            raise InputError(
                f"{folder} has no {_DEVKIT}.tar.gz, which labels the images of {_VAL_TAR}; put it beside the tars"
            )
        table = labels()
        return labelled(open_archive(val), table, tuple(sorted(set(table.values()))), f"the devkit in {folder}")

    return Found(
        kind="ImageNet's tars",
        where=str(folder),
        train=(lambda: _tar_of_tars(train)) if train.is_file() else None,
        val=opened_val if val.is_file() else None,
        expected=lambda split: f"no ILSVRC2012_img_{split}.tar; put it there, as image-net.org gives it",
    )


def imagenet_tree(tree: Tree) -> Found | None:
    """Recognises training images in class folders, validation images in one folder, and a table of their labels."""
    images = _descend(tree, "ILSVRC", "Data", "CLS-LOC") or _descend(tree, "Data", "CLS-LOC")
    csv_at = tree if _CSV in tree.files() else _above(tree)
    labels = _kaggle(csv_at) if csv_at is not None else _devkit(tree)
    if images is None:
        if labels is None or "val" not in tree.folders():
            return None
        images = tree
    folders = images.folders()
    if TRAIN not in folders and "val" not in folders:
        return None
    if "val" in folders and images.within("val").folders():
        return None  # the validation images were sorted into class folders

    def train() -> EncodedSource:
        part = images.within(TRAIN)
        return part.source(list_classes(part, TRAIN))

    def val() -> EncodedSource:
        part = images.within("val")
        if labels is None:
            raise InputError(f"{tree} has no {_CSV}, which labels the images of {part}; copy it there")
        table = labels()
        classes = class_names(images.within(TRAIN)) if TRAIN in folders else tuple(sorted(set(table.values())))
        return labelled(part, table, classes, _CSV if csv_at is not None else "the devkit")

    return Found(
        kind="ImageNet with its devkit" if csv_at is None and labels is not None else "ImageNet from Kaggle",
        where=str(images),
        train=train if TRAIN in folders else None,
        val=val if "val" in folders else None,
        expected=lambda split: f"no {split}/ folder; expected {images}/{split}",
    )


def _tar_of_tars(path: Path) -> MemberSource:
    """Reads the members of the inner tars in place. Walking 1.3 million headers takes minutes, so the index is kept."""
    content = tar_content(path)

    def walk() -> kept.Arrays:
        content.open()
        names, spans = [], []
        for name, offset, length in tar_members(Window(content, 0, content.length), str(path)):
            if not name.endswith(".tar"):
                raise InputError(f"{path} holds {name!r}, which is not the tar of a class; fetch the tar again")
            inner = Window(content, offset, length)
            for member, place, size in tar_members(inner, f"{path}:{name}"):
                names.append(os.fsencode(f"{Path(name).stem}/{member}"))
                spans.append((offset + place, size))
        return {"names": np.array(names), "spans": np.array(spans, dtype=np.int64).reshape(-1, 2)}

    index = kept.indexed(path, "files of inner tars", walk)
    paths = [os.fsdecode(name) for name in index["names"].tolist()]
    if not paths:
        raise InputError(f"{path} holds no images; fetch the tar again")
    order = sorted(range(len(paths)), key=paths.__getitem__)
    paths = [paths[number] for number in order]
    wnids, labels = np.unique(np.array([name.partition("/")[0] for name in paths]), return_inverse=True)
    listed = Listed(TRAIN, tuple(wnids.tolist()), labels.astype(np.int64), paths)
    return MemberSource(listed, [content], plain_rows(index["spans"][order]))


# --- tables of the validation images' labels


def _devkit(tree: Tree) -> Labels | None:
    """Returns the labels from the devkit, which has its own class numbers; their WordNet ids are in its meta.mat."""
    if f"{_DEVKIT}.tar.gz" in tree.files():
        if not isinstance(tree, FolderTree):
            return None
        path = tree.root / f"{_DEVKIT}.tar.gz"
        return lambda: _devkit_labels(_descend(open_archive(path), _DEVKIT, "data"), str(path))
    if _DEVKIT in tree.folders():
        return lambda: _devkit_labels(_descend(tree, _DEVKIT, "data"), f"{tree}/{_DEVKIT}")
    return None


def _devkit_labels(data: Tree | None, where: str) -> dict[str, str]:
    if data is None or not {"meta.mat", _GROUND_TRUTH} <= set(data.files()):
        raise InputError(f"{where} lacks data/meta.mat or data/{_GROUND_TRUTH}; fetch the devkit again")
    truth = data.text(_GROUND_TRUTH).split()
    try:
        wnids = wordnet_ids(data.read("meta.mat"))
        return {f"ILSVRC2012_val_{place:08d}.JPEG": wnids[int(number)] for place, number in enumerate(truth, start=1)}
    except ImportError:
        raise InputError(f"{where} needs scipy to be read; run pip install 'hyperbatch[imagenet]'") from None
    except KeyError as error:
        raise InputError(f"{where} cannot be read: there is no class {error}; fetch the devkit again") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} cannot be read: {error}; fetch the devkit again") from error


def _kaggle(tree: Tree) -> Labels:
    def read() -> dict[str, str]:
        rows = csv.DictReader(io.StringIO(tree.text(_CSV)))
        try:
            # The string begins with the class, and the boxes follow.
            pairs = [(f"{row['ImageId']}.JPEG", row["PredictionString"].split()[0]) for row in rows]
        except (KeyError, AttributeError, IndexError, csv.Error) as error:
            raise InputError(f"{tree}/{_CSV} is not Kaggle's table ({error!r}); fetch it again") from error
        return labels_of(pairs, f"{tree}/{_CSV}")

    return read


def _above(tree: Tree) -> FolderTree | None:
    """Returns the folder of Kaggle's table if --data names ILSVRC, ILSVRC/Data or ILSVRC/Data/CLS-LOC next to it."""
    if not isinstance(tree, FolderTree):
        return None
    root = tree.root.absolute()
    inside = ("ILSVRC", "Data", "CLS-LOC")
    for depth in (1, 2, 3):
        if root.parts[-depth:] == inside[:depth] and (root.parents[depth - 1] / _CSV).is_file():
            return FolderTree(root.parents[depth - 1])
    return None


def _descend(tree: Tree, *names: str) -> Tree | None:
    for name in names:
        if name not in tree.folders():
            return None
        tree = tree.within(name)
    return tree
