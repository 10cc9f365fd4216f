"""JPEG decoding on the GPU: a whole batch in one call that leaves Python's lock alone.

    files of the batch ──┬─> hardware.py         those that the GPU's decoding units take, by nvJPEG itself
                         └─> decode_batch        the others, and all where there are no such units: by torchvision

torchvision calls the same library and is the reference: pixels are equal bit for bit. It is slower, since it makes
tensors and parses the header twice for each file: beside a graph of matrix products on an H200 it decodes 6,900 images
of 500x375 a second, where nvJPEG itself decodes 12,500. In a run of ResNet-50 the loader's calls decode 8,600, whatever
their size: a copy, a decoding and a small kernel for each file, one after the other.

What the decoder would get wrong without a word goes to the CPU instead: see `decode.gpu_frame`.
"""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hyperbatch.data.decode import load_torchvision
from hyperbatch.data.gpu.hardware import HardwareDecoder, hardware_decoder
from hyperbatch.data.gpu.jpegs import Decoded, JpegFiles


@functools.cache
def has_nvjpeg(device: torch.device) -> bool:
    """Whether a JPEG can be decoded on this device; tried, since a build may lack it."""
    if device.type != "cuda" or load_torchvision() is None:
        return False
    try:
        return tuple(decode_batch([_tiny_jpeg()], device)[0].shape) == (3, 8, 8)
    except RuntimeError:
        return False


@functools.cache
def _tiny_jpeg() -> Tensor:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def decode_batch(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """uint8[3, h, w] on the device for each file's bytes (uint8 on the CPU), by torchvision; RuntimeError if any fails.

    The decoder writes on a stream of its own into memory that this stream's allocator gave it. The caller must have
    waited, on the host, for every earlier use of freed memory of this stream; on return this stream waits for the
    decoder, and the host too before the pixels may be trusted, since hardware decoders have been seen to run past it.
    """
    torchvision: Any = load_torchvision()
    try:
        return torchvision.decode_jpeg(files, mode=torchvision.ImageReadMode.RGB, device=device)
    except RuntimeError:
        # The memory of images that are on their way has been freed. A call waits for those of the call before.
        with contextlib.suppress(RuntimeError):
            torchvision.decode_jpeg([_tiny_jpeg()], mode=torchvision.ImageReadMode.RGB, device=device)
        raise


def decode_files(files: JpegFiles, device: torch.device) -> Decoded:
    """As `decode_batch`, whose demands on the caller it shares; those that the GPU's decoding units take by them."""
    return decode_with(hardware_decoder(device), files, device)


def decode_with(hardware: HardwareDecoder | None, files: JpegFiles, device: torch.device) -> Decoded:
    if hardware is None:
        return Decoded.of(decode_batch(files.contents(), device))
    images, memory = np.empty((len(files), 6), dtype=np.int64), []
    left = np.ones(len(files), dtype=bool)
    taken = hardware.takes(files)
    if taken.any():
        # One broken file fails all of them, and nothing says which: torchvision fails as well then, and the caller
        # tries each alone.
        with contextlib.suppress(RuntimeError):
            images[taken], memory = hardware.decode(files.take(taken))
            left = ~taken
    if left.any():
        images[left], others = Decoded.of(decode_batch(files.take(left).contents(), device))
        memory += others
    return Decoded(images, memory)
