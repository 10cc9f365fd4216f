"""Drives the GPU's JPEG decoding units through nvJPEG itself, with ctypes.

The library is the one that torchvision ships and has already loaded. Names and signatures are those of nvjpeg.h. An
image's destination, `nvjpegImage_t`, is four plane addresses and four pitches, so the destinations of a batch are
int64[n, 8].
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbatch.data.decode import load_torchvision
from hyperbatch.data.gpu.jpegs import ADDRESS, BYTES, HEIGHT, KIND, WIDTH, Decoded, JpegFiles

# The number of concurrent callers of nvJPEG, each with a part of the batch. While an H200 runs a graph of matrix
# products, three callers decode 15,000 images of 256 px per second and one decodes 13,500; of images of 500x375, three
# decode 9,500 and one decodes 12,500.
CALLERS = 1

_HARDWARE = 3  # nvjpegBackend_t
_RGB_PLANES = 3  # nvjpegOutputFormat_t
_444 = 0  # nvjpegChromaSubsampling_t
# Memory is allocated in pieces of one size (for a small batch: a power of two), so that torch's allocator can reuse
# those of the last batch.
_PIECE_BYTES = 1 << 25
_ALIGNMENT = 256
_KNOWN = 1 << 16  # the most kinds and sizes of files that are remembered


class Api:
    """The functions of nvJPEG that are used here. `library` releases Python's lock while a function runs. `brief` does
    not, because acquiring the lock again would take longer than the function."""

    def __init__(self, library: Any, brief: Any) -> None:
        handle = stream = state = c_void_p
        addresses, lengths, destinations = c_void_p, c_void_p, c_void_p  # pointers to arrays
        self.create = _declared(library, "nvjpegCreateEx", c_int, c_void_p, c_void_p, c_uint, POINTER(handle))
        self.create_state = _declared(library, "nvjpegJpegStateCreate", handle, POINTER(state))
        self.create_header = _declared(library, "nvjpegJpegStreamCreate", handle, POINTER(c_void_p))
        self.parse_header = _declared(brief, "nvjpegJpegStreamParseHeader", handle, c_void_p, c_size_t, c_void_p)
        self.supported = _declared(brief, "nvjpegDecodeBatchedSupported", handle, c_void_p, POINTER(c_int))
        self.allocate = _declared(
            library, "nvjpegDecodeBatchedPreAllocate", handle, state, c_int, c_int, c_int, c_int, c_int
        )
        self.start = _declared(library, "nvjpegDecodeBatchedInitialize", handle, state, c_int, c_int, c_int)
        self.decode = _declared(library, "nvjpegDecodeBatched", handle, state, addresses, lengths, destinations, stream)


def _declared(library: Any, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, c_int
    return function


def _checked(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"nvJPEG: {what} failed with status {status}")


@functools.cache
def load_api() -> Api | None:
    """Returns the functions of nvJPEG, or None if the library cannot be loaded."""
    for path in _libraries():
        with contextlib.suppress(OSError, AttributeError):  # the library is missing, or of another version
            return Api(ctypes.CDLL(path), ctypes.PyDLL(path))
    return None


def _libraries() -> Iterator[str]:
    """Yields possible paths of the library: the one that torchvision has loaded, then the system's."""
    if load_torchvision() is not None:
        with contextlib.suppress(OSError):
            lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "libnvjpeg" in line]
            yield from sorted({line.split(maxsplit=5)[5] for line in lines})
    if (found := ctypes.util.find_library("nvjpeg")) is not None:
        yield found


@functools.cache
def hardware_decoder(device: torch.device) -> HardwareDecoder | None:
    """Returns the device's decoder, or None if it has no decoding units or nvJPEG cannot be called."""
    api = load_api()
    if device.type != "cuda" or api is None:
        return None
    try:
        return HardwareDecoder(api, device)
    except RuntimeError:
        return None


class _Caller:
    """A handle of the library with its decoding state, for one thread at a time. They are never destroyed, because the
    driver may be unloaded before them when the process ends."""

    def __init__(self, api: Api, device: torch.device) -> None:
        self._api = api
        self.handle, self._state = c_void_p(), c_void_p()
        _checked(api.create(_HARDWARE, None, None, 0, byref(self.handle)), "nvjpegCreateEx")
        _checked(api.create_state(self.handle, byref(self._state)), "nvjpegJpegStateCreate")
        # After this call, with any size, the library takes its buffers from a pool. Without it, decoding works but is
        # slower, so a failure is ignored.
        api.allocate(self.handle, self._state, 1, 1, 1, _444, _RGB_PLANES)
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def decode(self, addresses: np.ndarray, lengths: np.ndarray, destinations: np.ndarray) -> None:
        """Decodes the files. All arrays are contiguous and have 64-bit elements. On return, the pixels are complete."""
        stream = None if self._stream is None else self._stream.cuda_stream
        tables = addresses.ctypes.data, lengths.ctypes.data, destinations.ctypes.data
        try:
            status = self._api.start(self.handle, self._state, len(addresses), 1, _RGB_PLANES)
            _checked(status, "nvjpegDecodeBatchedInitialize")
            _checked(self._api.decode(self.handle, self._state, *tables, stream), "nvjpegDecodeBatched")
        finally:
            # The host waits even after a failure: some images may still be written, and their memory must not be
            # reused before that.
            if self._stream is not None:
                self._stream.synchronize()


class HardwareDecoder:
    """Decodes batches on one device, for one thread at a time; others wait."""

    def __init__(self, api: Api, device: torch.device, *, callers: int = CALLERS) -> None:
        self._api, self._device = api, device
        self._lock = threading.Lock()
        with self._on_device():
            self._callers = [_Caller(api, device) for _ in range(callers)]
            self._header = c_void_p()
            _checked(api.create_header(self._callers[0].handle, byref(self._header)), "nvjpegJpegStreamCreate")
        self._helpers = ThreadPoolExecutor(callers, thread_name_prefix="hyperbatch-nvjpeg") if callers > 1 else None
        self._known: dict[tuple[int, ...], bool] = {}

    def takes(self, files: JpegFiles) -> np.ndarray:
        """Returns bool[n]: which files the units can decode. nvJPEG is queried once for each kind and size of file."""
        kinds = [tuple(row) for row in files.table[:, [WIDTH, HEIGHT, KIND]].tolist()]
        with self._lock:
            if len(self._known) > _KNOWN:
                self._known.clear()
            found = np.empty(len(files), dtype=bool)
            for i, kind in enumerate(kinds):
                known = self._known.get(kind)
                found[i] = self._ask(kind, files.table[i]) if known is None else known
        return found

    def _ask(self, kind: tuple[int, ...], file: np.ndarray) -> bool:
        handle, answer = self._callers[0].handle, c_int(-1)
        if self._api.parse_header(handle, int(file[ADDRESS]), int(file[BYTES]), self._header):
            return False  # the header is broken, which says nothing about other files
        if self._api.supported(handle, self._header, byref(answer)):
            return False
        self._known[kind] = answer.value == 0
        return self._known[kind]

    def decode(self, files: JpegFiles) -> Decoded:
        """Returns the pixels of files that `takes` accepts. On return, they are complete. Raises RuntimeError if any
        file fails.

        The memory comes from the current stream's allocator, and the units write into it without regard to that stream.
        As for `nvjpeg.decode_batch`, the host must have waited for all earlier uses of memory that the stream has
        freed.
        """
        decoded = room_for(files.table[:, [WIDTH, HEIGHT]], self._device)
        addresses, lengths = (np.ascontiguousarray(files.table[:, column]) for column in (ADDRESS, BYTES))
        tables = addresses, lengths, destinations(decoded.images)
        with self._lock, self._on_device():
            if self._helpers is None:
                self._callers[0].decode(*tables)
                return decoded
            parts = zip(*(np.array_split(table, len(self._callers)) for table in tables), strict=True)
            calls = [
                self._helpers.submit(self._in_helper, caller, part)
                for caller, part in zip(self._callers, parts, strict=True)
                if len(part[0])
            ]
            errors = [call.exception() for call in calls]  # waits for all calls before it raises
        for error in filter(None, errors):
            raise error
        return decoded

    def _in_helper(self, caller: _Caller, tables: tuple[np.ndarray, ...]) -> None:
        with self._on_device():
            caller.decode(*tables)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()


def room_for(sizes: np.ndarray, device: torch.device) -> Decoded:
    """Returns uninitialised memory for the planes of images of these sizes. sizes: int64[n, 2], widths and heights."""
    width, height = sizes[:, 0], sizes[:, 1]
    needed = -(-3 * width * height // _ALIGNMENT) * _ALIGNMENT
    ends, starts = np.cumsum(needed), np.cumsum(needed) - needed
    images = np.column_stack([starts, width, height, np.ones_like(width), width, width * height])
    piece_bytes = min(_PIECE_BYTES, 1 << (int(needed.sum()) - 1).bit_length())
    memory: list[Tensor] = []
    first = 0
    while first < len(sizes):
        base = starts[first]
        last = max(first + 1, int(np.searchsorted(ends, base + piece_bytes, side="right")))
        size = max(piece_bytes, int(ends[last - 1] - base))
        memory.append(torch.empty(size, dtype=torch.uint8, device=device))
        images[first:last, 0] += memory[-1].data_ptr() - base
        first = last
    return Decoded(images, memory)


def destinations(images: np.ndarray) -> np.ndarray:
    """Returns int64[n, 8], an `nvjpegImage_t` for each row: the addresses of its three planes, and their pitches."""
    table = np.zeros((len(images), 8), dtype=np.int64)
    table[:, 0:3] = images[:, :1] + images[:, 5:6] * np.arange(3)
    table[:, 4:7] = images[:, 4:5]
    return table
