"""`hyperbatch data pack | info`: writes and describes sets of packed shards (format: data/shards.py).

A shard is written under another name, then renamed, then its names and its index appear: an index beside a shard means
it is whole, so an interrupted pack starts again where it stopped. manifest.json comes last and marks the set complete.
pack.json says what is being packed: a fingerprint of every class of every split, of the names, sizes and times of its
files. A pack goes on, and grows by a split or by new classes, only if the rest is what it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hyperbatch.config import DataConfig
from hyperbatch.data.recompress import Recompress, header_size
from hyperbatch.data.shards import (
    BLOCK_BYTES,
    FORMAT,
    INDEX_DTYPE,
    MANIFEST,
    SPLITS,
    Manifest,
    Shard,
    ShardSource,
    Split,
    index_path,
    names_path,
    read_index,
    read_manifest,
    read_names,
)
from hyperbatch.data.source import BadSample, EncodedSource, open_data, open_split
from hyperbatch.data.stream import permute
from hyperbatch.errors import InputError

_PLAN = "pack.json"  # what a pack holds, or was packing when it was interrupted
_SKIPPED = "skipped.txt"
_PREPARED_PER_WORKER = 4  # samples read ahead of the one that is written

Progress = Callable[[int, int], None]  # (samples done, samples in all)


@dataclass(frozen=True, kw_only=True)
class PackReport:
    resumed_shards: int  # written by an earlier pack: an interrupted one, or the one that this adds to
    samples: int
    bytes: int
    shards: int
    unreadable: int  # images whose header cannot be read; they are packed all the same
    skipped: int  # samples left out: files that are not there, and with `skip_bad` images that cannot be decoded
    skipped_list: str | None = None  # the file that names them
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
    kind: str  # "folder", "tars" or "shards"
    classes: int
    class_names: list[str]
    splits: dict[str, SplitInfo]
    to_dict = asdict


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """A sample on its way into a shard."""

    id: int
    number: int  # in its split, over all that was ever packed into it
    label: int
    name: str  # where it came from, within the set
    data: bytes = b""
    extension: str = ""
    size: tuple[int, int] = (0, 0)
    fault: str = ""  # why it is left out


@dataclass(frozen=True, kw_only=True)
class _ShardPlan:
    path: Path
    source: EncodedSource
    samples: list[_Sample]
    lengths: np.ndarray | None  # of the samples' bytes, where they are known beforehand

    @property
    def skipped_path(self) -> Path:
        return self.path.with_suffix(".skipped.json")


def pack(
    src: str | Path,
    dst: str | Path,
    *,
    shard_bytes: int = 512 << 20,
    split: str | None = None,
    append: bool = False,
    skip_bad: bool = False,
    max_side: int | None = None,
    quality: int | None = None,
    decoded: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> PackReport:
    """Packs a folder tree or tars into shards of about `shard_bytes` each; run again, it finishes what is missing.

    Files keep their bytes unless asked otherwise: `max_side` shrinks images with a longer side, `quality` compresses
    again, and `decoded` stores plain pixels (PPM), which are large and cost nothing to read.

    split: packs "train" or "val" alone; the other can be added later. append: adds classes that `dst` does not hold
    yet; they are numbered after those it has, and what it has stays as it is. skip_bad: leaves out what cannot be read
    and decoded. A file that is not there, as behind a dangling link, is always left out.

    The order within the set is a fixed shuffle, so that readers who take shards from front to back get mixed classes.
    """
    if shard_bytes < 1 or workers < 0:
        raise InputError(f"shard size {shard_bytes} and workers {workers}: must be positive")
    recompress = Recompress(max_side=max_side, quality=quality, decoded=decoded)
    src, dst = Path(src), Path(dst)
    sources = open_splits(src, split)
    if any(isinstance(source, ShardSource) for source in sources.values()):
        raise InputError(f"{src} is packed already; give the folder tree or tars it was made from")
    names = {name: _source_names(source, src) for name, source in sources.items()}
    sizes = {name: source.sizes_bytes() for name, source in sources.items()}
    fingerprints = {name: _fingerprints(source, names[name], sizes[name]) for name, source in sources.items()}
    _claim(dst, repr((shard_bytes, recompress, skip_bad)), fingerprints, append=append)

    before = read_manifest(dst) if (dst / MANIFEST).exists() else None
    classes = _class_order(before, sources)
    todo: list[_ShardPlan] = []
    missing: list[str] = []
    for name, source in sources.items():
        # Pixels of unknown number: at the longest allowed side, a photograph's three quarters of a square.
        guess = np.full_like(sizes[name], max_side * max_side * 9 // 4) if decoded and max_side else sizes[name]
        packed = before.splits.get(name) if before else None
        known = set(classes[: packed.classes]) if packed else set()
        new = np.array([each not in known for each in source.classes])[source.labels]
        missing += [f"{names[name][i]}: there is no such file" for i in np.flatnonzero(new & (sizes[name] < 0))]
        ids = np.flatnonzero(new & (sizes[name] >= 0))
        if len(ids) == 0 and not packed:
            raise InputError(f"{src} has no {name} image that can be read; nothing was packed")
        number = {each: i for i, each in enumerate(classes)}
        first_number = packed.samples if packed else 0
        samples = [
            _Sample(id=i, number=first_number + n, label=number[source.classes[label]], name=names[name][i])
            for n, (i, label) in enumerate(zip(ids.tolist(), source.labels[ids].tolist(), strict=True))
        ]
        first_shard = len(packed.shards) if packed else 0
        for shard, rows in enumerate(_shard_cuts(guess[ids], shard_bytes)):
            todo.append(
                _ShardPlan(
                    path=dst / f"{name}-{first_shard + shard:06d}.tar",
                    source=source,
                    samples=[samples[row] for row in rows],
                    lengths=sizes[name][ids[rows]] if recompress.keeps_bytes else None,
                )
            )
    written = {plan.path for plan in todo if not _is_finished(plan)}
    _write_shards([plan for plan in todo if plan.path in written], todo, recompress, skip_bad, workers, progress)
    return _finish(dst, before, classes, sources, todo, missing, written=len(written))


def info(folder: str | Path) -> DataInfo:
    """Describes a set of any kind."""
    sources = open_splits(folder)
    first = next(iter(sources.values()))
    form, classes = type(first).__name__, list(first.classes)
    return DataInfo(
        kind={"FolderSource": "folder", "TarSource": "tars", "ShardSource": "shards"}.get(form, form),
        classes=len(classes),
        class_names=classes,
        splits={split: _split_info(source) for split, source in sources.items()},
    )


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


def open_splits(folder: str | Path, split: str | None = None) -> dict[str, EncodedSource]:
    """Every split that is there, or the one that is asked for."""
    config = DataConfig(dataset="images", data=str(folder))
    if split is not None:
        if split not in SPLITS:
            raise InputError(f"--split {split}: must be train or val")
        sources = {split: open_split(config, split)}
    elif (Path(folder) / MANIFEST).exists():  # it may hold one split
        manifest = read_manifest(Path(folder))
        sources = {name: ShardSource(Path(folder), name, manifest) for name in manifest.splits}
    else:
        sources = dict(zip(SPLITS, open_data(config), strict=True))
    found: dict[str, EncodedSource] = {}
    for name, source in sources.items():
        assert isinstance(source, EncodedSource)
        found[name] = source
    return found


# --- what is packed, and whether it is still the same


def _source_names(source: EncodedSource, src: Path) -> list[str]:
    """Where each sample lies within the set."""
    prefix = f"{src}{os.sep}"
    return [source.describe(i).removeprefix(prefix) for i in range(len(source))]


def _fingerprints(source: EncodedSource, names: list[str], sizes: np.ndarray) -> dict[str, str]:
    """class -> hash of the names, sizes and times of its files, in their order."""
    hashes = [hashlib.sha256() for _ in source.classes]
    times = source.changed_ns().tolist()
    for label, *sample in zip(source.labels.tolist(), names, sizes.tolist(), times, strict=True):
        hashes[label].update(repr(sample).encode("utf-8", "surrogatepass"))
    return {name: found.hexdigest() for name, found in zip(source.classes, hashes, strict=True)}


def _claim(dst: Path, options: str, wanted: dict[str, dict[str, str]], *, append: bool) -> None:
    """Makes the folder this pack's own, or finds that it already is."""
    try:
        dst.mkdir(parents=True, exist_ok=True)
        plan = dst / _PLAN
        held: dict[str, Any] = {"splits": {}}
        if plan.exists():
            held = json.loads(plan.read_text())
            if "splits" not in held:
                raise InputError(f"{dst} holds a pack by an older version; give an empty folder")
            if held["options"] != options:
                raise InputError(
                    f"{dst} holds a pack with another shard size, or other options for its images; give an empty folder"
                )
        elif any(dst.iterdir()):
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
        _write_atomically(plan, json.dumps({"format": FORMAT, "options": options, "splits": merged}).encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot pack into {dst}: {error}; give an empty folder that can be written") from error


def _class_order(before: Manifest | None, sources: dict[str, EncodedSource]) -> tuple[str, ...]:
    """Those that have a number keep it; new ones follow in the source's order."""
    known = before.classes if before else ()
    new = [name for source in sources.values() for name in source.classes if name not in set(known)]
    return (*known, *dict.fromkeys(new))


def _shard_cuts(sizes: np.ndarray, shard_bytes: int) -> list[np.ndarray]:
    """The rows of each shard, in order: cut where the running size passes a multiple of the shard size."""
    if len(sizes) == 0:
        return []
    order = permute(np.arange(len(sizes)), len(sizes), 0, np.zeros(len(sizes), dtype=np.int64))
    # An image takes a header and padding, and as much again for its label.
    in_tar = (-(-sizes[order] // BLOCK_BYTES) + 3) * BLOCK_BYTES
    shard = (np.cumsum(in_tar) - in_tar) // shard_bytes
    return np.split(order, np.flatnonzero(np.diff(shard)) + 1)


def _is_finished(plan: _ShardPlan) -> bool:
    """Whether an earlier pack wrote this shard, of these samples."""
    try:
        index = read_index(plan.path)
        read_names(plan.path, len(index), None)
    except InputError:
        return False
    kept = np.ones(len(plan.samples), dtype=bool)
    kept[[row for row, _ in _skipped_rows(plan)]] = False
    labels = np.array([sample.label for sample in plan.samples])[kept]
    if plan.lengths is not None and not np.array_equal(index["length"], plan.lengths[kept]):
        return False
    return np.array_equal(index["label"], labels)


def _skipped_rows(plan: _ShardPlan) -> list[tuple[int, str]]:
    """(row in the plan, what and why) of the samples that a finished shard leaves out."""
    try:
        rows = [(int(row), str(text)) for row, text in json.loads(plan.skipped_path.read_text())]
        return [item for item in rows if 0 <= item[0] < len(plan.samples)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{plan.skipped_path} cannot be read: {error}; give an empty folder") from error


# --- writing


def _write_shards(
    todo: list[_ShardPlan],
    plans: list[_ShardPlan],
    recompress: Recompress,
    skip_bad: bool,
    workers: int,
    progress: Progress | None,
) -> None:
    """One shard after the other; their samples are read and changed ahead of that, by threads."""
    total = sum(len(plan.samples) for plan in plans)
    done = total - sum(len(plan.samples) for plan in todo)
    if progress:
        progress(done, total)
    workers = workers or os.cpu_count() or 1
    pool = ThreadPoolExecutor(workers)
    try:
        for plan in todo:
            futures = (pool.submit(_prepare, plan.source, sample, recompress, skip_bad) for sample in plan.samples)
            prepared = _ahead(futures, workers * _PREPARED_PER_WORKER)
            done = _write_shard(plan, prepared, lambda done: progress(done, total) if progress else None, done)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ahead(futures: Iterable[Future[_Sample]], count: int) -> Iterator[_Sample]:
    """The results in order, with `count` more under way."""
    futures = iter(futures)
    waiting = deque(islice(futures, count))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(islice(futures, 1))


def _prepare(source: EncodedSource, sample: _Sample, recompress: Recompress, skip_bad: bool) -> _Sample:
    """The sample as it is written, or why it is left out."""
    from hyperbatch.data.decode import choose_decoder, decode_full

    try:
        data = source.read(sample.id)
        if skip_bad:
            decode_full(data, sample.name, decoder=choose_decoder("auto"))
    except BadSample as error:
        if skip_bad:
            reason = str(error).removeprefix(f"{source.describe(sample.id)}: ").removeprefix(f"{sample.name}: ")
            return replace(sample, fault=f"{sample.name}: {reason}")
        raise InputError(
            f"cannot read {error}; repair or remove the file, or leave out such files with --skip-bad"
        ) from error
    data, extension = recompress(data, _extension(sample.name))
    return replace(sample, data=data, extension=extension, size=header_size(data))


def _write_shard(plan: _ShardPlan, prepared: Iterator[_Sample], report: Callable[[int], None], done: int) -> int:
    """The number of samples done after this shard; `report` is told of each."""
    part = plan.path.with_suffix(".part")
    rows, names, skipped = [], [], []
    try:
        with open(part, "wb") as out:
            for position, sample in enumerate(prepared):
                if sample.fault:
                    skipped.append((position, sample.fault))
                else:
                    key = _key(sample)
                    offset = _write_member(out, f"{key}.{sample.extension}", sample.data)
                    _write_member(out, f"{key}.cls", str(sample.label).encode())
                    rows.append((offset, len(sample.data), sample.label, *sample.size, zlib.crc32(sample.data)))
                    names.append(os.fsencode(sample.name))
                done += 1
                report(done)
            out.write(bytes(2 * BLOCK_BYTES))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, plan.path)
        _write_atomically(names_path(plan.path), b"\0".join(names))
        if skipped:
            _write_atomically(plan.skipped_path, json.dumps(skipped).encode())
        else:
            plan.skipped_path.unlink(missing_ok=True)
        buffer = io.BytesIO()
        np.save(buffer, np.array(rows, dtype=INDEX_DTYPE), allow_pickle=False)
        _write_atomically(index_path(plan.path), buffer.getvalue())
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {plan.path}: {error.strerror}; run the same command again once that is mended, "
            "finished shards are kept"
        ) from error
    except InputError:
        part.unlink(missing_ok=True)
        raise
    return done


def _write_member(out: Any, name: str, data: bytes) -> int:
    """Appends a regular file with fixed times and owners, so that packing twice gives the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    out.write(member.tobuf(format=tarfile.USTAR_FORMAT))
    offset = out.tell()
    out.write(data)
    out.write(bytes(-len(data) % BLOCK_BYTES))
    return offset


def _key(sample: _Sample) -> str:
    """WebDataset ends a key at the first dot, so the source's name is kept without dots or anything odd."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", PurePosixPath(sample.name).stem)[:60]
    return f"{sample.number:09d}_{stem}"


def _extension(where: str) -> str:
    suffix = PurePosixPath(where).suffix.lower().lstrip(".")
    return "jpg" if suffix in ("jpg", "jpeg") else suffix


def _finish(
    dst: Path,
    before: Manifest | None,
    classes: tuple[str, ...],
    sources: dict[str, EncodedSource],
    plans: list[_ShardPlan],
    missing: list[str],
    *,
    written: int,
) -> PackReport:
    """Writes the list of what was left out, and the manifest; counts."""
    splits, unreadable = dict(before.splits) if before else {}, 0
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
        splits[name] = Split(samples=samples, bytes=size_bytes, classes=len(classes), shards=tuple(shards))
    manifest = Manifest(classes=classes, splits=splits)
    skipped = _write_skipped(dst, [*missing, *(text for plan in plans for _, text in _skipped_rows(plan))])
    _write_atomically(dst / MANIFEST, json.dumps(manifest.to_dict(), indent=1).encode())
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
    """Adds to the list of samples that were left out; how many that are by now."""
    path = dst / _SKIPPED
    before = path.read_text(errors="surrogateescape").splitlines() if path.exists() else []
    lines = list(dict.fromkeys([*before, *(" ".join(line.split()) for line in lines)]))
    if lines:
        _write_atomically(path, "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    return len(lines)


def _write_atomically(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
