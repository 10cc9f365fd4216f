"""Layouts of folders and files, on disk or in an archive: image folders, Tiny-ImageNet, and ImageNet from Kaggle."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from hyperbatch.data.folders import FolderTree, Listed, Tree, class_names, is_image, list_classes
from hyperbatch.data.layouts.found import TEST, TRAIN, VAL_NAMES, Found, numbered, val_name
from hyperbatch.data.source import EncodedSource, check_same_classes
from hyperbatch.errors import InputError

_KAGGLE_LABELS = "LOC_val_solution.csv"
_ANNOTATIONS = "val_annotations.txt"


def image_tree(tree: Tree) -> Found | None:
    """Whichever of the layouts below the tree holds."""
    return _kaggle(tree) or _tiny_imagenet(tree) or _image_folder(tree)


# --- SPLIT/CLASS/.../IMAGE, as torchvision's ImageFolder reads it


def _image_folder(tree: Tree) -> Found | None:
    folders = tree.folders()
    val = val_name(folders, tree)
    if TRAIN not in folders and val is None:
        return None

    def opened(split: str) -> EncodedSource:
        part = tree.within(split)
        # Compared before files are listed, so that a mismatch is found at once even in a large set.
        if TRAIN in folders and val is not None:
            for name in (TRAIN, val):
                _refuse_flat(tree.within(name))
            check_same_classes(class_names(tree.within(TRAIN)), class_names(tree.within(val)), str(tree))
        _refuse_flat(part)
        return part.source(list_classes(part, split))

    return Found(
        kind="folder",
        where=str(tree),
        train=(lambda: opened(TRAIN)) if TRAIN in folders else None,
        val=(lambda: opened(val)) if val is not None else None,
        expected=lambda split: f"no {split}/ folder; expected {tree}/{split}/CLASS/IMAGE.jpg",
    )


def _refuse_flat(part: Tree) -> None:
    if not part.folders() and any(map(is_image, part.files())):
        raise InputError(
            f"{part} holds images but no class folders, and no labels are beside it; sort the images into "
            f"{part}/CLASS/, or add ImageNet's {_KAGGLE_LABELS}"
        )


# --- Tiny-ImageNet: train/WNID/images/*.JPEG, val/images/*.JPEG with val/val_annotations.txt, wnids.txt


def _tiny_imagenet(tree: Tree) -> Found | None:
    folders = tree.folders()
    if "wnids.txt" not in tree.files() or (TRAIN not in folders and "val" not in folders):
        return None
    has_val = "val" in folders
    if has_val and tree.within("val").folders() != ["images"]:
        return None  # somebody sorted the validation images into classes
    classes = tuple(sorted(tree.text("wnids.txt").split()))

    def train() -> EncodedSource:
        part = tree.within(TRAIN)
        check_same_classes(class_names(part), classes, f"{part} and wnids.txt")
        return part.source(list_classes(part, TRAIN))

    def val() -> EncodedSource:
        part = tree.within("val")
        if _ANNOTATIONS not in part.files():
            raise InputError(f"{part} has no {_ANNOTATIONS} beside its images; copy it from tiny-imagenet-200.zip")
        # NAME \t WNID \t the box's four numbers
        lines = [line.split("\t") for line in part.text(_ANNOTATIONS).splitlines() if line.strip()]
        labels = {fields[0]: fields[1] for fields in lines if len(fields) > 1}
        return _labelled(part, "images", labels, classes, f"{part}/{_ANNOTATIONS}")

    return Found(
        kind="Tiny-ImageNet",
        where=str(tree),
        train=train if TRAIN in folders else None,
        val=val if has_val else None,
        expected=lambda split: f"wnids.txt of Tiny-ImageNet, but no {split}/ folder; unpack the whole set",
    )


# --- ImageNet from Kaggle: ILSVRC/Data/CLS-LOC/{train/WNID,val}/*.JPEG with LOC_val_solution.csv


def _kaggle(tree: Tree) -> Found | None:
    labels_of = tree if _KAGGLE_LABELS in tree.files() else _above(tree)
    images = _descend(tree, "ILSVRC", "Data", "CLS-LOC") or _descend(tree, "Data", "CLS-LOC")
    if images is None:
        flat_val = "val" in tree.folders() and not tree.within("val").folders()
        if labels_of is None or not flat_val:
            return None
        images = tree
    folders = images.folders()
    if "val" in folders and images.within("val").folders():
        return _image_folder(images)  # somebody sorted the validation images into classes

    def train() -> EncodedSource:
        part = images.within(TRAIN)
        return part.source(list_classes(part, TRAIN))

    def val() -> EncodedSource:
        part = images.within("val")
        if labels_of is None:
            raise InputError(f"{tree} has no {_KAGGLE_LABELS}, which labels the images of {part}; copy it there")
        where = f"{labels_of}/{_KAGGLE_LABELS}"
        rows = csv.reader(io.StringIO(labels_of.text(_KAGGLE_LABELS)))
        # ImageId,PredictionString: the string begins with the class; its boxes follow.
        labels = {row[0]: row[1].split()[0] for row in rows if len(row) > 1 and row[1].strip()}
        labels.pop("ImageId", None)
        if TRAIN in folders:
            classes = class_names(images.within(TRAIN))
        else:
            classes = tuple(sorted(set(labels.values())))
        return _labelled(part, "", {f"{name}.JPEG": label for name, label in labels.items()}, classes, where)

    return Found(
        kind="ImageNet from Kaggle",
        where=str(images),
        train=train if TRAIN in folders else None,
        val=val if "val" in folders else None,
        expected=lambda split: f"no {split}/ folder; expected {images}/{split} as Kaggle's archive has it",
    )


def _above(tree: Tree) -> FolderTree | None:
    """The folder of Kaggle's csv, if --data names one of the three folders inside it."""
    if not isinstance(tree, FolderTree):
        return None
    root = tree.root.absolute()
    inside = ("ILSVRC", "Data", "CLS-LOC")
    for depth in (1, 2, 3):
        if root.parts[-depth:] == inside[:depth] and (root.parents[depth - 1] / _KAGGLE_LABELS).is_file():
            return FolderTree(root.parents[depth - 1])
    return None


def _descend(tree: Tree, *names: str) -> Tree | None:
    for name in names:
        if name not in tree.folders():
            return None
        tree = tree.within(name)
    return tree


def _labelled(part: Tree, folder: str, labels: dict[str, str], classes: tuple[str, ...], where: str) -> EncodedSource:
    """A flat folder of images, in the order of their names, with the labels of a table."""
    inner = part.within(folder) if folder else part
    names = [name for name in inner.files() if is_image(name)]
    for name in names:
        if name not in labels:
            raise InputError(f"{where} has no label for {name}; fetch the set again")
    missing = set(labels) - set(names)
    if missing:
        raise InputError(
            f"{inner} lacks {len(missing)} of the {len(labels)} images in {where}, among them {min(missing)}; "
            "fetch the set again"
        )
    numbers = numbered([labels[name] for name in names], classes, where)
    return inner.source(Listed("val", classes, numbers, names))


def nested_sets(folder: Path) -> list[Found]:
    """The sets that lie one folder further down, as most archives unpack."""
    tree = FolderTree(folder)
    splits = (TRAIN, *VAL_NAMES, TEST)
    inner = [image_tree(tree.within(name)) for name in tree.folders() if name not in splits]
    return [found for found in inner if found is not None]
