"""`hyperbatch data verify`: reads every sample of a packed set and compares tar, index, labels and manifest.

If the set is at an address, each shard is fetched, checked and deleted again.
"""

from __future__ import annotations

import mmap
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hyperbatch.data import kept
from hyperbatch.data.recompress import header_size
from hyperbatch.data.remote.source import RemoteShards, open_packed
from hyperbatch.data.remote.store import Address, Missing, is_address
from hyperbatch.data.shard_writer import Progress
from hyperbatch.data.shards import BLOCK_BYTES, MANIFEST, Manifest, Shard, read_index, read_manifest, read_names
from hyperbatch.data.source import BadSample
from hyperbatch.data.tars import check_end
from hyperbatch.errors import InputError

_MAX_PROBLEMS = 100  # problems that are listed; all are counted
_FETCHED_AT_ONCE = 2  # shards of a remote set that are fetched at the same time

_NO_SAMPLES = np.zeros(0, [("length", np.int64)])  # the index of a shard that cannot be read

Checked = tuple[list[str], np.ndarray]  # one line per problem of a shard, and its index


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    ok: bool
    samples: int
    bytes: int
    problem_count: int
    problems: list[str]  # the first _MAX_PROBLEMS
    notes: list[str]  # say what could not be checked
    to_dict = asdict


def verify(folder: str | Path, *, decode: bool = False, progress: Progress | None = None) -> VerifyReport:
    """Reads every sample, in a folder or at an address: tar structure, index, labels, checksums, image header.

    decode: also decodes every image, which finds damage that existed before the set was packed.
    """
    manifest, check, threads = _opened(folder)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    total = sum(shard.samples for shard in shards)
    problems: list[str] = []
    samples = size_bytes = 0
    if progress:
        progress(0, total)
    with ThreadPoolExecutor(threads) as pool:
        for found, index in pool.map(partial(check, classes=len(manifest.classes), decode=decode), shards):
            problems += found
            samples += len(index)
            size_bytes += int(index["length"].sum())
            if progress:
                progress(samples, total)
    notes = []
    if manifest.schema == 1:
        notes.append(
            "this set was packed before manifest and index had checksums: its labels could only be compared with "
            "those in the shards, and its class names not at all; pack it again to protect them"
        )
    return VerifyReport(
        ok=not problems,
        samples=samples,
        bytes=size_bytes,
        problem_count=len(problems),
        problems=problems[:_MAX_PROBLEMS],
        notes=notes,
    )


def _opened(place: str | Path) -> tuple[Manifest, Callable[..., Checked], int | None]:
    """Returns (manifest, the function that checks a shard, the number of threads)."""
    if not is_address(place):
        return read_manifest(Path(place)), partial(_verify_shard, Path(place)), None
    packed = open_packed(Address(str(place), 0))
    if packed is None:
        raise InputError(f"{place} holds no packed set ({MANIFEST} is missing); check the address")
    return packed.manifest, partial(_verify_fetched, packed, str(place).rstrip("/")), _FETCHED_AT_ONCE


def _verify_fetched(packed: RemoteShards, url: str, shard: Shard, *, classes: int, decode: bool) -> Checked:
    cache = kept.cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="verify-", dir=cache) as folder:
            packed.fetch_shard(shard, Path(folder))
            problems, index = _verify_shard(Path(folder), shard, classes=classes, decode=decode)
            return [line.replace(folder, url) for line in problems], index
    except Missing as error:
        return [str(error)], _NO_SAMPLES
    except OSError as error:
        raise InputError(
            f"{cache} cannot be written: {error.strerror}; set XDG_CACHE_HOME to another folder"
        ) from error


def _verify_shard(folder: Path, shard: Shard, *, classes: int, decode: bool) -> Checked:
    path = folder / shard.name
    try:
        index = read_index(path, shard.samples, shard.index_crc32)
        if shard.names_crc32 is not None:
            read_names(path, shard.samples, shard.names_crc32)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _compare(path, content, index, classes, decode), index
    except InputError as error:
        return [str(error)], _NO_SAMPLES
    except (OSError, ValueError) as error:
        return [f"{path}: {error}"], _NO_SAMPLES


def _compare(path: Path, content: mmap.mmap, index: np.ndarray, classes: int, decode: bool) -> list[str]:
    """Compares the members of the tar with the index. Returns one line per difference."""
    problems: list[str] = []
    rows = {int(offset): row for row, offset in enumerate(index["offset"])}
    images: dict[str, int] = {}  # key -> row
    labels: dict[str, bytes] = {}  # key -> content of its .cls
    last_key = ""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if not member.isreg() or member.issparse() or "/" in member.name or member.name.startswith("."):
                    problems.append(f"{path}: member {member.name!r} is not a plain file in the shard itself")
                    continue
                key, _, extension = member.name.partition(".")
                data = content[member.offset_data : member.offset_data + member.size]
                row = rows.get(member.offset_data)
                end = member.offset_data + member.size
                if content[end : end + -end % BLOCK_BYTES].strip(b"\0"):
                    problems.append(f"{path}: what fills the block after {member.name!r} is not zero")
                if extension == "cls":
                    labels[key] = data
                    if key != last_key:
                        problems.append(f"{path}: member {member.name!r} does not follow its image")
                elif row is None:
                    problems.append(f"{path}: member {member.name!r} is not in the index")
                else:
                    images[key] = row
                    fault = _image_fault(data, index[row], classes, decode)
                    if fault:
                        problems.append(f"{path}[{row}] {member.name}: {fault}")
                last_key = key
            check_end(tar)
    except (OSError, ValueError, OverflowError, tarfile.TarError) as error:
        problems.append(f"{path}: {error}")
    for key, row in images.items():
        if labels.get(key) != str(index["label"][row]).encode():
            said = os.fsdecode(labels[key][:20]) if key in labels else "nothing"
            problems.append(f"{path}[{row}] {key}.cls: says {said!r}, the index says label {index['label'][row]}")
    if len(images) != len(index):
        problems.append(f"{path}: {len(images)} of the index's {len(index)} samples are in the tar")
    return problems


def _image_fault(data: bytes, entry: np.void, classes: int, decode: bool) -> str:
    if len(data) != entry["length"] or zlib.crc32(data) != entry["crc32"]:
        return "bytes do not match the index's length and checksum"
    if not 0 <= entry["label"] < classes:
        return f"label {entry['label']} is not one of {classes} classes"
    size = header_size(data)
    if size == (0, 0):
        return "not a readable image"
    if size != (entry["width"], entry["height"]):
        return f"is {size[0]}x{size[1]}, index says {entry['width']}x{entry['height']}"
    if decode:
        from hyperbatch.data.decode import choose_decoder, decode_full

        try:
            decode_full(data, "decoding", decoder=choose_decoder("auto"))
        except BadSample as error:
            return str(error)
    return ""
