"""Reads images as they are stored: files below a folder (DIR/train/CLASS/FILE), or tars with the same paths inside."""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np

from hyperbatch.data.source import BadSample, EncodedSource, Location, max_open_files
from hyperbatch.data.tars import plain_files
from hyperbatch.errors import InputError
from hyperbatch.memory import free_host_memory_bytes

_CHUNK_BYTES = 1 << 20
_MAX_FILE_BYTES = (1 << 31) - 4096  # the most that Linux reads in one call; images that may be decoded are smaller
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".webp", ".tif", ".tiff")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz")


class Listed(NamedTuple):
    """The samples of a split. The paths are relative to the folder or archive, and each ends in a file name."""

    name: str
    classes: tuple[str, ...]
    labels: np.ndarray  # int64[n]
    paths: list[str]


class Tree(Protocol):
    """Where a layout looks for its folders and files: FolderTree, or an archive (layouts/archives.py)."""

    def within(self, folder: str) -> Tree: ...
    def folders(self) -> list[str]: ...
    def files(self) -> list[str]: ...
    def images(self) -> list[str]: ...
    def read(self, path: str) -> bytes: ...
    def text(self, path: str) -> str: ...
    def source(self, listed: Listed) -> EncodedSource: ...


class FolderSource(EncodedSource):
    """Files below a folder. The paths are stored as one fixed-width array instead of one Python object per file.

    Unless a list of samples is given, each subfolder is a class and holds that class's images, at any depth.
    """

    def __init__(self, folder: Path, listed: Listed | None = None) -> None:
        self.folder = folder
        listed = listed or list_classes(FolderTree(folder), folder.name)
        super().__init__(listed.name, listed.classes, listed.labels)
        self._paths = np.array([os.fsencode(path) for path in listed.paths])

    def path(self, index: int) -> Path:
        return self.folder / os.fsdecode(bytes(self._paths[index]))

    def read(self, index: int) -> bytes:
        return bytes(self.read_buffer(index))

    def read_buffer(self, index: int) -> bytearray:
        path = self.locations([index])[0].path
        try:
            # Four system calls; Python's file objects make eight. O_NONBLOCK: a pipe reads as empty and does not block.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                size_bytes = os.fstat(descriptor).st_size
                if size_bytes > _MAX_FILE_BYTES:
                    raise BadSample(f"{path}: {size_bytes:,} bytes are too many for an image")
                data = bytearray(size_bytes)
                del data[os.readv(descriptor, [data]) :]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BadSample(f"{path}: {error.strerror}") from error
        return data

    def locations(self, ids: list[int]) -> list[Location]:
        folder = os.fspath(self.folder)
        return [Location(os.path.join(folder, os.fsdecode(path))) for path in self._paths[ids].tolist()]

    def describe(self, index: int) -> str:
        return str(self.path(index))

    def sample_names(self) -> np.ndarray:
        """The path below the class folder. A path outside of its class's folder comes from a table: relative paths are
        kept, and of absolute ones, which depend on the machine, only the file name."""
        return names_below_classes(
            self, self._paths, lambda path: path.rpartition(b"/")[2] if path[:1] == b"/" else path
        )

    def sizes_bytes(self) -> np.ndarray:
        sizes = np.full(len(self), -1, dtype=np.int64)
        for i in range(len(self)):
            try:
                sizes[i] = os.stat(self.path(i)).st_size
            except FileNotFoundError:  # a dangling link, or the file was removed in the meantime
                pass
            except OSError as error:
                raise InputError(f"{error.filename}: {error.strerror}; repair or remove the file") from error
        return sizes


def names_below_classes(source: EncodedSource, paths: np.ndarray, other: Callable[[bytes], bytes]) -> np.ndarray:
    """Returns bytes[n]: the part of each path below the class folder, which is the same in a folder, an archive and a
    table of the same files. `other` names the samples that are not in a folder of their class."""
    classes, names = [os.fsencode(name) for name in source.classes], []
    for path, label in zip(paths.tolist(), source.labels.tolist(), strict=True):
        _, inside, below = b"/".join((b"", path)).rpartition(b"/%b/" % classes[label])
        names.append(below if inside else other(path))
    return np.array(names)


class FolderTree:
    """Folders and files below a folder, with the interface that `layouts` uses. Archives have the same interface."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def within(self, folder: str) -> FolderTree:
        return FolderTree(self.root / folder)

    def folders(self) -> list[str]:
        """Returns the names of the subfolders, sorted, without hidden ones."""
        return sorted(
            entry.name for entry in _entries(self.root) if _is_folder(entry) and not entry.name.startswith(".")
        )

    def files(self) -> list[str]:
        """Returns the names of regular files and of links to them, sorted, without hidden ones."""
        return sorted(entry.name for entry in _entries(self.root) if _is_file(entry) and not entry.name.startswith("."))

    def images(self) -> list[str]:
        """Returns the paths of the images at any depth, in torchvision's order: by folder, then by name. Hidden files
        and folders are skipped."""
        found = []
        waiting = [("", os.fspath(self.root), frozenset())]
        while waiting:
            below, folder, links = waiting.pop()
            inside = []
            for entry in _entries(Path(folder)):
                if _is_image_file(entry):
                    inside.append(entry.name)
                elif _is_folder(entry) and not entry.name.startswith("."):
                    followed = links
                    if entry.is_symlink():
                        real = os.path.realpath(entry.path)
                        if real in links or f"{os.path.realpath(folder)}/".startswith(f"{real}/"):
                            continue  # following this link would never end
                        followed = links | {real}
                    waiting.append((f"{below}{entry.name}/", entry.path, followed))
            found.append((below, sorted(inside)))
        return [below + name for below, names in sorted(found, key=lambda item: item[0][:-1]) for name in names]

    def read(self, path: str) -> bytes:
        try:
            return (self.root / path).read_bytes()
        except OSError as error:
            raise InputError(f"{self.root / path} cannot be read: {error.strerror}; check its permissions") from error

    def text(self, path: str) -> str:
        return decoded(self.read(path), str(self.root / path))

    def source(self, listed: Listed) -> FolderSource:
        return FolderSource(self.root, listed)


def decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not a text in UTF-8: {error}; fetch or write it again") from error


def list_classes(tree: Tree, name: str) -> Listed:
    """Lists a tree in which each folder is a class and holds that class's images, at any depth, as torchvision's
    ImageFolder does."""
    classes, paths, counts = class_names(tree), [], []
    for folder in classes:
        images = tree.within(folder).images()
        if not images:
            others = tree.within(folder).files()
            kinds = f" ({others[0]} is none of {', '.join(IMAGE_SUFFIXES)})" if others else ""
            raise InputError(f"class folder {tree.within(folder)} has no images{kinds}; add some or remove the folder")
        paths += [f"{folder}/{image}" for image in images]
        counts.append(len(images))
    return Listed(name, classes, np.repeat(np.arange(len(classes)), counts), paths)


def class_names(tree: Tree) -> tuple[str, ...]:
    names = tree.folders()
    if not names:
        raise InputError(f"{tree} has no class folders; expected {tree}/CLASS/IMAGE.jpg")
    return tuple(names)


class Content:
    """The bytes of an archive: a file, or a compressed tar that was unpacked into memory."""

    def __init__(self, path: Path, data: Path | bytes) -> None:
        self.path = path  # path of the archive, for messages
        self._data = data
        self.file = str(data) if isinstance(data, Path) else None  # a file that other processes can read
        self.length = data.stat().st_size if isinstance(data, Path) else len(data)
        self._descriptor = -1

    def open(self) -> None:
        """Opens the file for all later reads. Raises InputError if it cannot be opened."""
        if self.file is not None and self._descriptor < 0:
            try:
                self._descriptor = os.open(self.file, os.O_RDONLY)
            except OSError as error:
                raise InputError(f"{self.path} cannot be read: {error.strerror}; check its permissions") from error

    def close(self) -> None:
        """Closes the file. Each later read opens it again."""
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close

    def read(self, offset: int, length: int) -> bytes:
        if isinstance(self._data, bytes):
            return self._data[offset : offset + length]
        if self._descriptor >= 0:
            return os.pread(self._descriptor, length, offset)
        with open(self._data, "rb") as file:
            return os.pread(file.fileno(), length, offset)


class TarSource(EncodedSource):
    """One split from tars with members SPLIT/CLASS/.../FILE. Compressed tars are unpacked into memory.

    Nothing is extracted to disk, so a member's path is only a label. Symbolic links, devices, and odd and hidden paths
    are skipped.
    """

    def __init__(self, paths: list[Path], split: str) -> None:
        self._paths = paths
        self._contents = [Content(path, _content(path)) for path in paths]
        # (tar, class, file) -> (offset, length). If a tar holds a file twice, the later one counts.
        found: dict[tuple[int, str, str], tuple[int, int]] = {}
        for number, (path, content) in enumerate(zip(paths, self._contents, strict=True)):
            try:
                with open(path, "rb") if content.file else io.BytesIO(content.read(0, content.length)) as tar:
                    for name, offset, length in plain_files(tar):
                        *folders, file = path_parts(name)
                        if len(folders) < 2 or folders[0] != split or not is_image(file):
                            continue
                        if not any(folder.startswith(".") for folder in folders):
                            found[number, folders[1], "/".join([*folders[2:], file])] = offset, length
            except (tarfile.TarError, OSError, ValueError, OverflowError) as error:  # a damaged size can be anything
                raise InputError(f"{path} cannot be read as a tar: {error}; fetch or write it again") from error
        if not found:
            raise InputError(f"{paths[0]} has no members named {split}/CLASS/IMAGE.jpg; write the tar with such names")
        unique, labels = np.unique(np.array([name for _, name, _ in found]), return_inverse=True)
        super().__init__(split, tuple(unique.tolist()), labels.astype(np.int64))
        self._names = np.array([os.fsencode(name) for _, _, name in found])
        self._spans = np.array([(number, *span) for (number, _, _), span in found.items()], dtype=np.int64)
        for content in self._contents[: max_open_files()]:
            content.open()

    def read(self, index: int) -> bytes:
        number, offset, size = (int(v) for v in self._spans[index])
        try:
            data = self._contents[number].read(offset, size)
        except OSError as error:
            raise BadSample(f"{self.describe(index)}: {error.strerror}") from error
        if len(data) != size:
            raise BadSample(f"{self.describe(index)}: the tar ends before the file does")
        return data

    def describe(self, index: int) -> str:
        path = self._paths[self._spans[index, 0]]
        return f"{path}:{self.name}/{self.classes[self.labels[index]]}/{os.fsdecode(bytes(self._names[index]))}"

    def sample_names(self) -> np.ndarray:
        return self._names  # the paths below the class folder

    def sizes_bytes(self) -> np.ndarray:
        return self._spans[:, 2].copy()

    def changed_ns(self) -> np.ndarray:
        times = np.array([path.stat().st_mtime_ns for path in self._paths], dtype=np.int64)
        return np.stack([times[self._spans[:, 0]], self._spans[:, 1]], axis=1)


def tar_paths(folder: Path, names: str | tuple[str, ...]) -> list[Path]:
    """Returns the tars whose names begin with one of these names, sorted."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(names) and path.name.endswith(_TAR_SUFFIXES) and path.is_file()
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Lists a folder without a stat call for every file."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise InputError(f"{folder} cannot be listed: {error.strerror}; check its permissions") from error


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether the entry counts as a file. A dangling link does, so that it is reported. A pipe does not, because
    reading it could block forever."""
    if entry.is_symlink():
        return os.path.isfile(entry.path) or not os.path.exists(entry.path)
    return entry.is_file()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a folder or a link to one. A link that leads to itself is no error."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def path_parts(name: str) -> list[str]:
    """Returns the folders and the file name of an archive member as it would be unpacked: /a//b/./c.jpg is
    a/b/c.jpg."""
    return [part for part in name.split("/") if part not in ("", ".")] or [""]


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def _is_image_file(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is an image file, and not a folder or a pipe. Links count unless they lead to a folder, so a
    dangling link is reported when it is read."""
    if not is_image(entry.name):
        return False
    return not os.path.isdir(entry.path) if entry.is_symlink() else entry.is_file()


def check_readable(path: Path) -> None:
    """Raises InputError if the user may not read the file. Those who read archives take other errors for damage."""
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} cannot be read: {os.strerror(errno.EACCES)}; check its permissions")


def _content(path: Path) -> Path | bytes:
    """Returns the content of a compressed tar, and the path of a plain one."""
    check_readable(path)
    try:
        if path.name.endswith(".xz"):
            with lzma.open(path) as file:
                return read_into_memory(file, path)
        if path.name.endswith("gz"):
            with gzip.open(path) as file:
                return read_into_memory(file, path)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read: {error}; fetch or write it again") from error
    return path


def read_into_memory(file: IO[bytes] | gzip.GzipFile, path: Path) -> bytes:
    """Reads all of a file that decompresses as it is read. Raises InputError if it would take more than half of the
    free memory: a few megabytes can unpack to any number of gigabytes."""
    limit, parts, total = free_host_memory_bytes() // 2, [], 0
    while chunk := file.read(_CHUNK_BYTES):
        parts.append(chunk)
        total += len(chunk)
        if total > limit:
            raise InputError(
                f"{path} unpacks to more than {limit >> 20:,} MiB, half of the free memory; unpack it first"
            )
    return b"".join(parts)
