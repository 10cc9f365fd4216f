"""How `hyperbatch data pack` writes a shard (format: data/shards.py): under another name, then renamed, its index last.

An index beside a shard therefore means that it is whole, and an interrupted pack goes on after it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hyperbatch.cores import usable_cores
from hyperbatch.data.folders import IMAGE_SUFFIXES
from hyperbatch.data.recompress import Recompress, header_size, image_format
from hyperbatch.data.shards import BLOCK_BYTES, INDEX_DTYPE, index_path, names_path, read_index, read_names
from hyperbatch.data.source import BadSample, EncodedSource
from hyperbatch.errors import InputError

_PREPARED_PER_WORKER = 4  # samples read ahead of the one that is written

Progress = Callable[[int, int], None]  # (samples done, samples in all)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample on its way into a shard."""

    id: int
    number: int  # in its split, over all that was ever packed into it
    label: int
    name: str  # where it came from, within the set
    data: bytes = b""
    extension: str = ""
    size: tuple[int, int] = (0, 0)
    fault: str = ""  # why it is left out


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPlan:
    """A shard's samples in order: ids in the source, numbers in the packed split, labels there."""

    path: Path
    source: EncodedSource
    names: list[str]  # of all samples of the source
    ids: np.ndarray
    numbers: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray | None  # of the samples' bytes, where they are known beforehand

    def __len__(self) -> int:
        return len(self.ids)

    def samples(self) -> Iterator[Sample]:
        for id, number, label in zip(self.ids.tolist(), self.numbers.tolist(), self.labels.tolist(), strict=True):
            yield Sample(id=id, number=number, label=label, name=self.names[id])

    @property
    def skipped_path(self) -> Path:
        return self.path.with_suffix(".skipped.json")


def write_shards(
    todo: list[ShardPlan],
    plans: list[ShardPlan],
    recompress: Recompress,
    skip_bad: bool,
    workers: int,
    progress: Progress | None,
) -> None:
    """One shard after the other; their samples are read and changed ahead of that, by threads."""
    total = sum(map(len, plans))
    done = total - sum(map(len, todo))
    if progress:
        progress(done, total)
    workers = workers or usable_cores()
    pool = ThreadPoolExecutor(workers)
    try:
        for plan in todo:
            futures = (pool.submit(_prepare, plan.source, sample, recompress, skip_bad) for sample in plan.samples())
            prepared = _ahead(futures, workers * _PREPARED_PER_WORKER)
            done = _write_shard(plan, prepared, lambda done: progress(done, total) if progress else None, done)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ahead(futures: Iterable[Future[Sample]], count: int) -> Iterator[Sample]:
    """The results in order, with `count` more under way."""
    futures = iter(futures)
    waiting = deque(islice(futures, count))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(islice(futures, 1))


def _prepare(source: EncodedSource, sample: Sample, recompress: Recompress, skip_bad: bool) -> Sample:
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
    data, extension = recompress(data, _extension(sample.name, data))
    return replace(sample, data=data, extension=extension, size=header_size(data))


def _write_shard(plan: ShardPlan, prepared: Iterator[Sample], report: Callable[[int], None], done: int) -> int:
    """The number of samples done after this shard; `report` is told of each."""
    part = plan.path.with_suffix(".part")
    rows, names, skipped = [], [], []
    try:
        index_path(plan.path).unlink(missing_ok=True)  # it would vouch for what is about to be replaced
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
        write_atomically(names_path(plan.path), b"\0".join(names))
        if skipped:
            write_atomically(plan.skipped_path, json.dumps(skipped).encode())
        else:
            plan.skipped_path.unlink(missing_ok=True)
        buffer = io.BytesIO()
        np.save(buffer, np.array(rows, dtype=INDEX_DTYPE), allow_pickle=False)
        write_atomically(index_path(plan.path), buffer.getvalue())
    except OSError as error:
        with contextlib.suppress(OSError):  # a file system that has become read-only
            part.unlink(missing_ok=True)
        raise cannot_write(plan.path, error) from error
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


def _key(sample: Sample) -> str:
    """WebDataset ends a key at the first dot, so the source's name is kept without dots or anything odd."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", PurePosixPath(sample.name).stem)[:60]
    return f"{sample.number:09d}_{stem}"


def _extension(name: str, data: bytes) -> str:
    """The file's own ending. A table may list files whose names have none, or one that no reader of shards knows."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in IMAGE_SUFFIXES:
        suffix = f".{image_format(data)}"
    return "jpg" if suffix in (".jpg", ".jpeg") else suffix[1:]


def is_finished(plan: ShardPlan) -> bool:
    """Whether an earlier pack wrote this shard, of these samples."""
    try:
        index = read_index(plan.path)
        read_names(plan.path, len(index), None)
    except InputError:
        return False
    kept = np.ones(len(plan), dtype=bool)
    kept[[row for row, _ in skipped_rows(plan)]] = False
    if plan.lengths is not None and not np.array_equal(index["length"], plan.lengths[kept]):
        return False
    return np.array_equal(index["label"], plan.labels[kept])


def skipped_rows(plan: ShardPlan) -> list[tuple[int, str]]:
    """(row in the plan, what and why) of the samples that a finished shard leaves out."""
    try:
        rows = [(int(row), str(text)) for row, text in json.loads(plan.skipped_path.read_text())]
        return [item for item in rows if 0 <= item[0] < len(plan)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{plan.skipped_path} cannot be read: {error}; give an empty folder") from error


def cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write {path}: {error.strerror}; fix this and run the same command again. Finished shards are kept"
    )


def write_atomically(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
