"""JPEG decoding on the GPU, through torchvision's nvJPEG: a whole batch in one call that leaves Python's lock alone.

What the decoder would get wrong without a word goes to the CPU instead: see `decode.gpu_can_decode`.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hyperbatch.data.decode import load_torchvision


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
