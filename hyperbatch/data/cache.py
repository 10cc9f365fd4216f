"""Keeps decoded images in memory if the set fits, so that later epochs decode nothing.

The cache keeps whole images and not views. Every epoch cuts its own views, which are the same with and without a cache.
"""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data.decode import image_size
from hyperbatch.data.source import ArraySource, EncodedSource, Source, estimated_mean
from hyperbatch.errors import InputError
from hyperbatch.kernels import has_triton
from hyperbatch.memory import host_memory_bytes

_HOST_SHARE = 0.25  # of the host's memory, for all ranks of the host together
_GPU_SHARE = 0.25  # of a GPU's memory


class PixelCache:
    """Maps sample ids to uint8[h, w, c], up to a limit. An image that no longer fits is not kept; none is evicted."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._images: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._images)

    def get(self, index: int) -> np.ndarray | None:
        return self._images.get(index)

    def put(self, index: int, pixels: np.ndarray) -> None:
        with self._lock:
            if index not in self._images and self.bytes + pixels.nbytes <= self.limit_bytes:
                self._images[index] = pixels
                self.bytes += pixels.nbytes


class DeviceCache:
    """Where each cached image lies in device memory, as rows of the kernel's table. Address 0 means not cached.

    Loaders that share a cache have CUDA streams of their own. An image is therefore put here only after the host has
    seen that its pixels have arrived, so a loader that finds a row may read the pixels at once, on any stream.
    """

    def __init__(self, samples: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.table = np.zeros((samples, 6), dtype=np.int64)
        self.whole: Tensor | None = None  # all images of a set as one array, if `put_array` put it there
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(np.count_nonzero(self.table[:, 0]))

    def has_room(self, index: int, size_bytes: int) -> bool:
        """Whether the image is not cached yet and would fit."""
        return self.table[index, 0] == 0 and self.bytes + size_bytes <= self.limit_bytes

    def put(self, index: int, row: np.ndarray, pixels: Tensor) -> None:
        """Adds an image. pixels: the tensor whose memory the row points to; the copy into it must be complete."""
        with self._lock:
            if self.has_room(index, pixels.nbytes):
                self.table[index, 1:] = row[1:]
                self.table[index, 0] = row[0]  # written last, because another loader may be reading the row
                self.bytes += pixels.nbytes
                self._kept.append(pixels)

    def put_array(self, source: ArraySource, device: torch.device) -> None:
        """Adds a whole set of images of one size. If there are more labels than images, the images repeat."""
        images = self.whole = torch.from_numpy(np.ascontiguousarray(source.images)).to(device)
        self.bytes += images.nbytes
        _, height, width, channels = images.shape
        ids = np.arange(len(source)) % len(images)
        self.table[:, 0] = images.data_ptr() + ids * (height * width * channels)
        self.table[:, 1:] = (width, height, channels, width * channels, 1)


# The caches of a set live as long as its source object, so later readers of the same source find the decoded images.
_caches: weakref.WeakKeyDictionary[Source, dict[tuple[object, ...], PixelCache | DeviceCache | None]] = (
    weakref.WeakKeyDictionary()
)


def cache_of(
    source: Source, config: DataConfig, device: torch.device, ranks_per_host: int
) -> PixelCache | DeviceCache | None:
    """Calls `make_cache` for the first reader of this set on this device; later readers get the same cache."""
    key = device, config.cache, config.cache_bytes, config.decoder, config.cpu_decode_share or 0.0, ranks_per_host
    try:
        known = _caches.setdefault(source, {})
    except TypeError:  # a user's own kind of source that cannot be a key
        known = {}
    if key not in known:
        known[key] = make_cache(source, config, device, ranks_per_host)
    return known[key]


def make_cache(
    source: Source, config: DataConfig, device: torch.device, ranks_per_host: int
) -> PixelCache | DeviceCache | None:
    """Returns the cache that the config selects, if any. A set that is already in memory is copied to the device at
    once, or not cached."""
    place, limit_bytes = _choose_cache(source, config, device, ranks_per_host)
    on_device = place == "gpu" and has_triton()
    if isinstance(source, ArraySource):
        if not on_device:
            return None
        cache = DeviceCache(len(source), source.images.nbytes)
        cache.put_array(source, device)
        return cache
    if place == "none":
        return None
    return DeviceCache(len(source), limit_bytes) if on_device else PixelCache(limit_bytes)


def gpu_cache_bytes(source: Source, config: DataConfig, device: torch.device) -> int:
    """Returns the most GPU memory that the cache made by `make_cache` may use, in bytes."""
    if device.type != "cuda" or not has_triton():
        return 0
    place, limit_bytes = _choose_cache(source, config, device, ranks_per_host=1)
    if place != "gpu":
        return 0
    return source.images.nbytes if isinstance(source, ArraySource) else limit_bytes


def _choose_cache(source: Source, config: DataConfig, device: torch.device, ranks_per_host: int) -> tuple[str, int]:
    """Returns ("none", "host" or "gpu", limit in bytes).

    The choice depends on the config, the set and the machine only, so a rerun makes the same one.
    """
    if config.cache == "gpu" and device.type != "cuda":
        raise InputError("--cache gpu: this run does not use a GPU; use --cache host, or --device cuda")
    limits = {"host": int(host_memory_bytes() * _HOST_SHARE) // ranks_per_host}
    if device.type == "cuda":
        limits["gpu"] = int(torch.cuda.get_device_properties(device).total_memory * _GPU_SHARE)
    if config.cache in limits:
        return config.cache, config.cache_bytes or limits[config.cache]
    if config.cache == "auto":
        needed = decoded_bytes(source)
        # Prefer the GPU. Images that are already arrays in the host's memory need no second copy there.
        for place in ("gpu", "host"):
            limit = min(limits.get(place, 0), config.cache_bytes or limits.get(place, 0))
            if needed <= limit and not (place == "host" and isinstance(source, ArraySource)):
                return place, limit
    return "none", 0


def decoded_bytes(source: Source) -> int:
    """Returns the size of the decoded set in bytes: exact for arrays, estimated from some headers for files."""
    if isinstance(source, ArraySource):
        return source.images.nbytes
    if not isinstance(source, EncodedSource):
        return source.image(0).nbytes * len(source)
    pixels = estimated_mean(source, lambda i: math.prod(image_size(source.read_buffer(i), source.describe(i))))
    return 1 << 62 if pixels is None else int(pixels * source.channels * len(source))
