"""Tars and zips as trees of folders and files, and the source that reads their members in place.

Nothing is extracted to disk, so a member's path is only a name. Symbolic links, devices and odd paths are skipped.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from hyperbatch.data import kept
from hyperbatch.data.folders import (
    Content,
    Listed,
    check_readable,
    decoded,
    is_image,
    names_below_classes,
    path_parts,
    read_into_memory,
)
from hyperbatch.data.source import BadSample, EncodedSource, Location, max_open_files
from hyperbatch.data.tars import plain_files
from hyperbatch.errors import InputError

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz")
SUFFIXES = (*TAR_SUFFIXES, ".zip")
_CHUNK_BYTES = 1 << 20
_HEADER_MAGIC, _HEADER_BYTES = b"PK\3\4", 30  # header of a zip's member, without its name
_TRAILER_BYTES = 24  # the most bytes that may follow a member's data
_MOST_INFLATED = 1032  # the largest compression ratio of deflate
_UTF8 = 0x800  # the flag of a zip's member that says that its name is in UTF-8
_WINDOWS, _UNIX = 0, 3  # the system that made the zip
_UNIX_MODE = 16  # place of a file's mode in the attributes that Unix writes
_ZIP_COLUMNS = {"size", "crc32", "deflated"}  # columns of MEMBER that only zips have

MEMBER = np.dtype(
    [
        ("file", "<i4"),  # which of the source's files
        ("offset", "<i8"),
        ("length", "<i8"),  # stored (compressed) size
        ("size", "<i8"),  # uncompressed size
        ("crc32", "<i8"),  # -1: unknown
        ("deflated", "?"),
    ]
)


class MemberSource(EncodedSource):
    """Samples in a few large files; each sample is read at its offset."""

    def __init__(self, listed: Listed, contents: list[Content], rows: np.ndarray) -> None:
        super().__init__(listed.name, listed.classes, listed.labels)
        self._paths = np.array([os.fsencode(path) for path in listed.paths])
        self._contents = contents
        self._rows = rows
        self._lies_in_files = all(content.file is not None for content in contents) and not rows["deflated"].any()
        for content in contents[: max_open_files()]:
            content.open()

    def read(self, index: int) -> bytes:
        row = self._rows[index]
        try:
            return read_member(self._contents[row["file"]], row)
        except (OSError, ValueError) as error:
            raise BadSample(f"{self.describe(index)}: {error}") from error

    def locations(self, ids: list[int]) -> list[Location] | None:
        if not self._lies_in_files:
            return None
        rows = self._rows[ids]
        columns = [rows[name].tolist() for name in ("file", "offset", "length", "crc32")]
        return [Location(cast(str, self._contents[number].file), *rest) for number, *rest in zip(*columns, strict=True)]

    def describe(self, index: int) -> str:
        content = self._contents[self._rows["file"][index]]
        return f"{content.path}:{os.fsdecode(bytes(self._paths[index]))}"

    def sizes_bytes(self) -> np.ndarray:
        return self._rows["size"].astype(np.int64)

    def changed_ns(self) -> np.ndarray:
        """Returns checksums if they are known, otherwise the times of the archives (the file that is read may be an
        unpacked copy), and the offsets."""
        times = np.array([content.path.stat().st_mtime_ns for content in self._contents], dtype=np.int64)
        checksums = self._rows["crc32"]
        states = np.where(checksums < 0, times[self._rows["file"]], checksums)
        return np.stack([states, self._rows["offset"]], axis=1)

    def sample_names(self) -> np.ndarray:
        """The same names as for files in a folder, so that a set may be archived or unpacked in the middle of a run."""
        return names_below_classes(self, self._paths, lambda path: path.rpartition(b"/")[2])


def read_member(content: Content, row: np.ndarray) -> bytes:
    """Reads and unpacks a member. Raises ValueError if its bytes are damaged."""
    _, offset, length, size, crc32, deflated = row.item()
    data = content.read(offset, length)
    if len(data) != length:
        raise ValueError("the archive ends before the file does")
    if deflated:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
        except zlib.error as error:
            raise ValueError(f"cannot be unpacked: {error}") from error
        if len(data) != size:
            raise ValueError("unpacks to another size than the archive says")
    if crc32 >= 0 and zlib.crc32(data) != crc32:
        raise ValueError("the bytes do not match the archive's checksum")
    return data


class _Folder(NamedTuple):
    folders: dict[str, _Folder]
    files: dict[str, int]  # name -> row


def _is_shown(folder: str) -> bool:
    """Whether a folder is used. Hidden folders are skipped, and so is the folder that macOS adds to its archives."""
    return not folder.startswith(".") and folder != "__MACOSX"


class ArchiveTree:
    """An archive's folders and files, with the interface of FolderTree."""

    def __init__(
        self,
        content: Content,
        rows: np.ndarray,
        top: _Folder,
        inside: str = "",
    ) -> None:
        self._content = content
        self._rows = rows
        self._top = top
        self._inside = inside

    def __str__(self) -> str:
        return f"{self._content.path}:{self._inside}" if self._inside else str(self._content.path)

    def within(self, folder: str) -> ArchiveTree:
        top = self._top
        for name in folder.split("/"):
            top = top.folders[name]
        inside = f"{self._inside}/{folder}" if self._inside else folder
        return ArchiveTree(self._content, self._rows, top, inside)

    def folders(self) -> list[str]:
        return sorted(filter(_is_shown, self._top.folders))

    def files(self) -> list[str]:
        return sorted(name for name in self._top.files if not name.startswith("."))

    def images(self) -> list[str]:
        found = []
        waiting = [("", self._top)]
        while waiting:
            below, folder = waiting.pop()
            waiting += [(f"{below}{name}/", inner) for name, inner in folder.folders.items() if _is_shown(name)]
            found += [(below, name) for name in folder.files if is_image(name)]
        return [below + name for below, name in sorted(found, key=lambda item: (item[0][:-1], item[1]))]

    def read(self, path: str) -> bytes:
        try:
            return read_member(self._content, self._selected([path])[0])
        except (OSError, ValueError) as error:
            raise InputError(f"{self}/{path} cannot be read: {error}; fetch or write it again") from error

    def text(self, path: str) -> str:
        return decoded(self.read(path), f"{self}/{path}")

    def source(self, listed: Listed) -> MemberSource:
        prefix = f"{self._inside}/" if self._inside else ""
        rows = self._selected(listed.paths)
        return MemberSource(listed._replace(paths=[prefix + path for path in listed.paths]), [self._content], rows)

    def _selected(self, paths: list[str]) -> np.ndarray:
        numbers = []
        for path in paths:
            *folders, name = path.split("/")
            top = self._top
            for folder in folders:
                top = top.folders[folder]
            numbers.append(top.files[name])
        return self._rows[numbers]


def open_archive(path: Path) -> ArchiveTree:
    """Opens a tar or zip. Raises InputError if it cannot be read in the format that its name says."""
    if path.name.endswith(".zip"):
        check_readable(path)
        content = Content(path, path)
        index = kept.indexed(path, "members of a zip", lambda: _zip_members(content))
    else:
        content = tar_content(path)
        index = kept.indexed(path, "files", lambda: _arrays_of(tar_members(whole(content), str(path))))
    names, rows = [os.fsdecode(name) for name in index["names"].tolist()], plain_rows(index["spans"])
    for column in _ZIP_COLUMNS & set(index):
        rows[column] = index[column]
    top = _Folder({}, {})
    for row, name in enumerate(names):
        parts = path_parts(name)
        if ".." in parts or name.endswith("/"):  # a zip also lists its folders
            continue
        folder = top
        for part in parts[:-1]:
            folder = folder.folders.setdefault(part, _Folder({}, {}))
        folder.files[parts[-1]] = row
    return ArchiveTree(content, rows, top)


# --- tars


def tar_content(path: Path) -> Content:
    """Returns the uncompressed tar. A compressed tar is unpacked once into the cache folder, or, if it is small, into
    memory each time."""

    def unpacked() -> IO[bytes]:
        return cast(IO[bytes], lzma.open(path) if path.name.endswith(".xz") else gzip.open(path))

    def write(file: IO[bytes]) -> None:
        with unpacked() as archive:
            while chunk := archive.read(_CHUNK_BYTES):
                file.write(chunk)

    check_readable(path)
    try:
        if path.name.endswith(".tar"):
            return Content(path, path)
        if path.stat().st_size >= kept.WORTH_KEEPING_BYTES:
            plain = kept.made_once(f"unpacked-{kept.state_of([path])[:16]}.tar", write)
            if plain is not None:
                return Content(path, plain)
        with unpacked() as archive:
            return Content(path, read_into_memory(archive, path))
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read: {error}; fetch or write it again") from error


class Window:
    """A part of a content as a file for tarfile. It never reads beyond its end, even if a damaged header has a huge
    size."""

    def __init__(self, content: Content, start: int, length: int) -> None:
        self._content, self._start, self.length, self._place = content, start, length, 0

    def read(self, size: int = -1) -> bytes:
        size = min(self.length - self._place if size < 0 else size, max(0, self.length - self._place))
        data = self._content.read(self._start + self._place, size)
        self._place += len(data)
        return data

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self._place = place + (0, self._place, self.length)[whence]
        return self._place

    def tell(self) -> int:
        return self._place


def whole(content: Content) -> Window:
    content.open()
    return Window(content, 0, content.length)


def tar_members(window: Window, where: str) -> Iterator[tuple[str, int, int]]:
    """Yields `plain_files`. Raises InputError if the tar is truncated, damaged, or has data after its end."""
    try:
        yield from plain_files(cast(IO[bytes], window))
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} cannot be read as a tar: {error}; fetch or write it again") from error


def _arrays_of(members: Iterator[tuple[str, int, int]]) -> dict[str, np.ndarray]:
    found = list(members)
    spans = np.array([span for _, *span in found], dtype=np.int64).reshape(-1, 2)
    return {"names": np.array([os.fsencode(name) for name, *_ in found]), "spans": spans}


def plain_rows(spans: np.ndarray, file: int = 0) -> np.ndarray:
    """Returns MEMBER rows for spans of (offset, length) that are not compressed."""
    rows = np.zeros(len(spans), dtype=MEMBER)
    rows["file"], rows["offset"], rows["length"], rows["size"], rows["crc32"] = (
        file,
        spans[:, 0],
        *[spans[:, 1]] * 2,
        -1,
    )
    return rows


# --- zips


def _zip_members(content: Content) -> kept.Arrays:
    """Reads a zip's members from the list at its end, and the start of each member's bytes from the member's own
    header."""
    path = content.path
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, struct.error) as error:
        raise InputError(f"{path} cannot be read as a zip: {error}; fetch or write it again") from error
    for member in members:
        if member.flag_bits & 1:
            raise InputError(f"{path}: {member.filename!r} is encrypted; write the zip without a password")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(f"{path}: {member.filename!r} is compressed with an unsupported method; use deflate")
        stored_bytes = member.compress_size
        if member.header_offset + stored_bytes > content.length or member.file_size > _MOST_INFLATED * stored_bytes:
            raise InputError(
                f"{path} cannot be read as a zip: the size or place of {member.filename!r} is impossible; "
                "fetch or write it again"
            )
    stored = [member.orig_filename.encode("utf-8" if member.flag_bits & _UTF8 else "cp437") for member in members]
    places = _behind_headers(content, stored, members)
    spans = [(place, member.compress_size) for place, member in zip(places, members, strict=True)]
    is_file = np.array([not stat.S_ISLNK(member.external_attr >> _UNIX_MODE) for member in members], dtype=bool)
    columns = {
        "names": np.array([os.fsencode(_zip_name(*both)) for both in zip(members, stored, strict=True)], dtype=bytes),
        "spans": np.array(spans, dtype=np.int64).reshape(-1, 2),
        "size": np.array([member.file_size for member in members], dtype=np.int64),
        "crc32": np.array([member.CRC for member in members], dtype=np.int64),
        "deflated": np.array([member.compress_type == zipfile.ZIP_DEFLATED for member in members], dtype=bool),
    }
    return {name: column[is_file] for name, column in columns.items()}


def _zip_name(member: zipfile.ZipInfo, stored: bytes) -> str:
    """Returns the member's name as unzip reads it. Finder and zip write UTF-8 without setting the flag, zip writes the
    bytes of any other name on Unix, and old Windows programs write backslashes."""
    name = member.filename
    if not member.flag_bits & _UTF8:
        with contextlib.suppress(UnicodeDecodeError):
            name = stored.decode(errors="surrogateescape" if member.create_system == _UNIX else "strict")
    return name.replace("\\", "/") if member.create_system == _WINDOWS else name


def _behind_headers(content: Content, names: list[bytes], members: list[zipfile.ZipInfo]) -> list[int]:
    """Returns where each member's bytes begin, which only the member's own header says. The header repeats the name,
    which contains the class. Comparing the two detects damaged names, even one that no longer looks like an image's."""
    content.open()
    starts, places = [member.header_offset for member in members], []
    for name, offset in zip(names, starts, strict=True):
        header = content.read(offset, _HEADER_BYTES + len(name)) if offset >= 0 else b""
        name_bytes, extra_bytes = struct.unpack("<26xHH", header[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"))
        if header[:4] != _HEADER_MAGIC or name_bytes != len(name) or header[_HEADER_BYTES:] != name:
            told = repr(name.decode(errors="replace"))
            raise InputError(f"{content.path} cannot be read as a zip: the header of {told} is damaged; fetch it again")
        places.append(offset + _HEADER_BYTES + name_bytes + extra_bytes)
    ends = [place + member.compress_size for place, member in zip(places, members, strict=True)]
    # Look for members that are missing from the list at the end of the zip. A self-extracting zip has a program before
    # its first member.
    for end, start in zip([0, *sorted(ends)], [*sorted(starts), content.length], strict=True):
        if start - end >= _HEADER_BYTES and _HEADER_MAGIC in content.read(end, _TRAILER_BYTES + 4):
            raise InputError(
                f"{content.path} has members that it does not list, so it is damaged or several zips were "
                "concatenated; fetch or write it again"
            )
    return places
