"""The first stage of a batch on the GPU: brings every image of the batch, whole, into device memory and fills a table
of their addresses.

JPEG decoders write without regard to streams, and the next batch is decoded while the views of this one are cut. The
images are therefore allocated on a stream of their own, on which nothing else is allocated, and a draft is kept until
the host has seen that its views are cut. So no kernel still reads the memory that the stream's allocator reuses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbatch.data.batch import BadSamples, Plan
from hyperbatch.data.cache import DeviceCache, PixelCache
from hyperbatch.data.decode import decode_full
from hyperbatch.data.gpu.jpegs import Decoded, JpegFiles
from hyperbatch.data.gpu.reading import PixelBlock, Promise
from hyperbatch.data.maker import load_or_replace
from hyperbatch.data.meter import Meter
from hyperbatch.data.source import EncodedSource, Source

Decode = Callable[[JpegFiles, torch.device], Decoded]


@dataclass(slots=True)
class Draft:
    """A batch that is being made: which sample each row shows, and where its pixels lie on the device."""

    plan: Plan
    shown: np.ndarray  # int64[n]: the plan's ids, except for replaced samples
    images: np.ndarray  # int64[n, 6]: the kernel's table of addresses, sizes and strides
    memory: list[Tensor] = field(default_factory=list)  # keeps the memory behind the addresses alive
    to_keep: list[tuple[int, np.ndarray, Tensor]] = field(default_factory=list)  # the arguments of `DeviceCache.put`
    bad: BadSamples = field(default_factory=list)
    uploaded: torch.cuda.Event | None = None  # recorded after the pixels have arrived


@dataclass(frozen=True, kw_only=True, eq=False)
class Drafter:
    """Makes drafts, one at a time. stream is None on a CPU."""

    source: Source
    device: torch.device
    stream: torch.cuda.Stream | None
    decode: Decode
    cpu_decoder: str
    host_cache: PixelCache | None
    device_cache: DeviceCache | None
    black: Tensor  # one pixel
    meter: Meter

    def unread(self, plan: Plan) -> np.ndarray:
        """Returns the rows whose images are not in device memory yet."""
        if self.device_cache is None:
            return np.arange(plan.real)
        return np.flatnonzero(self.device_cache.table[plan.ids[: plan.real], 0] == 0)

    def make(self, plan: Plan, promises: list[Promise]) -> Draft:
        read = [promise() for promise in promises]
        # Padding and unreadable images point to one black pixel.
        black = np.array([self.black.data_ptr(), 1, 1, 0, 0, 1])
        draft = Draft(plan, plan.ids.copy(), np.tile(black, (len(plan), 1)))
        for rows in read:
            draft.bad += rows.bad
            for row, index in rows.replaced.items():
                draft.shown[row] = index
        with self._on_stream():
            if self.device_cache is not None:
                table = self.device_cache.table[draft.shown[: plan.real]]
                draft.images[: plan.real] = np.where(table[:, :1] > 0, table, draft.images[: plan.real])
            for rows in read:
                for block in rows.blocks:
                    self._upload(draft, block)
            if files := [part for rows in read for part in rows.files]:
                self._decode_files(draft, JpegFiles.join(files))
            if self.stream is not None:
                draft.uploaded = torch.cuda.Event()
                draft.uploaded.record(self.stream)
        return draft

    def _upload(self, draft: Draft, block: PixelBlock) -> None:
        # copy=True also copies on a CPU, because readers will overwrite the block.
        pixels = block.pixels.to(self.device, non_blocking=True, copy=True)
        draft.memory.append(pixels)
        channels, (offsets, width, height) = self.source.channels, block.places.T
        # The columns of the kernel's table are address, size, strides.
        columns = pixels.data_ptr() + offsets, width, height, channels, width * channels, 1
        draft.images[block.rows] = np.column_stack(np.broadcast_arrays(*columns))
        if self.device_cache is None and self.host_cache is None:
            return
        for row, (offset, width, height) in zip(block.rows.tolist(), block.places.tolist(), strict=True):
            index, span = int(draft.shown[row]), slice(offset, offset + width * height * channels)
            if self.device_cache is not None:
                draft.to_keep.append((index, draft.images[row], pixels[span]))
            elif self.host_cache is not None:
                self.host_cache.put(index, block.pixels[span].view(height, width, channels).numpy().copy())

    def _decode_files(self, draft: Draft, files: JpegFiles) -> None:
        start_s = time.perf_counter()
        try:
            decoded = self.decode(files, self.device)
        except RuntimeError:  # one of the files is broken, and the decoder does not say which
            files, decoded = self._decode_each(draft, files)
        if self.stream is not None:
            # The host waits here, because hardware decoders have been seen to finish after the stream they were given.
            self.stream.synchronize()
        self.meter.add("gpu_decode", time.perf_counter() - start_s)
        draft.images[files.rows] = decoded.images
        draft.memory += decoded.memory
        if self.device_cache is not None or self.host_cache is not None:
            for i, index in enumerate(draft.shown[files.rows].tolist()):
                self._keep(draft, index, decoded.pixels(i))

    def _keep(self, draft: Draft, index: int, pixels: Tensor) -> None:
        """Adds a decoded image to the cache. It is copied, because the memory of decoded images is freed with the
        batch."""
        if self.device_cache is not None and self.device_cache.has_room(index, pixels.nbytes):
            decoded = Decoded.of([pixels.clone()])
            draft.to_keep.append((index, decoded.images[0], decoded.memory[0]))
        elif self.host_cache is not None and self.host_cache.bytes < self.host_cache.limit_bytes:
            self.host_cache.put(index, pixels.permute(1, 2, 0).contiguous().cpu().numpy())

    def _decode_each(self, draft: Draft, files: JpegFiles) -> tuple[JpegFiles, Decoded]:
        """Decodes one file at a time. Returns (the files that can be shown, their pixels)."""
        shown, pixels = [], []
        for i in range(len(files)):
            found = self._decode_alone(draft, files.take([i]))
            if found is not None:
                shown.append(i)
                pixels.append(found)
        return files.take(shown), Decoded.of(pixels)

    def _decode_alone(self, draft: Draft, file: JpegFiles) -> Tensor | None:
        """Returns uint8[3, h, w] of a file that the GPU's decoder may reject, or of the sample that replaces it."""
        with contextlib.suppress(RuntimeError):
            return self.decode(file, self.device).pixels(0)
        source, row = self.source, int(file.rows[0])
        assert isinstance(source, EncodedSource)

        def on_cpu(index: int) -> Tensor:
            pixels = decode_full(source.read(index), source.describe(index), decoder=self.cpu_decoder)
            return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).to(self.device)

        draft.shown[row], pixels = load_or_replace(draft.plan, int(draft.shown[row]), source, on_cpu, draft.bad)
        return pixels

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
