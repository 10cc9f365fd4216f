"""Reads CIFAR-10 and CIFAR-100 as published (python or binary form, packed or not), and CIFAR-10 as npy or npy.xz
arrays.

Decoding xz takes 7 s of processor time, and converting the other forms' planes to pixels takes 1 s. The arrays are
therefore kept in the user's cache folder, and the next run maps them into memory.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import pickle
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyperbatch.cores import usable_cores
from hyperbatch.data import kept
from hyperbatch.data.folders import check_readable
from hyperbatch.data.source import ArraySource, DataCounts
from hyperbatch.data.tars import check_end
from hyperbatch.errors import InputError

_PIXEL_BYTES = 3 * 32 * 32
SAMPLES = {"train": 50_000, "test": 10_000}  # of either set


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """The properties in which the two sets differ."""

    name: str
    title: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_key: bytes  # in the pickles
    label_bytes: int  # bytes before the pixels of a binary record; the last one is the label
    train: tuple[str, ...]  # files, without the binary form's suffix
    test: tuple[str, ...]
    proofs: tuple[str, ...]  # one of these files must exist, too, because the other names are too common
    folders: tuple[str, ...]
    archives: tuple[str, ...]


CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    label_key=b"labels",
    label_bytes=1,
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    proofs=(),
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    archives=("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
)
CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    classes=tuple(
        """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
        man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
        pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
        skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
        tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905
    ),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    label_key=b"fine_labels",
    label_bytes=2,
    train=("train",),
    test=("test",),
    proofs=("meta", "fine_label_names.txt"),
    folders=("cifar-100-python", "cifar-100-binary"),
    archives=("cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"),
)
SETS = {cifar.name: cifar for cifar in (CIFAR10, CIFAR100)}

_WORTH_KEEPING_BYTES = 16 << 20

Split = tuple[np.ndarray, np.ndarray]  # uint8[n, 32, 32, 3], labels[n]


class _Part(NamedTuple):
    """A file of the set, or a member of the published archive."""

    cifar: Cifar
    path: Path
    member: str | None = None
    content: bytes | None = None  # the member's bytes


Form = tuple[Callable[[Any], Split], Sequence[Any], Sequence[Any]]  # reader, its items for train, its items for test


def open_cifar(cifar: Cifar, path: Path) -> tuple[ArraySource, ArraySource]:
    """Returns (train, test), read from the form that the folder holds or from the published archive."""
    read, train, test = _find(path, cifar)
    kept_folder = _kept_arrays(cifar, _files(train, test))
    splits = _load(kept_folder)
    if splits is None:
        items = _unpacked([*train, *test])
        # Threads, because xz decoding (7 s for the whole set on one core) releases the interpreter lock.
        with ThreadPoolExecutor(min(len(items), usable_cores())) as pool:
            parts = list(pool.map(read, items))
        splits = [_joined(chosen) for chosen in (parts[: len(train)], parts[len(train) :])]
        for (name, samples), (images, _) in zip(SAMPLES.items(), splits, strict=True):
            if len(images) != samples:  # a file may be cut between two images
                raise InputError(
                    f"{path} holds {len(images):,} images of {cifar.title}'s {name} set, which has {samples:,}; "
                    "fetch it again"
                )
        _keep(kept_folder, splits)
    sources = [
        ArraySource(f"{cifar.name} {name}", images, labels, classes=cifar.classes, mean=cifar.mean, std=cifar.std)
        for name, (images, labels) in zip(("train", "test"), splits, strict=True)
    ]
    return sources[0], sources[1]


def count_cifar(cifar: Cifar, path: Path) -> DataCounts:
    """Returns the counts of the full set. Checks that the files exist, but decodes none of them."""
    _find(path, cifar)
    return DataCounts(train_samples=SAMPLES["train"], eval_samples=SAMPLES["test"], classes=len(cifar.classes))


def recognised_cifar(path: Path) -> Cifar | None:
    """Returns which of the two sets the folder or archive holds, or None."""
    return next((cifar for cifar in SETS.values() if _form_in(path, cifar) is not None), None)


def _joined(parts: list[Split]) -> Split:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images, labels


# --- arrays kept from an earlier run


def _files(train: Sequence[Any], test: Sequence[Any]) -> list[Path]:
    """Returns every file that is read. Items are paths, or tuples that contain paths."""
    items = [item if isinstance(item, tuple) else (item,) for item in (*train, *test)]
    return sorted({part for item in items for part in item if isinstance(part, Path)})


def _kept_arrays(cifar: Cifar, files: list[Path]) -> Path:
    """Returns the folder for the arrays that are made from the current state of these files."""
    return kept.cache_folder() / f"{cifar.name}-{kept.state_of(files)[:16]}"


def _load(folder: Path) -> list[Split] | None:
    """Returns the kept arrays, or None. The images are memory-mapped copy-on-write: torch warns about read-only arrays,
    and no write reaches the files."""
    try:
        return [
            _checked(
                folder / f"{name}_images.npy",
                np.load(folder / f"{name}_images.npy", mmap_mode="c", allow_pickle=False),
                np.load(folder / f"{name}_labels.npy", allow_pickle=False),
            )
            for name in ("train", "test")
        ]
    except (OSError, ValueError, EOFError, InputError):  # missing or incomplete; the caller makes them again
        return None


def _keep(folder: Path, splits: list[Split]) -> None:
    """Writes to a temporary folder and renames it, so that the final folder is always complete. If it cannot be
    written, nothing is kept, and the next run decodes again."""
    if sum(images.nbytes for images, _ in splits) < _WORTH_KEEPING_BYTES or not folder.is_absolute():  # no home
        return
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            for name, (images, labels) in zip(("train", "test"), splits, strict=True):
                np.save(beside / f"{name}_images.npy", images)
                np.save(beside / f"{name}_labels.npy", labels)
            if _load(folder) is None:  # another rank may have written it first
                shutil.rmtree(folder, ignore_errors=True)
                beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


# --- the forms


def _find(path: Path, cifar: Cifar = CIFAR10) -> Form:
    """Returns the first complete form in the folder, its usual subfolders, or the archive."""
    form = _form_in(path, cifar)
    if form is not None:
        return form
    other = recognised_cifar(path)
    if other is not None:
        raise InputError(f"{path} holds {other.title}, not {cifar.title}; use --dataset {other.name}")
    first, last = cifar.train[0], cifar.train[-1]
    files = first if first == last else f"{first} .. {last}"
    arrays = "train_images_1..5.npy[.xz] with labels, " if cifar is CIFAR10 else ""
    raise InputError(
        f"{path} does not hold {cifar.title}; expected {' or '.join(cifar.archives)}, {arrays}"
        f"or {files} and {cifar.test[0]}, or the same names with .bin"
    )


def _form_in(path: Path, cifar: Cifar) -> Form | None:
    if path.name in cifar.archives and path.is_file():
        return _archive_form(path, cifar)
    for place in (path, *(path / name for name in cifar.folders)):
        form = _array_form(place) if cifar is CIFAR10 else None
        if form is not None:
            return form
        if cifar.proofs and not any((place / name).is_file() for name in cifar.proofs):
            continue
        for suffix, read in ((".bin", _read_binary), ("", _read_pickle)):
            train = [_Part(cifar, place / f"{name}{suffix}") for name in cifar.train]
            test = [_Part(cifar, place / f"{name}{suffix}") for name in cifar.test]
            if all(part.path.is_file() for part in (*train, *test)):
                return read, train, test
    found = [path / name for name in cifar.archives if (path / name).is_file()]
    return _archive_form(found[0], cifar) if found else None


def _array_form(place: Path) -> Form | None:
    arrays = [_array_file(place, f"train_images_{i}") for i in range(1, 6)]
    test = _array_file(place, "test_images")
    if not all(arrays) or test is None:
        return None
    labels = place / "train_labels.npy", place / "test_labels.npy"
    for path in labels:
        if not path.exists():
            raise InputError(f"{path} is missing beside the CIFAR-10 images; copy it there")
    return _read_arrays, [(path, labels[0], i, 5) for i, path in enumerate(arrays)], [(test, labels[1], 0, 1)]


def _archive_form(path: Path, cifar: Cifar) -> Form:
    suffix, read = (".bin", _read_binary) if "binary" in path.name else ("", _read_pickle)
    train = [_Part(cifar, path, f"{name}{suffix}") for name in cifar.train]
    return read, train, [_Part(cifar, path, f"{name}{suffix}") for name in cifar.test]


def _unpacked(parts: list[Any]) -> list[Any]:
    """Reads the content of all members of an archive in one pass over it."""
    if not isinstance(parts[0], _Part) or parts[0].member is None:
        return parts
    path, found = parts[0].path, {}
    check_readable(path)
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                if member.isreg() and (file := tar.extractfile(member)) and name in {part.member for part in parts}:
                    found[name] = file.read()
            check_end(tar)  # the gzip checksum is at the end of the file
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}; fetch the file again") from error
    for part in parts:
        if part.member not in found:
            raise InputError(f"{path} has no {part.member} inside; fetch the file again")
    return [part._replace(content=found[part.member]) for part in parts]


def _array_file(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / f"{stem}.npy", folder / f"{stem}.npy.xz") if p.is_file()), None)


def _read_arrays(item: tuple[Path, Path, int, int]) -> Split:
    path, labels_path, part, parts = item
    try:
        with lzma.open(path) if path.suffix == ".xz" else open(path, "rb") as file:
            images = np.load(file, allow_pickle=False)
        labels = np.load(labels_path, allow_pickle=False).reshape(parts, -1)[part]
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"{path} cannot be read: {error}; fetch the file again") from error
    return _checked(path, images, labels)


def _read_binary(part: _Part) -> Split:
    records = np.frombuffer(_content(part), dtype=np.uint8)
    record_bytes = part.cifar.label_bytes + _PIXEL_BYTES
    if records.size == 0 or records.size % record_bytes:
        raise InputError(f"{_where(part)} is not a whole number of {record_bytes}-byte records; fetch the file again")
    records = records.reshape(-1, record_bytes)
    pixels = _channels_last(records[:, part.cifar.label_bytes :])
    return _checked(_where(part), pixels, records[:, part.cifar.label_bytes - 1])


def _read_pickle(part: _Part) -> Split:
    try:
        content = _ArrayUnpickler(io.BytesIO(_content(part)), encoding="bytes").load()
        return _checked(
            _where(part), _channels_last(content[b"data"]), np.asarray(content[part.cifar.label_key], dtype=np.int64)
        )
    except InputError:
        raise
    except Exception as error:  # a hostile or broken pickle can fail in any way
        raise InputError(f"{_where(part)} is not a {part.cifar.title} pickle: {error}; fetch the file again") from error


def _content(part: _Part) -> bytes:
    try:
        return part.path.read_bytes() if part.content is None else part.content
    except OSError as error:
        raise InputError(f"{part.path} cannot be read: {error.strerror}; check its permissions") from error


def _where(part: _Part) -> str:
    return f"{part.path}:{part.member}" if part.member else str(part.path)


def _channels_last(flat: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _checked(path: Path | str, images: np.ndarray, labels: np.ndarray) -> Split:
    if images.shape[1:] != (32, 32, 3) or images.dtype != np.uint8 or labels.shape != (len(images),):
        raise InputError(f"{path} holds {images.dtype}{images.shape} images and {labels.shape} labels, not CIFAR's")
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, strings and numpy arrays. A pickle that names anything else is rejected and not executed."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]  # numpy's function, whose module depends on the version
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes into old pickles
            import codecs

            return codecs.encode
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")
