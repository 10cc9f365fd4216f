"""A process that reads files into shared memory and decodes those that the GPU does not. It starts quickly, because it
does not load torch.

    parent: (slot, options, locations) ──pipe──>  read, check, perhaps decode  ──>  shared memory
            a row for each             <──pipe──

The process knows nothing about data sets. It ends when its pipe is closed, even if the parent was killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import zlib
from multiprocessing.connection import Connection

import numpy as np

from hyperbatch.data.decode import decode_full, frame_left_to_gpu, raw_header_bytes
from hyperbatch.data.source import BadSample, Location, max_open_files

# Columns of the reply: what was read, its offset in the slab, a file's bytes, the size in pixels, `JpegFrame.kind`.
WHAT, OFFSET, BYTES, WIDTH, HEIGHT, KIND = range(6)
FILE, PIXELS, FAILED = 0, 1, 2  # what was read: bytes for the GPU's decoder, pixels, neither


_open: dict[str, int] = {}  # path -> descriptor


def _pread(path: str, room: memoryview, offset: int) -> int:
    """Reads a part of a file, which stays open unless too many others are. A set may have thousands of shards."""
    descriptor = _open.get(path)
    if descriptor is None:
        descriptor = os.open(path, os.O_RDONLY)
        if len(_open) < max_open_files():
            _open[path] = descriptor
    try:
        return os.preadv(descriptor, [room], offset)
    finally:
        if path not in _open:
            os.close(descriptor)


def _read(where: Location, room: memoryview) -> int:
    """Writes the sample's bytes to the start of `room` and returns their number. Raises BadSample if they are missing
    or do not fit."""
    if where.length < 0:
        # O_NONBLOCK: a pipe reads as empty and does not block.
        with open(os.open(where.path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            length = file.readinto(room) or 0
            if length == len(room):
                raise BadSample("no room")
    else:
        length = _pread(where.path, room[: where.length], where.offset)
        if length != where.length:
            raise BadSample("cut off, or no room")
    if where.crc32 >= 0 and zlib.crc32(room[:length]) != where.crc32:
        raise BadSample("wrong checksum")
    return length


def fill(
    slab: memoryview, start: int, stop: int, decoder: str, wanted: list[Location], cpu_pixels: list[int]
) -> np.ndarray:
    """Writes files, and then decoded pixels, one after the other into slab[start:stop]. Returns the reply, int64[n, 6].
    For a sample that fails, the parent finds the reason. cpu_pixels: the argument of `frame_left_to_gpu`, per
    sample."""
    found = np.zeros((len(wanted), 6), dtype=np.int64)
    found[:, WHAT] = FAILED
    to_decode = {}
    for i, where in enumerate(wanted):
        with contextlib.suppress(BadSample, OSError):
            length = _read(where, slab[start:stop])
            data = slab[start : start + length]
            if (header := raw_header_bytes(data)) is not None:
                width, height, size = header
                found[i] = PIXELS, start + size, 0, width, height, 0
            elif (frame := frame_left_to_gpu(data, cpu_pixels[i])) is not None:
                found[i] = FILE, start, length, *frame
            else:
                to_decode[i] = bytes(data)
                continue
            start += length
    # Pixels come last, so that they are contiguous and can be uploaded in one piece.
    for i, data in to_decode.items():
        with contextlib.suppress(BadSample):
            pixels = decode_full(data, "", decoder=decoder)
            if pixels.size <= stop - start:
                np.frombuffer(slab, np.uint8)[start : start + pixels.size] = pixels.reshape(-1)
                height, width, _ = pixels.shape
                found[i] = PIXELS, start, 0, width, height, 0
                start += pixels.size
    return found


def main() -> None:
    requests = Connection(int(sys.argv[1]), writable=False)
    replies = Connection(int(sys.argv[2]), readable=False)
    try:
        slab = memoryview(b"")
        while True:
            message = requests.recv()
            if isinstance(message, str):  # the path of the slab
                with open(message, "r+b") as file:
                    slab = memoryview(mmap.mmap(file.fileno(), 0))
                continue
            replies.send(fill(slab, *message))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
