"""JPEG decoding on the GPU, through torchvision's nvJPEG: a whole batch in one call that leaves Python's lock alone.

What the decoder would get wrong without a word goes to the CPU instead: see `decode.gpu_can_decode`.
"""

from __future__ import annotations

import functools
import importlib
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


@functools.cache
def load_torchvision() -> Any | None:
    """torchvision.io, or None where it is missing or does not fit this torch."""
    try:
        return importlib.import_module("torchvision.io")
    except Exception:  # a build for another torch fails in many ways at import
        return None


@functools.cache
def has_nvjpeg(device: torch.device) -> bool:
    """Whether a JPEG can be decoded on this device; tried, since a build may lack it."""
    if device.type != "cuda" or load_torchvision() is None:
        return False
    try:
        tiny = io.BytesIO()
        Image.new("RGB", (8, 8)).save(tiny, "JPEG")
        pixels = decode_batch([torch.frombuffer(bytearray(tiny.getvalue()), dtype=torch.uint8)], device)[0]
        return tuple(pixels.shape) == (3, 8, 8)
    except RuntimeError:
        return False


def decode_batch(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """uint8[3, h, w] on the device for each file's bytes (uint8 on the CPU); RuntimeError if any fails.

    The decoder writes on a stream of its own into memory that this stream's allocator gave it. The caller must have
    waited, on the host, for every earlier use of freed memory of this stream; on return this stream waits for the
    decoder, and the host too before the pixels may be trusted, since hardware decoders have been seen to run past it.
    """
    torchvision: Any = load_torchvision()
    return torchvision.decode_jpeg(files, mode=torchvision.ImageReadMode.RGB, device=device)


def decode_on_cpu(data: bytes | bytearray) -> np.ndarray:
    """uint8[h, w, 3] by torchvision's libjpeg-turbo, without Python's lock; RuntimeError when it cannot."""
    torchvision: Any = load_torchvision()
    # A bytearray, because torch warns of memory that must not be written.
    file = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
    return torchvision.decode_jpeg(file, mode=torchvision.ImageReadMode.RGB).permute(1, 2, 0).numpy()
