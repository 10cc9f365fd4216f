"""Images as they come: an ImageFolder tree (DIR/train/CLASS/FILE), or tars with the same paths inside."""

from __future__ import annotations

import gzip
import io
import lzma
import mmap
import os
import tarfile
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from hyperbatch.data.source import BadSample, EncodedSource, Location, check_same_classes
from hyperbatch.data.tars import check_end
from hyperbatch.errors import InputError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".webp", ".tif", ".tiff")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz")


class FolderSource(EncodedSource):
    """One split of a folder tree. File names are one fixed-width array, not a Python object each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        classes = _class_names(folder)
        names, counts = [], []
        for name in classes:
            files = sorted(os.fsencode(entry.name) for entry in _entries(folder / name) if _is_image_file(entry))
            if not files:
                raise InputError(f"class folder {folder / name} has no images; add some or remove the folder")
            names.append(np.array(files))
            counts.append(len(files))
        super().__init__(folder.name, classes, np.repeat(np.arange(len(classes)), counts))
        self._names = np.concatenate(names)

    def path(self, index: int) -> Path:
        return self.folder / self.classes[self.labels[index]] / os.fsdecode(bytes(self._names[index]))

    def read(self, index: int) -> bytes:
        return bytes(self.read_buffer(index))

    def read_buffer(self, index: int) -> bytearray:
        path = self.locations([index])[0].path
        try:
            # Four calls of the system; Python's own file objects make eight. A pipe is empty instead of waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                data = bytearray(os.fstat(descriptor).st_size)
                del data[os.readv(descriptor, [data]) :]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BadSample(f"{path}: {error.strerror}") from error
        return data

    def locations(self, ids: list[int]) -> list[Location]:
        labels, names = self.labels[ids].tolist(), self._names[ids].tolist()
        return [
            Location(f"{self.folder}{os.sep}{self.classes[label]}{os.sep}{os.fsdecode(name)}")
            for label, name in zip(labels, names, strict=True)
        ]

    def describe(self, index: int) -> str:
        return str(self.path(index))

    def sizes_bytes(self) -> np.ndarray:
        sizes = np.full(len(self), -1, dtype=np.int64)
        for i in range(len(self)):
            try:
                sizes[i] = os.stat(self.path(i)).st_size
            except FileNotFoundError:  # a dangling link, or removed by now
                pass
            except OSError as error:
                raise InputError(f"{error.filename}: {error.strerror}; repair or remove the file") from error
        return sizes


class TarSource(EncodedSource):
    """One split from tars with members SPLIT/CLASS/FILE. Plain tars are mapped, compressed ones unpacked into memory.

    Nothing is ever extracted, so a member's path is only a label; links, devices and odd paths are passed over.
    """

    def __init__(self, paths: list[Path], split: str) -> None:
        self._paths = paths
        self._contents = [_tar_content(path) for path in paths]
        classes, names, spans = [], [], []
        for number, (path, content) in enumerate(zip(paths, self._contents, strict=True)):
            try:
                # Every header of the plain tar that the content is; tarfile must not guess at compression again.
                with tarfile.open(fileobj=_file_over(content), mode="r:") as tar:
                    for member in tar:
                        parts = [part for part in member.name.split("/") if part != "."]
                        plain = member.isreg() and not member.issparse() and ".." not in parts
                        if plain and len(parts) == 3 and parts[0] == split and parts[1] and _is_image(parts[2]):
                            classes.append(parts[1])
                            names.append(os.fsencode(parts[2]))
                            spans.append((number, member.offset_data, member.size))
                    check_end(content, tar.offset)
            except (ValueError, OverflowError) as error:  # a map cannot seek behind its end
                raise InputError(f"{path} is cut off or damaged ({error}); fetch or write it again") from error
            except tarfile.TarError as error:
                raise InputError(f"{path} cannot be read as a tar: {error}; fetch or write it again") from error
        if not classes:
            raise InputError(f"{paths[0]} has no members named {split}/CLASS/IMAGE.jpg; write the tar with such names")
        unique, labels = np.unique(np.array(classes), return_inverse=True)
        super().__init__(split, tuple(unique.tolist()), labels.astype(np.int64))
        self._names = np.array(names)
        self._spans = np.array(spans, dtype=np.int64)

    def read(self, index: int) -> bytes:
        number, offset, size = (int(v) for v in self._spans[index])
        data = self._contents[number][offset : offset + size]
        if len(data) != size:
            raise BadSample(f"{self.describe(index)}: the tar ends before the file does")
        return data

    def describe(self, index: int) -> str:
        path = self._paths[self._spans[index, 0]]
        return f"{path}:{self.name}/{self.classes[self.labels[index]]}/{os.fsdecode(bytes(self._names[index]))}"

    def sizes_bytes(self) -> np.ndarray:
        return self._spans[:, 2].copy()

    def changed_ns(self) -> np.ndarray:
        times = np.array([path.stat().st_mtime_ns for path in self._paths], dtype=np.int64)
        return np.stack([times[self._spans[:, 0]], self._spans[:, 1]], axis=1)


def open_folders(folder: Path) -> tuple[FolderSource, FolderSource]:
    """(train, val) of a folder tree."""
    for split in ("train", "val"):
        if not (folder / split).is_dir():
            raise InputError(f"{folder} has no {split}/ folder; expected {folder}/{split}/CLASS/IMAGE.jpg")
    # Compared before files are listed, so that a mismatch is found at once even in a large set.
    check_same_classes(_class_names(folder / "train"), _class_names(folder / "val"), folder)
    return FolderSource(folder / "train"), FolderSource(folder / "val")


def open_tars(folder: Path) -> tuple[TarSource, TarSource]:
    """(train, val) of train*.tar[.gz|.xz] and val*.tar[.gz|.xz]."""
    paths = {split: tar_paths(folder, split) for split in ("train", "val")}
    for split, found in paths.items():
        if not found:
            raise InputError(f"{folder} has no {split}*.tar; expected {split}.tar, .tar.gz or .tar.xz")
    return TarSource(paths["train"], "train"), TarSource(paths["val"], "val")


def tar_paths(folder: Path, split: str) -> list[Path]:
    """The split's tars, in order."""
    return sorted(p for p in folder.glob(f"{split}*") if p.name.endswith(_TAR_SUFFIXES) and p.is_file())


def _class_names(folder: Path) -> tuple[str, ...]:
    names = sorted(entry.name for entry in _entries(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise InputError(f"{folder} has no class folders; expected {folder}/CLASS/IMAGE.jpg")
    return tuple(names)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, without a stat of every file."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise InputError(f"{folder} cannot be listed: {error.strerror}; check its permissions") from error


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def _is_image_file(entry: os.DirEntry[str]) -> bool:
    """Neither a folder nor a pipe. A link counts, wherever it leads, so that one that dangles is reported when read."""
    return _is_image(entry.name) and (entry.is_file(follow_symlinks=False) or entry.is_symlink())


def _tar_content(path: Path) -> bytes | mmap.mmap:
    """The plain tar: mapped from disk, or unpacked once into memory."""
    try:
        if path.name.endswith(".xz"):
            with lzma.open(path) as file:
                return file.read()
        if path.name.endswith("gz"):
            with gzip.open(path) as file:
                return file.read()
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # ValueError: an empty file cannot be mapped.
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}; fetch or write it again") from error


def _file_over(content: bytes | mmap.mmap) -> IO[bytes]:
    if isinstance(content, bytes):
        return io.BytesIO(content)
    content.seek(0)
    return cast(IO[bytes], content)  # a map reads, seeks and tells as a file does
