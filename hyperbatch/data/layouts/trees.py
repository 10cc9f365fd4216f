"""Layouts of folders and files, on disk or in an archive: image folders and Tiny-ImageNet."""

from __future__ import annotations

from hyperbatch.data.folders import Listed, Tree, class_names, is_image, list_classes
from hyperbatch.data.layouts.found import TRAIN, Found, labels_of, numbered, val_name
from hyperbatch.data.source import EncodedSource, check_same_classes
from hyperbatch.errors import InputError

_ANNOTATIONS = "val_annotations.txt"


# --- SPLIT/CLASS/.../IMAGE, as torchvision's ImageFolder reads it


def image_folder(tree: Tree) -> Found | None:
    folders = tree.folders()
    val = val_name(folders, tree)
    if TRAIN not in folders and val is None:
        return None

    def opened(split: str) -> EncodedSource:
        part = tree.within(split)
        # Classes are compared before files are listed, so that a mismatch is found at once even in a large set.
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
            f"{part}/CLASS/, or put ImageNet's LOC_val_solution.csv or its devkit there"
        )


# --- Tiny-ImageNet: train/WNID/images/*.JPEG, val/images/*.JPEG with val/val_annotations.txt, wnids.txt


def tiny_imagenet(tree: Tree) -> Found | None:
    folders = tree.folders()
    has_val = "val" in folders
    annotated = has_val and _ANNOTATIONS in tree.within("val").files()
    if ("wnids.txt" not in tree.files() and not annotated) or (TRAIN not in folders and not has_val):
        return None
    if has_val and tree.within("val").folders() != ["images"]:
        return None  # the validation images were sorted into class folders

    def classes() -> tuple[str, ...]:
        if "wnids.txt" not in tree.files():
            raise InputError(f"{tree} has no wnids.txt, which lists the classes; copy it from tiny-imagenet-200.zip")
        return tuple(sorted(tree.text("wnids.txt").split()))

    def train() -> EncodedSource:
        part = tree.within(TRAIN)
        check_same_classes(class_names(part), classes(), f"{part} and wnids.txt")
        return part.source(list_classes(part, TRAIN))

    def val() -> EncodedSource:
        part = tree.within("val")
        if _ANNOTATIONS not in part.files():
            raise InputError(f"{part} has no {_ANNOTATIONS} beside its images; copy it from tiny-imagenet-200.zip")
        # NAME \t WNID \t the box's four numbers
        lines = [line.split("\t") for line in part.text(_ANNOTATIONS).splitlines() if line.strip()]
        where = f"{part}/{_ANNOTATIONS}"
        labels = labels_of(((fields[0], fields[1]) for fields in lines if len(fields) > 1), where)
        return labelled(part.within("images"), labels, classes(), where)

    return Found(
        kind="Tiny-ImageNet",
        where=str(tree),
        train=train if TRAIN in folders else None,
        val=val if has_val else None,
        expected=lambda split: f"wnids.txt of Tiny-ImageNet, but no {split}/ folder; unpack the whole set",
    )


def labelled(tree: Tree, labels: dict[str, str], classes: tuple[str, ...], where: str) -> EncodedSource:
    """Opens a flat folder of images, in the order of their names, with labels from a table."""
    names = [name for name in tree.files() if is_image(name)]
    for name in names:
        if name not in labels:
            raise InputError(f"{where} has no label for {name}; fetch the set again")
    missing = set(labels) - set(names)
    if missing:
        raise InputError(
            f"{tree} lacks {len(missing)} of the {len(labels)} images in {where}, among them {min(missing)}; "
            "fetch the set again"
        )
    numbers = numbered([labels[name] for name in names], classes, where)
    return tree.source(Listed("val", classes, numbers, names))
