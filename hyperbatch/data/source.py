"""Sources of samples: arrays in memory, or encoded images in folders, tars and shards. This module does not load torch.

open_data(config) -> (train, val)      check_data(config) -> counts, before any worker starts

  Source ──┬── ArraySource     images: uint8[n, h, w, c] in memory      digits, cifar, synthetic
           └── EncodedSource   read(i) -> file bytes                    FolderSource, MemberSource, ShardSource
"""

from __future__ import annotations

import contextlib
import os
import resource
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from hyperbatch.config import DataConfig
from hyperbatch.data.remote.store import Address, is_address
from hyperbatch.errors import InputError, RunFailed, load_object, nearest, own_code, shown
from hyperbatch.vocabulary import IMAGENET_MEAN, IMAGENET_STD

_BYTES = (bytes, bytearray, memoryview)
_PROBED_SAMPLES = 32
_MAX_OPEN = 256
_SYNTHETIC_BYTES = 64 << 20  # size of the distinct images in a synthetic split; larger sets repeat them


class BadSample(Exception):
    """This sample cannot be read or decoded; the message names it and says why."""


class DataError(RunFailed):
    """The run cannot continue with this data: too many samples are bad, or none is readable."""


class Place:
    """Describes a sample's location for messages. The text is computed only when it is needed, because that may require
    reading a file."""

    def __init__(self, source: EncodedSource, index: int) -> None:
        self._source, self._index = source, index

    def __str__(self) -> str:
        return self._source.describe(self._index)


class Location(NamedTuple):
    """Where a sample's bytes are stored. length -1 means the whole file; crc32 -1 means that it is not checked."""

    path: str
    offset: int = 0
    length: int = -1
    crc32: int = -1


@dataclass(frozen=True, kw_only=True)
class DataCounts:
    """The size of a data set, known without decoding any image."""

    train_samples: int
    eval_samples: int
    classes: int
    channels: int = 3
    to_dict = asdict


@runtime_checkable
class Source(Protocol):
    """One split of a data set. Array sources have `images`, and encoded sources have `read`."""

    name: str
    classes: tuple[str, ...]
    channels: int
    mean: tuple[float, ...]  # of pixels in [0, 1]
    std: tuple[float, ...]
    labels: np.ndarray  # int64[n]

    def __len__(self) -> int: ...
    def image(self, index: int) -> np.ndarray:
        """Returns uint8[height, width, channels]. Raises BadSample if the image cannot be decoded."""
        ...


class ArraySource:
    """Images of one size, held in memory. If there are fewer images than labels, the images repeat (synthetic sets)."""

    def __init__(
        self,
        name: str,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        classes: tuple[str, ...],
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> None:
        if images.dtype != np.uint8 or images.ndim != 4:
            raise InputError(
                f"{name}: images must be uint8[n, height, width, channels], got {images.dtype}{images.shape}"
            )
        if len(images) == 0 or len(labels) == 0:
            raise InputError(f"{name}: no samples; give at least one image")
        self.name = name
        self.images = images
        self.labels = checked_labels(name, labels, len(classes))
        self.classes = classes
        self.channels = images.shape[3]
        self.mean = mean or tuple((images.mean(axis=(0, 1, 2)) / 255).tolist())
        # The std of a constant channel is 0. At least one grey level keeps the normalised pixels finite.
        self.std = std or tuple(np.maximum(images.std(axis=(0, 1, 2)) / 255, 1 / 255).tolist())
        check_colors(name, self.channels, self.mean, self.std)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Returns a copy of these images, uint8[len(ids), h, w, c]."""
        return self.images[ids if len(self.images) == len(self.labels) else ids % len(self.images)]

    def image(self, index: int) -> np.ndarray:
        return self.images[index % len(self.images)]


class EncodedSource:
    """Image files of any size, decoded to RGB. A subclass defines `read`; `describe` and `sizes_bytes` are optional."""

    channels = 3
    mean = IMAGENET_MEAN
    std = IMAGENET_STD

    def __init__(self, name: str, classes: tuple[str, ...], labels: np.ndarray) -> None:
        self.name = name
        self.classes = classes
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """Returns the bytes of a file. Raises BadSample if they cannot be read."""
        raise BadSample(f"{self.describe(index)}: {type(self).__name__} reads nothing")

    def read_buffer(self, index: int) -> bytearray:
        """`read` into writable memory, for decoders that reject read-only bytes."""
        data: Any = self.read(index)
        if not isinstance(data, _BYTES):  # for example, a database may return None for a missing key
            raise BadSample(f"{self.describe(index)}: read returned {type(data).__name__}, not bytes")
        return bytearray(data)

    def will_read(self, ids: np.ndarray) -> None:
        """Announces that the loader will read these samples soon, in this order, so that a slow source can start to
        fetch them."""

    def locations(self, ids: list[int]) -> list[Location] | None:
        """Returns where another process can read the samples, or None if it cannot."""
        return None

    def describe(self, index: int) -> str:
        """Returns where the sample is stored, for messages and for its name in a packed set."""
        return f"{self.name}[{index}]"

    def sizes_bytes(self) -> np.ndarray:
        """Returns int64[n]: the encoded size of every sample, or -1 if the file is missing, such as behind a dangling
        link."""
        return np.array([len(self.read(i)) for i in range(len(self))], dtype=np.int64)

    def changed_ns(self) -> np.ndarray:
        """Returns int64[n, k]: when the content and the metadata of every sample's file were last changed. If that is
        not known, k is 0."""
        places = self.locations(list(range(len(self))))
        if places is None:
            return np.empty((len(self), 0), dtype=np.int64)
        times: dict[str, tuple[int, int]] = {}
        for path in {place.path for place in places}:
            times[path] = (-1, -1)
            with contextlib.suppress(OSError):  # a missing file has the size -1
                found = os.stat(path)
                times[path] = (found.st_mtime_ns, found.st_ctime_ns)
        return np.array([times[place.path] for place in places], dtype=np.int64)

    def sample_names(self) -> np.ndarray:
        """Returns bytes[n]: the name of each sample's file, or its offset in a larger file. The names do not depend on
        where the set is stored."""
        places = self.locations(list(range(len(self))))
        if places is None:
            names = [self.describe(i) for i in range(len(self))]
        else:
            names = [place.path if place.length < 0 else f"{place.path}@{place.offset}" for place in places]
        return np.array([os.fsencode(name.rpartition(os.sep)[2]) for name in names])

    def image(self, index: int) -> np.ndarray:
        from hyperbatch.data.decode import decode_full

        return decode_full(self.read(index), self.describe(index))


def can_be_printed(text: str) -> bool:
    """Whether the text can be encoded. It cannot if it holds a lone surrogate, which JSON can express."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def checked_labels(name: str, labels: Any, classes: int) -> np.ndarray:
    """Returns the labels as int64[n]. Raises InputError unless every label is the number of a class."""
    found = np.asarray(labels)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InputError(f"{name}: labels must be whole numbers in one row, got {found.dtype}{found.shape}")
    if len(found) and (found.min() < 0 or found.max() >= classes):
        raise InputError(f"{name}: labels must be in [0, {classes}), found {found.min()} to {found.max()}")
    return found.astype(np.int64)


def check_colors(name: str, channels: int, mean: Any, std: Any) -> None:
    """Raises InputError unless pixels can be normalised with this mean and std."""
    for what, values in (("mean", mean), ("std", std)):
        found = np.asarray(values)
        numbers = found.shape == (channels,) and found.dtype.kind in "iuf" and bool(np.isfinite(found).all())
        if not numbers or (what == "std" and not (found > 0).all()):
            raise InputError(f"{name}: {what} must be {channels} numbers, one per channel, got {values!r}")


class PixelFiles(EncodedSource):
    """An array's images as files of plain pixels, for code that needs files: packing and describing."""

    def __init__(self, arrays: ArraySource) -> None:
        super().__init__(arrays.name, arrays.classes, arrays.labels)
        self._arrays = arrays

    def read(self, index: int) -> bytes:
        pixels = self._arrays.image(index)
        height, width, _ = pixels.shape
        return b"P6 %d %d 255\n" % (width, height) + np.broadcast_to(pixels, (height, width, 3)).tobytes()

    def describe(self, index: int) -> str:
        return f"{self.name}/{index:06d}.ppm"

    def changed_ns(self) -> np.ndarray:
        """The images' checksums, because arrays have no times, and images of one size would otherwise look
        unchanged."""
        sums = [zlib.crc32(self._arrays.image(i).tobytes()) for i in range(len(self))]
        return np.array(sums, dtype=np.int64)[:, None]


def max_open_files() -> int:
    """Returns how many files a source keeps open. Further files of a larger set are opened for each read. The limit is
    a fraction of what the process may open (macOS allows 256), because there are two sources, and other code opens
    files, too."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_OPEN if allowed == resource.RLIM_INFINITY else min(_MAX_OPEN, allowed // 4)


def spread_ids(source: Source, count: int) -> list[int]:
    """Returns up to `count` sample ids, spread evenly over the set, for estimates about the whole set."""
    return np.unique(np.linspace(0, len(source) - 1, count).astype(int)).tolist()


def estimated_mean(source: Source, measure: Callable[[int], float]) -> float | None:
    """Returns the mean of `measure(index)` over some samples, or None if none of them can be read."""
    values = []
    for index in spread_ids(source, _PROBED_SAMPLES):
        with contextlib.suppress(BadSample):  # the loader will report it
            values.append(measure(index))
    return float(np.mean(values)) if values else None


def open_data(config: DataConfig) -> tuple[Source, Source]:
    """Returns (train, validation). Raises InputError for a missing or empty folder, an empty class, or splits with
    different classes."""
    if ":" in config.dataset:
        train, val = _user_data(config)
    elif config.dataset == "digits":
        from hyperbatch.data.digits import open_digits

        _takes_no_folder(config)
        train, val = open_digits()
    elif config.dataset in ("cifar10", "cifar100"):
        from hyperbatch.data.cifar import SETS, open_cifar

        train, val = open_cifar(SETS[config.dataset], data_path(config))
    elif config.dataset == "synthetic":
        _takes_no_folder(config)
        train, val = _synthetic(config, "train", config.train_samples), _synthetic(config, "val", config.eval_samples)
    elif config.dataset == "images":
        from hyperbatch.data.layouts import open_both, recognise

        train, val = open_both(recognise(data_place(config)))
    else:
        known = ("images", "digits", "cifar10", "cifar100", "synthetic")
        raise InputError(f"unknown dataset {config.dataset!r}{nearest(config.dataset, known)}")
    check_same_classes(train.classes, val.classes, config.data or config.dataset)
    return train, val


def open_eval(config: DataConfig) -> Source:
    """Opens the validation set alone. In a folder of images, the training set may be missing."""
    if config.dataset == "images":
        from hyperbatch.data.layouts import open_one, recognise

        return open_one(recognise(data_place(config)), "val")
    return open_data(config)[1]


def check_data(config: DataConfig) -> DataCounts:
    """Returns the counts of the set that open_data would open, and raises the InputErrors of opening and loading it,
    without decoding an image."""
    from hyperbatch.data.augment import check_options
    from hyperbatch.data.decode import choose_decoder

    choose_decoder(config.decoder)
    if config.dataset in ("cifar10", "cifar100"):
        from hyperbatch.data.cifar import SETS, count_cifar

        counts, whole = count_cifar(SETS[config.dataset], data_path(config)), True
    else:
        train, val = open_data(config)
        counts = DataCounts(
            train_samples=len(train), eval_samples=len(val), classes=len(train.classes), channels=train.channels
        )
        whole = isinstance(train, ArraySource)
    check_options(config, counts.channels, whole=whole)
    return counts


def _takes_no_folder(config: DataConfig) -> None:
    if config.data:
        raise InputError(
            f"--data {config.data}: the {config.dataset} data set needs no folder; choose a recipe for your own "
            "images, such as imagenette"
        )


def data_place(config: DataConfig) -> Path | Address:
    """Returns what --data names: a folder or file, or the address of images."""
    return _address(config) if is_address(config.data) else data_path(config)


def _address(config: DataConfig) -> Address:
    return Address(str(config.data), int(config.data_cache_gb * 1e9))


def has_data(config: DataConfig) -> bool:
    """Whether a data set can be opened: --data is given, or the set needs no files."""
    return bool(config.data) or config.dataset not in ("images", "cifar10", "cifar100")


def is_there(path: Path) -> bool:
    """Whether the path exists. Raises InputError if that cannot be determined."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name with a NUL
        return False
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check the path and its permissions") from error
    return True


def data_path(config: DataConfig) -> Path:
    """Returns the --data folder or file. Data at an address are fetched. Raises InputError if --data is not given, is
    missing, or is an empty folder."""
    if not config.data:
        raise InputError(f"dataset {config.dataset!r} needs --data: give a folder, an archive or an address")
    if is_address(config.data):
        from hyperbatch.data.remote.source import fetched

        return fetched(_address(config))
    folder = Path(os.path.expanduser(config.data))  # a DataConfig of the user may contain ~
    if not is_there(folder):
        raise InputError(f"data folder {folder} does not exist; check --data")
    if not folder.is_dir():
        return folder
    try:
        empty = not any(folder.iterdir())
        os.stat(f"{folder}/.")  # a user who may list a folder may still lack the permission to open its files
    except OSError as error:
        raise InputError(f"data folder {folder} cannot be listed: {error.strerror}; check its permissions") from error
    if empty:
        raise InputError(f"data folder {folder} is empty; use --data with the folder of the data set")
    return folder


def check_same_classes(train: tuple[str, ...], val: tuple[str, ...], where: Path | str) -> None:
    """Raises InputError if the classes differ. It names those that only one split has."""
    if tuple(train) != tuple(val):
        told = class_difference(train, val, ("in train", "in val"))
        raise InputError(f"{where}: train and val have different classes ({told}); make them equal")


def class_difference(first: Sequence[str], second: Sequence[str], places: tuple[str, str]) -> str:
    """Says how two lists of classes differ: which of them are only in the first or the second place."""
    parts = []
    for place, extra in zip(places, (set(first) - set(second), set(second) - set(first)), strict=True):
        if extra:
            shown = ", ".join(sorted(extra)[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            parts.append(f"only {place}: {shown}")
    composed, other = ({unicodedata.normalize("NFC", name) for name in names} for names in (first, second))
    if parts and composed == other:
        parts.append("they look the same, but their letters have different Unicode forms, NFC and NFD")
    return "; ".join(parts) or "in another order"


def _user_data(config: DataConfig) -> tuple[Source, Source]:
    build = load_object(config.dataset, "dataset")
    with own_code(f"dataset {config.dataset!r}", "it must take a DataConfig and return (train, val)"):
        made: Any = build(config)
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, Source) for part in made)):
        raise InputError(
            f"dataset {config.dataset!r} must return (train, val), each with name, classes, channels, mean, std, "
            "labels, len() and image(index); see docs/data.md"
        )
    for part in made:
        _check_own(part)
        if isinstance(part, EncodedSource):
            with contextlib.suppress(BadSample):  # the loader will report it
                _check_read(part, config.dataset)
    return made


def _check_own(source: Source) -> None:
    """Raises InputError for mistakes in a user's own source that would otherwise fail in the middle of a run, or train
    on wrong labels."""
    name, samples = source.name, len(source)
    if samples == 0 or samples != len(source.labels):
        raise InputError(f"{name} has {samples} samples and {len(source.labels)} labels; give one label per sample")
    if isinstance(source, ArraySource) and samples != len(source.images):
        raise InputError(f"{name} has {samples} labels and {len(source.images)} images; give one image per label")
    if not isinstance(source.labels, np.ndarray):
        raise InputError(f"{name}: labels must be a numpy array, got {type(source.labels).__name__}")
    names: Any = source.classes
    # Checkpoints hold the names, and are read without other types, such as numpy's own texts.
    if not isinstance(names, tuple | list) or any(type(each) is not str for each in names):
        raise InputError(f"{name}: classes must be a tuple of str, got {shown(names)}; convert them with str()")
    for shared, count in Counter(names).most_common(1):
        if count > 1:
            raise InputError(f"{name}: {count} classes are called {shared!r}; give each of them another name")
    checked_labels(name, source.labels, len(source.classes))
    check_colors(name, source.channels, source.mean, source.std)
    if not isinstance(source, ArraySource | EncodedSource):
        with contextlib.suppress(BadSample):  # the loader will report it
            rule = "it must return pixels, or raise BadSample"
            with own_code(f"{name}: image(0)", rule, lambda error: isinstance(error, BadSample)):
                image: Any = source.image(0)
            if not (
                isinstance(image, np.ndarray)
                and image.dtype == np.uint8
                and image.ndim == 3
                and image.shape[2] == source.channels
                and image.size
            ):
                got = f"{image.dtype}{image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
                raise InputError(f"{name}: image(0) must be uint8[height, width, {source.channels}], got {got}")


def _check_read(source: EncodedSource, dataset: str) -> None:
    rule = "it must return the bytes of a file, or raise BadSample"
    with own_code(f"dataset {dataset!r}: read(0)", rule, lambda error: isinstance(error, BadSample)):
        data: Any = source.read(0)
    if not isinstance(data, _BYTES):
        raise InputError(f"{source.name}: read(0) must return bytes, got {type(data).__name__}")


def _synthetic(config: DataConfig, split: str, samples: int) -> ArraySource:
    """Random images, each with one label, so that a network can memorise them."""
    if samples < 1 or config.classes < 1:
        raise InputError(f"synthetic {split} set of {samples} samples, {config.classes} classes: both must be positive")
    side = config.image_size
    distinct = min(samples, max(1, _SYNTHETIC_BYTES // (side * side * 3)))
    # The keys are constant: the set is data, so it must not change with the run's seed.
    images = np.random.default_rng([0x5EED, split == "val"]).integers(0, 256, (distinct, side, side, 3), dtype=np.uint8)
    return ArraySource(
        f"synthetic {split}",
        images,
        np.arange(samples) % distinct % config.classes,
        classes=tuple(str(c) for c in range(config.classes)),
        mean=(0.5,) * 3,
        std=(0.289,) * 3,  # of a uniform distribution
    )
