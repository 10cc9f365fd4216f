"""The layouts in which people store their images: a list of functions, tried in order, that recognise a layout by
names.

    path ── recognise ──> Found(kind, train, val) ── open ──> Source with classes, labels and the place of every sample

A layout is recognised from the names of a few folders and files, so this is cheap. All files are listed when a split is
opened. Every source has `read` and, if the samples' bytes are stored unchanged in files, `locations`. Decoding,
packing, caches and reading processes therefore need to know nothing about layouts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hyperbatch.data.folders import FolderTree, TarSource, Tree, is_image, list_classes, tar_paths
from hyperbatch.data.layouts import archives
from hyperbatch.data.layouts.found import TEST, TRAIN, VAL_NAMES, Found, check_all_parts, files_by_split, val_name
from hyperbatch.data.layouts.imagenet import imagenet_tars, imagenet_tree
from hyperbatch.data.layouts.parquet import parquet
from hyperbatch.data.layouts.tables import SUFFIXES as TABLES
from hyperbatch.data.layouts.tables import only_table, split_table, table_file, tables
from hyperbatch.data.layouts.trees import image_folder, tiny_imagenet
from hyperbatch.data.layouts.webdataset import webdataset
from hyperbatch.data.remote.store import Address
from hyperbatch.data.shards import ShardSource, holds_packed, read_manifest
from hyperbatch.data.source import ArraySource, EncodedSource, check_same_classes
from hyperbatch.errors import InputError

PACKED = "shards"  # the kind of a packed set, whose splits share one list of classes
_SPLITS = (TRAIN, *VAL_NAMES, TEST)
_MAX_INNER = 32  # the most subfolders that are searched for a set


def open_both(found: Found) -> tuple[ArraySource | EncodedSource, ArraySource | EncodedSource]:
    """Opens both splits and returns (train, val)."""
    train, val = found.open("train"), found.open("val")
    check_same_classes(train.classes, val.classes, found.where)
    return train, val


def open_one(found: Found, split: str) -> ArraySource | EncodedSource:
    """Opens "train" or "val" alone. The other split may be missing; if it exists, both must have the same classes."""
    if found.kind == PACKED or found.train is None or found.val is None:
        return found.open(split)
    train, val = open_both(found)
    return train if split == TRAIN else val


def recognise(path: Path | Address) -> Found:
    """Returns the data set that the folder, file or address holds. Raises InputError if there is none, or several."""
    if isinstance(path, Address):
        return _at_address(path)
    # A pipe is neither a folder nor a file, so no layout opens it, which could block forever.
    for layout in _OF_FOLDERS if path.is_dir() else _OF_FILES if path.is_file() else ():
        found = layout(path)
        if found is not None:
            return found
    if not path.is_dir():
        kinds = ", ".join((*archives.SUFFIXES, *TABLES))
        raise InputError(f"{path} is neither a folder nor a supported file ({kinds}); see docs/data.md")
    tree = FolderTree(path)
    if any(is_image(name) for folder in tree.folders()[:_MAX_INNER] for name in tree.within(folder).files()):
        above, name = path.absolute().parent, path.absolute().name
        if name in _SPLITS and sum((above / name).is_dir() for name in _SPLITS) > 1:
            raise InputError(f"{path} is only one split of the data set; use --data {above}")
        raise InputError(
            f"{path} has class folders but no train/ and val/ folders; move each CLASS/ to {path}/train/CLASS/, and "
            f"about a fifth of its images to {path}/val/CLASS/"
        )
    raise InputError(
        f"{path} has no train/ and val/ folders, no train*.tar and val*.tar, no packed shards, and nothing else that "
        "docs/data.md lists; use the folder of the data set"
    )


def _at_address(address: Address) -> Found:
    """Recognises a set at an address. Packed shards are read remotely; a set in archives is fetched first."""
    from hyperbatch.data.remote.source import fetched, open_packed

    packed = open_packed(address)
    if packed is None:
        return recognise(fetched(address))
    return Found(
        kind=PACKED,
        where=address.url,
        train=(lambda: packed.open("train")) if "train" in packed.manifest.splits else None,
        val=(lambda: packed.open("val")) if "val" in packed.manifest.splits else None,
        expected=lambda split: f"no {split} split; add it where the set was packed",
    )


def _packed(folder: Path) -> Found | None:
    # An interrupted pack has no manifest yet. Without this check, its shards would be read as a smaller WebDataset.
    if not holds_packed(folder):
        return None
    manifest = read_manifest(folder)
    return Found(
        kind=PACKED,
        where=str(folder),
        train=(lambda: ShardSource(folder, "train", manifest)) if "train" in manifest.splits else None,
        val=(lambda: ShardSource(folder, "val", manifest)) if "val" in manifest.splits else None,
        expected=lambda split: f"no {split} split; add it with `hyperbatch data pack SRC {folder} --split {split}`",
    )


def _image_tree(tree: Tree) -> Found | None:
    """Recognises a tree of folders and files, on disk or in an archive."""
    return imagenet_tree(tree) or tiny_imagenet(tree) or image_folder(tree)


def _folder_tree(folder: Path) -> Found | None:
    """Recognises a tree of class folders. A split without class folders, or with a table of labels, is left to the
    other layouts: it may hold shards."""
    tree = FolderTree(folder)
    folders = tree.folders()
    split = TRAIN if TRAIN in folders else val_name(folders, folder)
    if split is not None:
        part = tree.within(split)
        if not part.folders() or any(name.startswith("metadata.") and name.endswith(TABLES) for name in part.files()):
            return None
    return _image_tree(tree)


def _any_folder_tree(folder: Path) -> Found | None:
    """Recognises a tree that no other layout recognised, such as flat train/ and val/ folders. Without a table of their
    labels, opening it reports what is missing."""
    found = _image_tree(FolderTree(folder))
    return found and (split_table(folder) or found)


def _tars(folder: Path) -> Found | None:
    """SPLIT*.tar with members SPLIT/CLASS/.../FILE."""
    files: dict[str, list[Path]] = {}
    for path in tar_paths(folder, _SPLITS):
        files.setdefault(max((name for name in _SPLITS if path.name.startswith(name)), key=len), []).append(path)
    val = val_name(files, folder)
    if TRAIN not in files and val is None:
        return None
    return Found(
        kind="tars",
        where=str(folder),
        train=(lambda: TarSource(check_all_parts(files[TRAIN]), TRAIN)) if TRAIN in files else None,
        val=(lambda: TarSource(check_all_parts(files[val]), val)) if val is not None else None,
        expected=lambda split: f"no {split}*.tar; expected {split}.tar, .tar.gz or .tar.xz",
    )


def _cifar(path: Path) -> Found | None:
    """CIFAR-10 or -100 as published: the archive, or its unpacked files."""
    from hyperbatch.data.cifar import open_cifar, recognised_cifar

    cifar = recognised_cifar(path)
    if cifar is None:
        return None
    opened = functools.cache(lambda: open_cifar(cifar, path))
    return Found(
        kind=cifar.title,
        where=str(path),
        train=lambda: opened()[0],
        val=lambda: opened()[1],
        expected=lambda split: f"no {split} images; fetch the set again",
    )


def _archive(path: Path) -> Found | None:
    """A whole set in one tar or zip, possibly inside a top folder."""
    if not path.name.endswith(archives.SUFFIXES):
        return None
    tree = archives.open_archive(path)
    form = "zip" if path.name.endswith(".zip") else "tar"
    found = _image_tree(tree)
    while found is None and len(tree.folders()) == 1:
        tree = tree.within(tree.folders()[0])
        found = _image_tree(tree)
    if found is None:
        raise InputError(f"{path} has no train/ and val/ folders inside; give --data a {form} that holds them")
    return replace(found, kind=f"{found.kind} in a {form}")


def _zips(folder: Path) -> Found | None:
    """A zip for each split, with class folders inside."""
    files = files_by_split(folder, (".zip",))
    val = val_name(files, folder)
    if TRAIN not in files and val is None:
        return None

    def opened(split: str) -> EncodedSource:
        if len(files[split]) > 1:
            named = " and ".join(path.name for path in files[split])
            raise InputError(f"{folder} has several zips of the {split} set: {named}; keep one of them")
        tree = archives.open_archive(files[split][0])
        # SPLIT/CLASS/IMAGE and TOP/CLASS/IMAGE are accepted as well as CLASS/IMAGE.
        while len(names := tree.folders()) == 1 and tree.within(names[0]).folders():
            tree = tree.within(names[0])
        return tree.source(list_classes(tree, split))

    return Found(
        kind="zips",
        where=str(folder),
        train=(lambda: opened(TRAIN)) if TRAIN in files else None,
        val=(lambda: opened(val)) if val is not None else None,
        expected=lambda split: f"no zip of the {split} set; expected {split}.zip",
    )


def _is_class_folder(tree: FolderTree) -> bool:
    """Whether the folder holds images and nothing else."""
    files = tree.files()
    return bool(files) and all(map(is_image, files)) and not tree.folders()


def _further_down(folder: Path) -> Found | None:
    """Recognises the only set that the folder holds, in a subfolder or an archive."""
    tree = FolderTree(folder)
    names = [name for name in tree.folders() if name not in (*_SPLITS, "lost+found")]
    # A larger number of folders are class folders, and listing them would be wasted time.
    names = [name for name in names if not _is_class_folder(tree.within(name))] if len(names) <= _MAX_INNER else []

    def only(layouts: tuple[Layout, ...]) -> Found | None:
        answers = ((layout(folder / name) for layout in layouts) for name in names)
        inner = [found for each in answers if (found := next(filter(None, each), None)) is not None]
        if len(inner) > 1:
            named = ", ".join(found.where for found in inner)
            raise InputError(f"{folder} holds several data sets: {named}; give --data one of them")
        return inner[0] if inner else None

    # A set that was made from an image folder, such as packed shards, may lie next to it, so folders are tried first.
    # Flat folders, which `_any_folder_tree` would recognise without their labels, may have a table here.
    if found := only((_folder_tree,)) or only(_WITH_LABELS) or split_table(folder) or only((_any_folder_tree,)):
        return found
    files = [folder / name for name in tree.files() if name.endswith(archives.SUFFIXES)]
    if len(files) > 1:
        named = ", ".join(path.name for path in files)
        raise InputError(f"{folder} holds several archives: {named}; give --data one of them, or unpack them")
    return recognise(files[0]) if files else None


Layout = Callable[[Path], Found | None]
_WITH_LABELS: tuple[Layout, ...] = (
    _packed,
    _cifar,
    _folder_tree,
    imagenet_tars,
    webdataset,
    _tars,
    _zips,
    tables,
    parquet,
)
_OF_FOLDERS: tuple[Layout, ...] = (*_WITH_LABELS, _any_folder_tree, _further_down, only_table)
_OF_FILES: tuple[Layout, ...] = (_cifar, _archive, table_file)
