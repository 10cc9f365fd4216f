"""Chooses the decoder of a run: the configured one, or the winner of a short measurement on the set's own files.

The pixels of different decoders differ by grey levels, so the choice belongs to the run: all ranks share it, and it is
kept on resume. It is measured once for a set on a machine and stored on disk (`hyperbatch.choices`). The share of the
files that the CPU decodes alongside the GPU belongs to the run as well. It is a constant, because a measured share
would differ from run to run.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from hyperbatch.choices import choices_of
from hyperbatch.config import DataConfig
from hyperbatch.data.decode import choose_decoder, decode_full, gpu_frame, load_torchvision
from hyperbatch.data.gpu import nvjpeg
from hyperbatch.data.gpu.jpegs import Decoded, JpegFiles
from hyperbatch.data.gpu.reader_pool import worth_processes
from hyperbatch.data.identity import sample_list
from hyperbatch.data.maker import threads_per_rank
from hyperbatch.data.source import BadSample, EncodedSource, Source, spread_ids
from hyperbatch.errors import InputError
from hyperbatch.kernels import has_triton
from hyperbatch.stopwatch import wall_s

_PROBED_SAMPLES = 256  # a fraction of a second of decoding
# The tolerance for brightness, in grey levels. nvJPEG repeats the colours of subsampled files, and libjpeg interpolates
# them. Colours therefore differ at edges, but brightness does not.
_MEAN_TOLERANCE = 1.5
_BRIGHTNESS = np.array([0.299, 0.587, 0.114])
# During a ResNet-50 step that takes 98 us per image, an H200 decodes one image in 115 us. It keeps up if the CPU
# decodes a share of 0.3. A core decodes an image of 500x375 in 2.3 ms, so 8 cores are enough for that share.
_CPU_SHARE, _CPU_SHARE_CORES = 0.3, 8


def resolve_decoders(name: str, device: torch.device) -> tuple[str, str]:
    """Returns (decoder of training images, decoder of all images that must be exact or that the GPU cannot decode)."""
    cpu_decoder = choose_decoder("auto")
    if cpu_decoder == "pillow" and load_torchvision() is not None:
        cpu_decoder = "torchvision"
    if name == "auto":
        return ("nvjpeg" if has_triton() and nvjpeg.has_nvjpeg(device) else cpu_decoder), cpu_decoder
    if name == "nvjpeg":
        choose_decoder(name)
        if not has_triton() or not nvjpeg.has_nvjpeg(device):
            raise InputError(
                "--decoder nvjpeg: needs a GPU, Triton and a torchvision built with nvJPEG; use --decoder auto"
            )
        return name, cpu_decoder
    if name == "torchvision" and load_torchvision() is None:
        raise InputError("--decoder torchvision: not installed, or built for another torch; use --decoder auto")
    return choose_decoder(name), choose_decoder(name)


def measured_decoder(source: Source, config: DataConfig, device: torch.device, *, ranks_per_host: int = 1) -> str:
    """Returns the decoder that `auto` means for this set: the GPU's if its pixels are right and it is faster than the
    CPU's."""
    if config.decoder != "auto" or not isinstance(source, EncodedSource):
        return config.decoder
    decoder, cpu_decoder = resolve_decoders("auto", device)
    if device.type == "cpu":
        return cpu_decoder
    fallback = choose_decoder("auto")  # the decoder of the processes that read for a GPU, which do not load torch
    if decoder != "nvjpeg":
        return fallback
    threads = threads_per_rank(config, ranks_per_host)
    kept, key = choices_of(device), f"decoder of {sample_list(source).order}, {cpu_decoder} on {threads} threads"
    choice = kept.find(key)
    if choice not in (decoder, fallback):
        choice = _faster_decoder(source, device, cpu_decoder, fallback, threads)
        kept.keep(key, choice)
    return choice


def cpu_decode_share(source: Source, config: DataConfig, decoder: str, *, ranks_per_host: int = 1) -> float:
    """Returns the share of the JPEGs that the CPU decodes alongside this decoder: the configured share, or the default.
    The default is above 0 only for `auto`, with enough cores, and if processes read the set, which do not compete for
    Python's lock."""
    if decoder != "nvjpeg":
        return 0.0
    if config.cpu_decode_share is not None:
        return config.cpu_decode_share
    enough = threads_per_rank(config, ranks_per_host) >= _CPU_SHARE_CORES and worth_processes(source)
    return _CPU_SHARE if config.decoder == "auto" and enough else 0.0


def _faster_decoder(source: EncodedSource, device: torch.device, cpu_decoder: str, fallback: str, threads: int) -> str:
    files = []
    for index in spread_ids(source, _PROBED_SAMPLES):
        with contextlib.suppress(BadSample):
            data = source.read_buffer(index)
            if (frame := gpu_frame(data)) is not None:
                files.append((data, frame))
    if not files:
        return fallback
    encoded = JpegFiles.collect(dict(enumerate(files)), pin=device.type == "cuda")
    on_gpu: list[Decoded] = []
    on_cpu: list[np.ndarray] = []
    try:
        wall_s(lambda: nvjpeg.decode_files(encoded.take(slice(8)), device), device=device)  # sets the decoder up
        gpu_s = wall_s(lambda: on_gpu.append(nvjpeg.decode_files(encoded, device)), device=device)
    except RuntimeError:
        return fallback
    with ThreadPoolExecutor(threads) as pool:
        decoded = partial(pool.map, lambda file: decode_full(file[0], "", decoder=cpu_decoder), files)
        cpu_s = wall_s(lambda: on_cpu.extend(decoded()), device=torch.device("cpu"))
    for i, theirs in enumerate(on_cpu):
        pixels = on_gpu[0].pixels(i).permute(1, 2, 0).cpu().numpy()
        if pixels.shape != theirs.shape or brightness_difference(pixels, theirs) > _MEAN_TOLERANCE:
            return fallback
    return "nvjpeg" if gpu_s < cpu_s else fallback


def brightness_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the mean difference in brightness over the pixels, in grey levels."""
    return float(np.abs((ours.astype(np.int16) - theirs) @ _BRIGHTNESS).mean())
