"""Which decoder a run uses: what was asked for, or what a short measurement on the set's own files shows.

Decoders differ by grey levels, so the choice belongs to a run: shared by all ranks, kept on resume. It is measured once
for a set on a machine, and kept on disk (`hyperbatch.choices`). The share of the files that the CPU decodes beside the
GPU belongs to the run as well; it is a constant, since one that was measured would differ from run to run.
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
# Of brightness, in grey levels. nvJPEG repeats the colours of subsampled files where libjpeg interpolates them, so
# colours differ at edges; brightness does not.
_MEAN_TOLERANCE = 1.5
_BRIGHTNESS = np.array([0.299, 0.587, 0.114])
# Beside a ResNet-50 step that takes 98 us an image, an H200 decodes one in 115 us: with 0.3 of them elsewhere it keeps
# up. A core decodes one of 500x375 in 2.3 ms, so 8 decode that share.
_CPU_SHARE, _CPU_SHARE_CORES = 0.3, 8


def resolve_decoders(name: str, device: torch.device) -> tuple[str, str]:
    """(decoder of training images, decoder of everything that must be exact or that the GPU cannot decode)."""
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
    """The decoder `auto` stands for on this set: the GPU's if its pixels are right and it is quicker than the CPU's."""
    if config.decoder != "auto" or not isinstance(source, EncodedSource):
        return config.decoder
    decoder, cpu_decoder = resolve_decoders("auto", device)
    if device.type == "cpu":
        return cpu_decoder
    fallback = choose_decoder("auto")  # of the processes that read for a GPU: they do not load torch
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
    """The share of the JPEGs that the CPU decodes beside this decoder: what was asked for, or what `auto` stands for,
    which needs idle cores and processes that leave Python's lock alone."""
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
    """Mean over the pixels, in grey levels."""
    return float(np.abs((ours.astype(np.int16) - theirs) @ _BRIGHTNESS).mean())
