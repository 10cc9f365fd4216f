"""A process that reads files into shared memory and decodes those the GPU cannot. No torch here: it starts at once.

    parent: (slot, options, locations) ──pipe──>  read, check, perhaps decode  ──>  shared memory
            a row for each             <──pipe──

It knows nothing of sets and ends when its pipe does, whatever became of the parent.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import zlib
from multiprocessing.connection import Connection

import numpy as np

from hyperbatch.data.decode import decode_full, gpu_frame, raw_header_bytes
from hyperbatch.data.source import BadSample, Location

# Columns of the reply: what was read, where it lies in the slab, a file's bytes, the size in pixels, `JpegFrame.kind`.
WHAT, OFFSET, BYTES, WIDTH, HEIGHT, KIND = range(6)
FILE, PIXELS, FAILED = 0, 1, 2  # what was read: bytes for the GPU's decoder, pixels, neither


@functools.lru_cache(maxsize=256)
def _descriptor(path: str) -> int:
    return os.open(path, os.O_RDONLY)


def _read(where: Location, room: memoryview) -> int:
    """Bytes of the sample, written to the front of `room`; BadSample when they are not there or do not fit."""
    if where.length < 0:
        # A pipe is empty instead of waited for.
        with open(os.open(where.path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            length = file.readinto(room) or 0
            if length == len(room):
                raise BadSample("no room")
    else:
        length = os.preadv(_descriptor(where.path), [room[: where.length]], where.offset)
        if length != where.length:
            raise BadSample("cut off, or no room")
    if where.crc32 >= 0 and zlib.crc32(room[:length]) != where.crc32:
        raise BadSample("wrong checksum")
    return length


def fill(slab: memoryview, start: int, stop: int, decoder: str, on_gpu: bool, wanted: list[Location]) -> np.ndarray:
    """int64[n, 6], the reply. Puts the samples one after the other into slab[start:stop]; one that fails is left to the
    parent to explain."""
    samples = []
    for where in wanted:
        try:
            length = _read(where, slab[start:stop])
            data = slab[start : start + length]
            if (header := raw_header_bytes(data)) is not None:
                width, height, size = header
                samples.append((PIXELS, start + size, 0, width, height, 0))
            elif on_gpu and (frame := gpu_frame(data)) is not None:
                samples.append((FILE, start, length, *frame))
            else:
                pixels = decode_full(bytes(data), "", decoder=decoder)
                height, width, _ = pixels.shape
                length = pixels.size
                if length > stop - start:
                    raise BadSample("no room")
                np.frombuffer(slab, np.uint8)[start : start + length] = pixels.reshape(-1)
                samples.append((PIXELS, start, 0, width, height, 0))
            start += length
        except (BadSample, OSError):
            samples.append((FAILED, 0, 0, 0, 0, 0))
    return np.array(samples, dtype=np.int64)


def main() -> None:
    requests = Connection(int(sys.argv[1]), writable=False)
    replies = Connection(int(sys.argv[2]), readable=False)
    try:
        slab = memoryview(b"")
        while True:
            message = requests.recv()
            if isinstance(message, str):  # the slab's file
                with open(message, "r+b") as file:
                    slab = memoryview(mmap.mmap(file.fileno(), 0))
                continue
            replies.send(fill(slab, *message))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
