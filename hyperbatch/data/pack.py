"""`hyperbatch data pack | verify | info`: writes, checks and describes sets of packed shards (format: data/shards.py).

A shard is written under another name, then renamed, then its index appears: an index beside a shard means it is whole,
so an interrupted pack starts again where it stopped. manifest.json comes last and marks the set complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from hyperbatch.config import DataConfig
from hyperbatch.data.layouts import open_images
from hyperbatch.data.shards import FORMAT, INDEX_DTYPE, MANIFEST, ShardSource, index_path, read_index, read_manifest
from hyperbatch.data.source import ArraySource, BadSample, EncodedSource, PixelFiles, data_path
from hyperbatch.data.stream import permute
from hyperbatch.errors import InputError

_PLAN = "pack.json"  # what an unfinished pack was packing
_BLOCK_BYTES = 512  # of a tar
_SHRUNK_QUALITY = 90  # of images that are shrunk, when none is asked for
_MAX_PROBLEMS = 100  # lines `verify` keeps; it counts all

Progress = Callable[[int, int], None]  # (samples done, samples in all)


@dataclass(frozen=True, kw_only=True)
class PackReport:
    resumed_shards: int  # finished by an earlier pack that was interrupted
    samples: int
    bytes: int
    shards: int
    unreadable: int  # images whose header cannot be read; they are packed all the same
    to_dict = asdict


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    ok: bool
    samples: int
    bytes: int
    problem_count: int
    problems: list[str]  # the first _MAX_PROBLEMS
    to_dict = asdict


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    samples: int
    bytes: int
    mean_bytes: float
    samples_per_class: tuple[int, int]  # of the smallest and the largest class
    # Known without reading the images where they are packed, else None.
    median_width: int | None = None
    median_height: int | None = None
    unreadable: int | None = None


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    kind: str  # the layout that was recognised: "folder", "tars", "shards", "Tiny-ImageNet in a zip", ...
    classes: int
    class_names: list[str]
    splits: dict[str, SplitInfo]
    to_dict = asdict


@dataclass(frozen=True, kw_only=True)
class _Recompress:
    """(bytes, extension) of a file as it goes into the shard. Damaged files stay as they are."""

    max_side: int | None
    quality: int | None
    decoded: bool

    def __post_init__(self) -> None:
        if self.max_side is not None and self.max_side < 1:
            raise InputError(f"--max-side {self.max_side}: must be positive")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise InputError(f"--quality {self.quality}: must be in [1, 100]")
        if self.decoded and self.quality is not None:
            raise InputError("--quality and --decoded: plain pixels have no quality; give one of them")

    def __call__(self, data: bytes, extension: str) -> tuple[bytes, str]:
        if self == _Recompress(max_side=None, quality=None, decoded=False):
            return data, extension
        try:
            with Image.open(io.BytesIO(data)) as image:
                shrink = self.max_side is not None and max(image.size) > self.max_side
                if not (shrink or self.decoded or self.quality):
                    return data, extension
                pixels = image.convert("L" if image.mode == "L" and not self.decoded else "RGB")
        except Exception:  # whatever a damaged file does, its bytes are kept, and the loader reports it
            return data, extension
        if shrink and self.max_side is not None:
            scale = self.max_side / max(pixels.size)
            size = (max(1, round(pixels.width * scale)), max(1, round(pixels.height * scale)))
            pixels = pixels.resize(size, Image.Resampling.LANCZOS)
        out = io.BytesIO()
        if self.decoded:
            pixels.save(out, "PPM")
            return out.getvalue(), "ppm"
        pixels.save(out, "JPEG", quality=self.quality or _SHRUNK_QUALITY)
        if not shrink and extension == "jpg" and len(out.getvalue()) >= len(data):
            return data, extension  # it was smaller already
        return out.getvalue(), "jpg"


def pack(
    src: str | Path,
    dst: str | Path,
    *,
    shard_bytes: int = 512 << 20,
    max_side: int | None = None,
    quality: int | None = None,
    decoded: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> PackReport:
    """Packs a folder tree or tars into shards of about `shard_bytes` each; run again, it finishes what is missing.

    Files keep their bytes unless asked otherwise: `max_side` shrinks images with a longer side, `quality` compresses
    again, and `decoded` stores plain pixels (PPM), which are large and cost nothing to read.

    The order within the set is a fixed shuffle, so that readers who take shards from front to back get mixed classes.
    """
    if shard_bytes < 1 or workers < 0:
        raise InputError(f"shard size {shard_bytes} and workers {workers}: must be positive")
    recompress = _Recompress(max_side=max_side, quality=quality, decoded=decoded)
    dst = Path(dst)
    _, sources = _open_splits(src)
    plan: dict[str, list[tuple[str, np.ndarray]]] = {}
    digest = hashlib.sha256()
    for split, source in sources.items():
        if isinstance(source, ShardSource):
            raise InputError(f"{src} is packed already; give the folder tree or tars it was made from")
        sizes = source.sizes_bytes()
        # Pixels of unknown number: at the longest allowed side, a photograph's three quarters of a square.
        written = np.full_like(sizes, max_side * max_side * 9 // 4) if decoded and max_side else sizes
        plan[split] = _shard_plan(split, written, shard_bytes)
        for part in (split, source.classes, source.labels.tolist(), sizes.tolist(), shard_bytes, recompress):
            digest.update(repr(part).encode())
    _claim(dst, digest.hexdigest())

    total = sum(len(source) for source in sources.values())
    todo = [(sources[split], dst / name, ids, recompress) for split, shards in plan.items() for name, ids in shards]
    finished = {path: len(ids) for _, path, ids, _ in todo if _is_finished(path, len(ids))}
    done = sum(finished.values())
    if progress:
        progress(done, total)
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        running = {pool.submit(_write_shard, *item): len(item[2]) for item in todo if item[1] not in finished}
        try:
            for future in as_completed(running):
                future.result()
                done += running[future]
                if progress:
                    progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return _write_manifest(dst, sources["train"].classes, plan, resumed_shards=len(finished))


def verify(folder: str | Path, *, progress: Progress | None = None) -> VerifyReport:
    """Reads every sample: tar structure, index, checksum, image header."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    shards = [(folder / shard["name"], shard) for split in manifest["splits"].values() for shard in split["shards"]]
    total = sum(shard["samples"] for _, shard in shards)
    problems: list[str] = []
    samples = size_bytes = 0
    for path, shard in shards:
        try:
            index = read_index(path, shard["samples"])
        except InputError as error:
            problems.append(str(error))
            continue
        problems += _verify_shard(path, index, len(manifest["classes"]))
        samples += len(index)
        size_bytes += int(index["length"].sum())
        if progress:
            progress(samples, total)
    return VerifyReport(
        ok=not problems,
        samples=samples,
        bytes=size_bytes,
        problem_count=len(problems),
        problems=problems[:_MAX_PROBLEMS],
    )


def info(folder: str | Path) -> DataInfo:
    """Describes a set of any kind."""
    kind, sources = _open_splits(folder)
    classes = list(sources["train"].classes)
    return DataInfo(
        kind=kind,
        classes=len(classes),
        class_names=classes,
        splits={split: _split_info(source) for split, source in sources.items()},
    )


def _split_info(source: EncodedSource) -> SplitInfo:
    per_class = np.bincount(source.labels, minlength=len(source.classes))
    size_bytes = int(source.sizes_bytes().sum())
    packed: dict[str, int] = {}
    if isinstance(source, ShardSource):
        known = source.index[source.index["width"] > 0]
        for side in ("width", "height") if len(known) else ():
            packed[f"median_{side}"] = int(np.median(known[side]))
        packed["unreadable"] = len(source) - len(known)
    return SplitInfo(
        samples=len(source),
        bytes=size_bytes,
        mean_bytes=size_bytes / len(source),
        samples_per_class=(int(per_class.min()), int(per_class.max())),
        **packed,
    )


def _open_splits(folder: str | Path) -> tuple[str, dict[str, EncodedSource]]:
    """(layout, split -> source)"""
    kind, train, val = open_images(data_path(DataConfig(dataset="images", data=str(folder))))
    sources = {"train": train, "val": val}
    return kind, {split: PixelFiles(s) if isinstance(s, ArraySource) else s for split, s in sources.items()}


def _shard_plan(split: str, sizes: np.ndarray, shard_bytes: int) -> list[tuple[str, np.ndarray]]:
    """(shard name, sample ids in order): cut where the running size passes a multiple of the shard size."""
    order = permute(np.arange(len(sizes)), len(sizes), 0, np.zeros(len(sizes), dtype=np.int64))
    # An image takes a header and padding, and as much again for its label.
    in_tar = (-(-sizes[order] // _BLOCK_BYTES) + 3) * _BLOCK_BYTES
    shard = (np.cumsum(in_tar) - in_tar) // shard_bytes
    cuts = np.flatnonzero(np.diff(shard)) + 1
    return [(f"{split}-{number:06d}.tar", ids) for number, ids in enumerate(np.split(order, cuts))]


def _claim(dst: Path, fingerprint: str) -> None:
    """Makes the folder this pack's own, or finds that it already is."""
    try:
        dst.mkdir(parents=True, exist_ok=True)
        plan = dst / _PLAN
        if plan.exists():
            if json.loads(plan.read_text()).get("fingerprint") != fingerprint:
                raise InputError(f"{dst} holds a pack of other data or another shard size; give an empty folder")
        elif any(dst.iterdir()):
            raise InputError(f"{dst} is not empty and holds no pack; give an empty folder")
        else:
            _write_atomically(plan, json.dumps({"format": FORMAT, "fingerprint": fingerprint}).encode())
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot pack into {dst}: {error}; give a folder that can be written") from error


def _is_finished(shard: Path, samples: int) -> bool:
    try:
        return len(read_index(shard)) == samples
    except InputError:
        return False


def _write_shard(source: EncodedSource, path: Path, ids: np.ndarray, recompress: _Recompress) -> None:
    index = np.zeros(len(ids), dtype=INDEX_DTYPE)
    part = path.with_suffix(".part")
    try:
        with open(part, "wb") as out:
            for row, sample in enumerate(ids.tolist()):
                data, where, label = source.read(sample), source.describe(sample), int(source.labels[sample])
                key = _key(sample, where)
                data, extension = recompress(data, _extension(where))
                offset = _write_member(out, f"{key}.{extension}", data)
                _write_member(out, f"{key}.cls", str(label).encode())
                width, height = _image_size(data)
                index[row] = (offset, len(data), label, width, height, zlib.crc32(data))
            out.write(bytes(2 * _BLOCK_BYTES))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
        buffer = io.BytesIO()
        np.save(buffer, index, allow_pickle=False)
        _write_atomically(index_path(path), buffer.getvalue())
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {path}: {error.strerror}; run the same command again once that is mended, "
            "finished shards are kept"
        ) from error
    except BadSample as error:
        part.unlink(missing_ok=True)
        raise InputError(f"cannot read {error}; repair or remove the file and pack again") from error


def _write_member(out: Any, name: str, data: bytes) -> int:
    """Appends a regular file with fixed times and owners, so that packing twice gives the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    out.write(member.tobuf(format=tarfile.USTAR_FORMAT))
    offset = out.tell()
    out.write(data)
    out.write(bytes(-len(data) % _BLOCK_BYTES))
    return offset


def _key(sample: int, where: str) -> str:
    """WebDataset ends a key at the first dot, so the source's name is kept without dots or anything odd."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", PurePosixPath(where).stem)[:60]
    return f"{sample:09d}_{stem}"


def _extension(where: str) -> str:
    suffix = PurePosixPath(where).suffix.lower().lstrip(".")
    return "jpg" if suffix in ("jpg", "jpeg") else suffix


def _image_size(data: bytes) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except Exception:  # whatever a damaged header does, the bytes are kept as they are and marked 0 x 0
        return (0, 0)


def _write_manifest(
    dst: Path, classes: tuple[str, ...], plan: dict[str, list[tuple[str, np.ndarray]]], *, resumed_shards: int
) -> PackReport:
    splits, indexes = {}, []
    for split, shards in plan.items():
        found = [read_index(dst / name, len(ids)) for name, ids in shards]
        indexes += found
        splits[split] = {
            "samples": sum(len(index) for index in found),
            "bytes": sum(int(index["length"].sum()) for index in found),
            "shards": [{"name": name, "samples": len(ids)} for name, ids in shards],
        }
    manifest = {"format": FORMAT, "schema": 1, "classes": list(classes), "splits": splits}
    _write_atomically(dst / MANIFEST, json.dumps(manifest, indent=1).encode())
    return PackReport(
        resumed_shards=resumed_shards,
        samples=sum(split["samples"] for split in splits.values()),
        bytes=sum(split["bytes"] for split in splits.values()),
        shards=len(indexes),
        unreadable=sum(int(np.count_nonzero(index["width"] == 0)) for index in indexes),
    )


def _write_atomically(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _verify_shard(path: Path, index: np.ndarray, classes: int) -> list[str]:
    """Walks the tar and holds it against the index; a line for each thing that differs."""
    problems: list[str] = []
    rows = {int(offset): row for row, offset in enumerate(index["offset"])}
    seen = 0
    try:
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            for member in tar:
                if not member.isreg() or member.issparse() or "/" in member.name or member.name.startswith("."):
                    problems.append(f"{path}: member {member.name!r} is not a plain file in the shard itself")
                    continue
                row = rows.get(member.offset_data)
                if member.name.endswith(".cls"):
                    continue
                if row is None:
                    problems.append(f"{path}: member {member.name!r} is not in the index")
                    continue
                seen += 1
                entry = index[row]
                data = os.pread(file.fileno(), int(entry["length"]), member.offset_data)
                where = f"{path}[{row}] {member.name}"
                if member.size != entry["length"] or zlib.crc32(data) != entry["crc32"]:
                    problems.append(f"{where}: bytes do not match the index's length and checksum")
                elif not 0 <= entry["label"] < classes:
                    problems.append(f"{where}: label {entry['label']} is not one of {classes} classes")
                elif (size := _image_size(data)) == (0, 0):
                    problems.append(f"{where}: not a readable image")
                elif size != (entry["width"], entry["height"]):
                    problems.append(f"{where}: is {size[0]}x{size[1]}, index says {entry['width']}x{entry['height']}")
    except (OSError, tarfile.TarError) as error:
        problems.append(f"{path}: {error}")
    if seen != len(index):
        problems.append(f"{path}: {seen} of the index's {len(index)} samples are in the tar")
    return problems
