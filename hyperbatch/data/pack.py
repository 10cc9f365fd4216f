"""`hyperbatch data pack | info`: packs a set into shards (format: data/shards.py), and describes a set of any kind.

manifest.json is written last and marks the set as complete. pack.json describes what is packed or being packed: for
every class of every split, a fingerprint of the names, sizes and times of its files. An interrupted pack is continued,
and a split or new classes are added, only if everything else is unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperbatch.config import DataConfig
from hyperbatch.data.folders import FolderSource, is_image
from hyperbatch.data.layouts import PACKED, open_both, open_one, recognise
from hyperbatch.data.recompress import Recompress
from hyperbatch.data.remote.store import is_address
from hyperbatch.data.shard_writer import (
    Progress,
    ShardPlan,
    cannot_write,
    is_finished,
    part_of,
    skipped_rows,
    write_atomically,
    write_shards,
)
from hyperbatch.data.shards import (
    BLOCK_BYTES,
    FORMAT,
    MANIFEST,
    PLAN,
    SPLITS,
    Manifest,
    Shard,
    ShardSource,
    Split,
    holds_plan,
    index_path,
    names_path,
    read_index,
    read_manifest,
)
from hyperbatch.data.source import ArraySource, EncodedSource, PixelFiles, data_path, data_place
from hyperbatch.data.stream import permute
from hyperbatch.errors import InputError

_SKIPPED = "skipped.txt"


@dataclass(frozen=True, kw_only=True)
class PackReport:
    resumed_shards: int  # written by an earlier pack: an interrupted one, or the one that this adds to
    samples: int
    bytes: int
    shards: int
    unreadable: int  # images whose header cannot be read; they are packed nevertheless
    skipped: int  # samples that are not packed: missing files and, with `skip_bad`, images that cannot be decoded
    skipped_list: str | None = None  # the file that lists them
    to_dict = asdict


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    samples: int
    bytes: int
    mean_bytes: float
    samples_per_class: tuple[int, int]  # of the smallest and the largest class
    # The following are known, without reading the images, for a packed set. For other sets they are None.
    median_width: int | None = None
    median_height: int | None = None
    unreadable: int | None = None
    other_files: int | None = None  # files of an image folder that are not images of a supported kind, such as .heic


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    kind: str  # the layout that was recognised: "folder", "tars", "shards", "Tiny-ImageNet in a zip", ...
    classes: int
    class_names: list[str]
    splits: dict[str, SplitInfo]
    to_dict = asdict


def pack(
    src: str | Path,
    dst: str | Path,
    *,
    shard_bytes: int = 512 << 20,
    split: str | None = None,
    append: bool = False,
    skip_bad: bool = False,
    short_side: int | None = None,
    quality: int | None = None,
    decoded: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> PackReport:
    """Packs a folder tree or tars into shards of about `shard_bytes` each. Run it again to finish an interrupted pack.

    By default, files keep their bytes. `short_side` shrinks images whose shorter side exceeds it, `quality` compresses
    them again, and `decoded` stores plain pixels (PPM), which are large but need no decoding.

    split: packs "train" or "val" alone; the other one can be added later. append: adds classes that `dst` does not hold
    yet. They are numbered after the existing ones, which do not change. skip_bad: skips files that cannot be read and
    decoded. A missing file, such as the target of a dangling link, is always skipped.

    The order within the set is a fixed shuffle, so that readers who read the shards from front to back get mixed
    classes.
    """
    if shard_bytes < 1 or workers < 0:
        raise InputError(f"shard size {shard_bytes} and workers {workers}: must be positive")
    recompress = Recompress(short_side=short_side, quality=quality, decoded=decoded)
    if is_address(str(dst)):
        raise InputError(f"{dst} is an address; pack into a folder of this machine, and copy the folder to the address")
    src, dst = data_path(DataConfig(dataset="images", data=str(src))), Path(os.path.expanduser(dst))
    _, sources = open_splits(src, split)
    if any(isinstance(source, ShardSource) for source in sources.values()):
        raise InputError(f"{src} is packed already; give the folder tree or tars it was made from")
    for source in sources.values():
        # Below src itself, dst is usually harmless. Below a split, it would become a class.
        if isinstance(source, FolderSource) and source.folder != src and _is_below(dst, source.folder):
            raise InputError(f"{dst} lies among the images of {source.folder}; give an empty folder elsewhere")
    names = {name: _source_names(source, src) for name, source in sources.items()}
    sizes = {name: source.sizes_bytes() for name, source in sources.items()}
    fingerprints = {name: _fingerprints(source, names[name], sizes[name]) for name, source in sources.items()}
    with _alone(dst):
        _claim(dst, repr((shard_bytes, recompress, skip_bad)), fingerprints, append=append)

        before = read_manifest(dst) if (dst / MANIFEST).exists() else None
        classes = _class_order(before, sources)
        number = {name: i for i, name in enumerate(classes)}
        todo: list[ShardPlan] = []
        missing: list[str] = []
        for name, source in sources.items():
            # The decoded size is not known yet. Assume a 4:3 photograph, with three bytes per pixel.
            guess = np.full_like(sizes[name], 4 * short_side**2) if decoded and short_side else sizes[name]
            packed = before.splits.get(name) if before else None
            known = {classes[number] for number in packed.classes} if packed else set()
            new = np.array([each not in known for each in source.classes])[source.labels]
            missing += [f"{names[name][i]}: there is no such file" for i in np.flatnonzero(new & (sizes[name] < 0))]
            ids = np.flatnonzero(new & (sizes[name] >= 0))
            if len(ids) == 0 and not packed:
                raise InputError(f"{src} has no {name} image that can be read; nothing was packed")
            numbers = np.arange(len(ids)) + (packed.samples if packed else 0)
            labels = np.array([number[each] for each in source.classes])[source.labels[ids]]
            first_shard = len(packed.shards) if packed else 0
            for shard, rows in enumerate(_shard_cuts(guess[ids], shard_bytes)):
                todo.append(
                    ShardPlan(
                        path=dst / f"{name}-{first_shard + shard:06d}.tar",
                        source=source,
                        names=names[name],
                        ids=ids[rows],
                        numbers=numbers[rows],
                        labels=labels[rows],
                        lengths=sizes[name][ids[rows]] if recompress.keeps_bytes else None,
                    )
                )
        written = {plan.path for plan in todo if not is_finished(plan)}
        write_shards([plan for plan in todo if plan.path in written], todo, recompress, skip_bad, workers, progress)
        return _finish(dst, before, classes, sources, todo, missing, written=len(written))


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def info(folder: str | Path) -> DataInfo:
    """Describes a set of any kind."""
    kind, sources = open_splits(folder)
    classes = list(next(iter(sources.values())).classes)
    return DataInfo(
        kind=kind,
        classes=len(classes),
        class_names=classes,
        splits={
            split: replace(_split_info(source), other_files=_other_files(source) if kind == "folder" else None)
            for split, source in sources.items()
        },
    )


def _other_files(source: EncodedSource) -> int | None:
    """Returns the number of files that are not images, or None if there are none."""
    assert isinstance(source, FolderSource)
    count = 0
    for _, folders, files in os.walk(source.folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        count += sum(not is_image(name) and not name.startswith(".") for name in files)
    return count or None


def _split_info(source: EncodedSource) -> SplitInfo:
    per_class = np.bincount(source.labels, minlength=len(source.classes))
    sizes = source.sizes_bytes()
    size_bytes, missing = int(sizes[sizes > 0].sum()), int(np.count_nonzero(sizes < 0))
    packed: dict[str, int] = {"unreadable": missing} if missing else {}
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


def open_splits(folder: str | Path, split: str | None = None) -> tuple[str, dict[str, EncodedSource]]:
    """Returns (layout, split -> source) with all splits of the set, or with the requested one."""
    if split not in (None, *SPLITS):
        raise InputError(f"--split {split}: must be train or val")
    found = recognise(data_place(DataConfig(dataset="images", data=str(folder))))
    if split is not None:
        sources = {split: open_one(found, split)}
    elif found.kind == PACKED:  # a packed set may hold only one split
        splits = {"train": found.train, "val": found.val}
        sources = {name: opened() for name, opened in splits.items() if opened is not None}
    else:
        sources = dict(zip(SPLITS, open_both(found), strict=True))
    return found.kind, {name: PixelFiles(s) if isinstance(s, ArraySource) else s for name, s in sources.items()}


# --- what is packed, and whether it has changed


def _source_names(source: EncodedSource, src: Path) -> list[str]:
    """Returns the path of each sample within the set."""
    prefix = f"{src}{os.sep}" if src.is_dir() else f"{src}:"
    return [source.describe(i).removeprefix(prefix) for i in range(len(source))]


def _fingerprints(source: EncodedSource, names: list[str], sizes: np.ndarray) -> dict[str, str]:
    """Returns class -> hash of the names, sizes and times of its files, in their order."""
    hashes = [hashlib.sha256() for _ in source.classes]
    times = source.changed_ns().tolist()
    for label, *sample in zip(source.labels.tolist(), names, sizes.tolist(), times, strict=True):
        hashes[label].update(repr(sample).encode("utf-8", "surrogatepass"))
    return {name: found.hexdigest() for name, found in zip(source.classes, hashes, strict=True)}


@contextlib.contextmanager
def _alone(dst: Path) -> Iterator[None]:
    """Makes the folder and locks it: no other process can pack into it until the block, or this process, ends."""
    try:
        dst.mkdir(parents=True, exist_ok=True)
        folder = os.open(dst, os.O_RDONLY)
    except OSError as error:
        raise _cannot_pack(dst, error) from error
    try:
        with contextlib.suppress(OSError):  # some file systems, such as NFS, cannot lock folders
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"another process packs into {dst}; wait until it has finished, or give another folder"
                ) from error
        yield
    finally:
        os.close(folder)


def _cannot_pack(dst: Path, error: Exception) -> InputError:
    reason = error.strerror if isinstance(error, OSError) else error
    return InputError(f"cannot pack into {dst}: {reason}; give an empty folder that can be written")


def _claim(dst: Path, options: str, wanted: dict[str, dict[str, str]], *, append: bool) -> None:
    """Writes pack.json, or adds to it. Raises InputError if the folder holds anything but this pack."""
    try:
        plan = dst / PLAN
        held: dict[str, Any] = {"splits": {}}
        stale: list[Path] = []
        if holds_plan(dst):
            held = json.loads(plan.read_text())
            if "splits" not in held:
                raise InputError(f"{dst} holds a pack by an older version; give an empty folder")
            # Older versions had an option for the longer side. A pack that used it has images of other sizes.
            if held["options"].replace("max_side=None", "short_side=None") != options:
                raise InputError(
                    f"{dst} holds a pack with another shard size, or other options for its images; give an empty folder"
                )
            if (dst / MANIFEST).exists():
                stale = _forget_unfinished(dst, held["splits"], wanted)
        elif any(path != part_of(plan) for path in dst.iterdir()):
            raise InputError(f"{dst} is not empty and holds no pack; give an empty folder")
        elif append:
            raise InputError(f"--append: {dst} holds no pack to add to; pack without it first")
        merged = {name: dict(classes) for name, classes in held["splits"].items()}
        for split, classes in wanted.items():
            have = merged.setdefault(split, {})
            changed = [name for name in classes if have.get(name, classes[name]) != classes[name]]
            added, gone = sorted(set(classes) - set(have)), sorted(set(have) - set(classes))
            if changed or (have and not append and (added or gone)):
                kinds = (("changed", changed), ("new", added), ("gone", gone))
                text = ", ".join(f"{len(found)} classes {kind} (e.g. {found[0]})" for kind, found in kinds if found)
                hint = "use --append to add them, or " if added and not changed and not gone else ""
                raise InputError(f"{dst} holds a pack of other data: in {split} {text}; {hint}give an empty folder")
            have |= classes
        if append and not (dst / MANIFEST).exists():
            raise InputError(f"--append: the pack in {dst} is not complete; finish it first")
        for path in stale:
            path.unlink()
        write_atomically(plan, json.dumps({"format": FORMAT, "options": options, "splits": merged}).encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise _cannot_pack(dst, error) from error


def _forget_unfinished(dst: Path, held: dict[str, dict[str, str]], wanted: dict[str, dict[str, str]]) -> list[Path]:
    """Removes the classes of an interrupted addition that have changed since from `held`, the classes of a complete
    pack. Returns the files of this addition, which the manifest does not list, in the order in which they must be
    removed."""
    manifest, stale = read_manifest(dst), []
    for name in held.keys() & wanted.keys():
        split = manifest.splits.get(name)
        packed = {manifest.classes[number] for number in split.classes} if split else set()
        unfinished = {each: found for each, found in held[name].items() if each not in packed}
        if unfinished.items() <= wanted[name].items():
            continue
        held[name] = {each: found for each, found in held[name].items() if each in packed}
        listed = {Path(shard.name).stem for shard in split.shards} if split else set()
        stale += [path for path in dst.glob(f"{name}-{6 * '[0-9]'}*") if path.name.partition(".")[0] not in listed]
    # The indexes first: an index means that its shard is complete.
    return sorted(stale, key=lambda path: path.suffix != ".npy")


def _class_order(before: Manifest | None, sources: dict[str, EncodedSource]) -> tuple[str, ...]:
    """Returns all classes in the order of their numbers. Known classes keep theirs; new ones follow in the source's
    order."""
    known = before.classes if before else ()
    return tuple(dict.fromkeys([*known, *(name for source in sources.values() for name in source.classes)]))


def _shard_cuts(sizes: np.ndarray, shard_bytes: int) -> list[np.ndarray]:
    """Returns the rows of each shard, in order. A new shard starts when the running size passes a multiple of the shard
    size."""
    if len(sizes) == 0:
        return []
    order = permute(np.arange(len(sizes)), len(sizes), 0, np.zeros(len(sizes), dtype=np.int64))
    # Besides its padded data, an image needs three blocks: its header, and a header and a block for its label.
    in_tar = (-(-sizes[order] // BLOCK_BYTES) + 3) * BLOCK_BYTES
    shard = (np.cumsum(in_tar) - in_tar) // shard_bytes
    return np.split(order, np.flatnonzero(np.diff(shard)) + 1)


def _finish(
    dst: Path,
    before: Manifest | None,
    classes: tuple[str, ...],
    sources: dict[str, EncodedSource],
    plans: list[ShardPlan],
    missing: list[str],
    *,
    written: int,
) -> PackReport:
    """Writes the list of skipped samples and the manifest, and returns the counts."""
    splits, unreadable = dict(before.splits) if before else {}, 0
    number = {name: i for i, name in enumerate(classes)}
    for name, source in sources.items():
        shards = list(splits[name].shards) if name in splits else []
        size_bytes = splits[name].bytes if name in splits else 0
        for plan in plans:
            if plan.source is source:
                index = read_index(plan.path)
                checksums = [zlib.crc32(path(plan.path).read_bytes()) for path in (index_path, names_path)]
                shards.append(
                    Shard(name=plan.path.name, samples=len(index), index_crc32=checksums[0], names_crc32=checksums[1])
                )
                size_bytes += int(index["length"].sum())
        samples = sum(shard.samples for shard in shards)
        if samples == 0:
            raise InputError(f"no {name} image can be read; {dst} is not complete")
        packed = {*(splits[name].classes if name in splits else ()), *(number[each] for each in source.classes)}
        splits[name] = Split(samples=samples, bytes=size_bytes, classes=tuple(sorted(packed)), shards=tuple(shards))
    manifest = Manifest(classes=classes, splits=splits)
    try:
        skipped = _write_skipped(dst, [*missing, *(text for plan in plans for _, text in skipped_rows(plan))])
        write_atomically(dst / MANIFEST, json.dumps(manifest.to_dict(), indent=1).encode())
    except OSError as error:
        raise cannot_write(dst / MANIFEST, error) from error
    for split in splits.values():
        for shard in split.shards:
            index = read_index(dst / shard.name, shard.samples, shard.index_crc32)
            unreadable += int(np.count_nonzero(index["width"] == 0))
    shard_count = sum(len(split.shards) for split in splits.values())
    return PackReport(
        resumed_shards=shard_count - written,
        samples=sum(split.samples for split in splits.values()),
        bytes=sum(split.bytes for split in splits.values()),
        shards=shard_count,
        unreadable=unreadable,
        skipped=skipped,
        skipped_list=str(dst / _SKIPPED) if skipped else None,
    )


def _write_skipped(dst: Path, lines: list[str]) -> int:
    """Adds to the list of skipped samples. Returns the number of all samples in it."""
    path = dst / _SKIPPED
    before = path.read_text(errors="surrogateescape").splitlines() if path.exists() else []
    lines = list(dict.fromkeys([*before, *(" ".join(line.split()) for line in lines)]))
    if lines:
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    return len(lines)
