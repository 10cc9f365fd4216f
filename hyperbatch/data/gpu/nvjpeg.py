"""JPEG decoding on the GPU: a whole batch in one call that does not hold Python's lock.

    files of the batch ──┬─> hardware.py         files that the GPU's decoding units accept, by nvJPEG itself
                         └─> decode_batch        the others, or all files if there are no such units, by torchvision

torchvision calls the same library and is the reference: the pixels are equal bit for bit. It is slower, because it
makes tensors and parses the header twice for each file. While an H200 runs a graph of matrix products, torchvision
decodes 6,900 images of 500x375 per second, and nvJPEG itself decodes 12,500. In a run of ResNet-50, the loader's calls
decode 8,600 per second, however many files a call has: a copy, a decoding and a small kernel for each file, one by one.

Files that the decoder would silently decode wrongly are decoded by the CPU instead: see `decode.gpu_frame`.
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
    """Whether a JPEG can be decoded on this device. It is tried, because a build of torchvision may lack nvJPEG."""
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
    """Decodes each file's bytes (uint8 on the CPU) with torchvision to uint8[3, h, w] on the device. Raises
    RuntimeError if any file fails.

    The decoder writes on a stream of its own into memory from the current stream's allocator. The caller must therefore
    have waited, on the host, for every earlier use of memory that this stream has freed. On return, the current stream
    waits for the decoder. The host must wait, too, before the pixels are used, because hardware decoders have been seen
    to finish after the stream.
    """
    torchvision: Any = load_torchvision()
    try:
        return torchvision.decode_jpeg(files, mode=torchvision.ImageReadMode.RGB, device=device)
    except RuntimeError:
        # Images may still be written to memory that has been freed. A further call waits for those of this one.
        with contextlib.suppress(RuntimeError):
            torchvision.decode_jpeg([_tiny_jpeg()], mode=torchvision.ImageReadMode.RGB, device=device)
        raise


def decode_files(files: JpegFiles, device: torch.device) -> Decoded:
    """Like `decode_batch`, with the same requirements for the caller, but the GPU's decoding units decode the files
    that they accept."""
    return decode_with(hardware_decoder(device), files, device)


def decode_with(hardware: HardwareDecoder | None, files: JpegFiles, device: torch.device) -> Decoded:
    if hardware is None:
        return Decoded.of(decode_batch(files.contents(), device))
    images, memory = np.empty((len(files), 6), dtype=np.int64), []
    left = np.ones(len(files), dtype=bool)
    taken = hardware.takes(files)
    if taken.any():
        # One broken file makes the call fail, without saying which file it was. torchvision then fails as well, and
        # the caller tries each file alone.
        with contextlib.suppress(RuntimeError):
            images[taken], memory = hardware.decode(files.take(taken))
            left = ~taken
    if left.any():
        images[left], others = Decoded.of(decode_batch(files.take(left).contents(), device))
        memory += others
    return Decoded(images, memory)
