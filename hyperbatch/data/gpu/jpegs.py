"""A batch's JPEGs on the host and their pixels on the device, as tables instead of one Python object per file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hyperbatch.data.decode import JpegFrame

ADDRESS, BYTES, WIDTH, HEIGHT, KIND = range(5)  # columns of `JpegFiles.table`


@dataclass(frozen=True, slots=True)
class JpegFiles:
    """JPEGs in (pinned) host memory, and the rows of the batch that they are for."""

    rows: np.ndarray  # int64[n]
    table: np.ndarray  # int64[n, 5]: address, bytes, width, height, kind (the last three of `decode.JpegFrame`)
    memory: tuple[Tensor, ...]  # the memory that the addresses point into

    @staticmethod
    def of(memory: Tensor, rows: Sequence[int] | np.ndarray, table: np.ndarray) -> JpegFiles:
        """Makes them from a table with offsets into the memory instead of addresses."""
        table = np.array(table, dtype=np.int64)
        table[:, ADDRESS] += memory.data_ptr()
        return JpegFiles(np.asarray(rows, dtype=np.int64), table, (memory,))

    @staticmethod
    def collect(files: dict[int, tuple[bytearray, JpegFrame]], *, pin: bool) -> JpegFiles:
        """Copies the file of each row into one piece of memory."""
        memory, offsets = packed([np.frombuffer(data, np.uint8) for data, _ in files.values()], pin=pin)
        sizes = [(len(data), *frame) for data, frame in files.values()]
        return JpegFiles.of(memory, list(files), np.column_stack([offsets, sizes]))

    @staticmethod
    def join(parts: Sequence[JpegFiles]) -> JpegFiles:
        # Reading processes share one piece of memory.
        memory = {id(piece): piece for part in parts for piece in part.memory}
        rows, tables = [part.rows for part in parts], [part.table for part in parts]
        return JpegFiles(np.concatenate(rows), np.concatenate(tables), tuple(memory.values()))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: np.ndarray | list[int] | slice) -> JpegFiles:
        return JpegFiles(self.rows[chosen], self.table[chosen], self.memory)

    def contents(self) -> list[Tensor]:
        """Returns the bytes of each file."""
        return [piece_at(self.memory, *place) for place in self.table[:, [ADDRESS, BYTES]].tolist()]


class Decoded(NamedTuple):
    """Pixels on the device, uint8[3, h, w] each: rows of the view kernel's table (address, width, height, strides)."""

    images: np.ndarray  # int64[n, 6]
    memory: list[Tensor]  # the memory that the addresses point into

    @staticmethod
    def of(pixels: list[Tensor]) -> Decoded:
        rows = [(p.data_ptr(), p.shape[2], p.shape[1], 1, p.shape[2], p.shape[2] * p.shape[1]) for p in pixels]
        return Decoded(np.array(rows, dtype=np.int64).reshape(-1, 6), pixels)

    def pixels(self, index: int) -> Tensor:
        address, width, height = self.images[index, :3].tolist()
        return piece_at(self.memory, address, 3 * width * height).view(3, height, width)


def packed(parts: list[np.ndarray], *, pin: bool) -> tuple[Tensor, np.ndarray]:
    """Returns (all parts one after the other in one tensor, the offset of each part). pin: use pinned memory."""
    sizes = np.array([part.size for part in parts])
    memory = torch.empty(int(sizes.sum()), dtype=torch.uint8, pin_memory=pin)
    np.concatenate(parts, out=memory.numpy())
    return memory, np.cumsum(sizes) - sizes


def piece_at(memory: Sequence[Tensor], address: int, size: int) -> Tensor:
    """Returns uint8[size] at the address."""
    for piece in memory:
        offset = address - piece.data_ptr()
        if 0 <= offset < piece.numel():
            return piece.view(-1)[offset : offset + size]
    raise AssertionError("an address outside the memory that was given")
