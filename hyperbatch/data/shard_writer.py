"""Writes a shard for `hyperbatch data pack` (format: data/shards.py): under another name first, then it is renamed, and
its index is written last.

An index next to a shard therefore means that the shard is complete, and an interrupted pack continues after it.
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
    number: int  # its number in the split, counted over all samples ever packed into it
    label: int
    name: str  # its path within the original set
    data: bytes = b""
    extension: str = ""
    size: tuple[int, int] = (0, 0)
    fault: str = ""  # why it is skipped, if it is


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPlan:
    """A shard's samples in order: their ids in the source, and their numbers and labels in the packed split."""

    path: Path
    source: EncodedSource
    names: list[str]  # of all samples of the source
    ids: np.ndarray
    numbers: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray | None  # the samples' sizes in bytes, if they are known in advance

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
    """Writes one shard after the other. Threads read and recompress the samples in advance."""
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
    """Yields the results in order, while up to `count` futures are running."""
    futures = iter(futures)
    waiting = deque(islice(futures, count))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(islice(futures, 1))


def _prepare(source: EncodedSource, sample: Sample, recompress: Recompress, skip_bad: bool) -> Sample:
    """Returns the sample as it is written, or with the reason why it is skipped."""
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
    """Writes a shard and returns the number of samples done after it. `report` is called after each sample."""
    part = plan.path.with_suffix(".part")
    rows, names, skipped = [], [], []
    try:
        index_path(plan.path).unlink(missing_ok=True)  # an index means that its shard is complete
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
        with contextlib.suppress(OSError):  # the file system may have become read-only
            part.unlink(missing_ok=True)
        raise cannot_write(plan.path, error) from error
    except InputError:
        part.unlink(missing_ok=True)
        raise
    return done


def _write_member(out: Any, name: str, data: bytes) -> int:
    """Appends a regular file and returns the offset of its data. Times and owners are fixed, so that packing twice
    gives the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    out.write(member.tobuf(format=tarfile.USTAR_FORMAT))
    offset = out.tell()
    out.write(data)
    out.write(bytes(-len(data) % BLOCK_BYTES))
    return offset


def _key(sample: Sample) -> str:
    """Returns the sample's key in the tar. WebDataset ends a key at the first dot, so dots and unusual characters in
    the source's name are replaced."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", PurePosixPath(sample.name).stem)[:60]
    return f"{sample.number:09d}_{stem}"


def _extension(name: str, data: bytes) -> str:
    """Returns the file's extension. A table may list files that have none, or one that no reader of shards knows; those
    get the extension of their format."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in IMAGE_SUFFIXES:
        suffix = f".{image_format(data)}"
    return "jpg" if suffix in (".jpg", ".jpeg") else suffix[1:]


def is_finished(plan: ShardPlan) -> bool:
    """Whether an earlier pack wrote this shard with the same samples."""
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
    """Returns (row in the plan, name and reason) of the samples that a finished shard skips."""
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


def part_of(path: Path) -> Path:
    """Returns the file to which `write_atomically` writes first. It stays behind if the process is killed."""
    return path.with_name(path.name + ".part")


def write_atomically(path: Path, content: bytes) -> None:
    part = part_of(path)
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
