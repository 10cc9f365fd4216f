"""The host side of Muon's kernels: the buffers of each matrix, and the order of the tiles of all products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import is_compiling
from hyperbatch.kernels.muon import apply_kernel, direction_kernel
from hyperbatch.kernels.norm.tiles import processors
from hyperbatch.kernels.orthogonal import GRAM_CODE, PAD, SQUARE_CODE, UPDATE_CODE, product_kernel
from hyperbatch.optim.fused_kernels import FusedKernels, Group, KernelForm, KernelTensors
from hyperbatch.optim.muon import MUON_RULE, Polynomial, memory_shape, product_dtype
from hyperbatch.optim.shares import Deal, deal_out, product_cost

if TYPE_CHECKING:
    from hyperbatch.optim.base import LayerwiseOptimizer

PRODUCT_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
STAGES = 3
REGISTERS = 128  # per thread: two programs of large tiles fit on a multiprocessor, and one works while the other waits
ONE_LAUNCH = True  # all products in one launch; otherwise one launch for each kind of product and iteration


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in its memory layout."""

    rows: int
    columns: int
    polynomials: tuple[Polynomial, ...]

    @property
    def side(self) -> int:
        """The size of A, which is the smaller of X X^T and X^T X."""
        return min(self.rows, self.columns)

    @property
    def padded(self) -> tuple[int, int]:
        return _padded(self.rows), _padded(self.columns)

    @property
    def size(self) -> int:
        return self.padded[0] * self.padded[1]


def _padded(n: int) -> int:
    return -(-n // PAD) * PAD


def tile_rows(matrices: Sequence[Matrix | None], tile: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Returns the rows of the kernel's table of tiles, and how many belong to each kind of product in each iteration.

    The tiles of all matrices are ordered by kind of product, so that a program rarely takes a tile before the tiles
    that it depends on are finished. The longest tiles come first. None stands for a matrix of another rank.
    """
    rows: list[tuple[int, ...]] = []
    counts: list[int] = []
    done = [0] * len(matrices)
    known = [(place, matrix) for place, matrix in enumerate(matrices) if matrix is not None]
    for iteration in range(max((len(matrix.polynomials) for _, matrix in known), default=0)):
        for product in (GRAM_CODE, SQUARE_CODE, UPDATE_CODE):
            now = [
                (place, matrix)
                for place, matrix in known
                if iteration < len(matrix.polynomials)
                and (product != SQUARE_CODE or matrix.polynomials[iteration][2] != 0.0)
            ]
            # In a gram product the sum runs over the longer side; in the other products, over the shorter one.
            now.sort(key=lambda x: max(x[1].padded) if product == GRAM_CODE else x[1].side, reverse=True)
            before = len(rows)
            for place, matrix in now:
                across = [-(-n // tile) for n in (matrix.rows, matrix.columns)]
                if product == UPDATE_CODE:
                    tiles = [(i, j) for i in range(across[0]) for j in range(across[1])]
                else:  # symmetric
                    tiles = [(i, j) for i in range(min(across)) for j in range(i, min(across))]
                rows += [(product, iteration, place, i, j, done[place]) for i, j in tiles]
                done[place] += len(tiles)
            counts.append(len(rows) - before)
    return rows, [count for count in counts if count]


def best_tile(matrices: Sequence[Matrix | None], dtype: torch.dtype) -> int:
    """Returns the tile size: large tiles do more work per byte read, and small ones keep all multiprocessors busy."""
    if dtype == torch.float32:
        return 64
    grams = [row for row in tile_rows(matrices, 128)[0] if row[:2] == (GRAM_CODE, 0)]
    return 128 if len(grams) >= processors() else 64


class MuonKernels(FusedKernels):
    """Launches Muon's kernels: three launches per step, for any number of matrices and groups."""

    def __init__(self, form: KernelForm, layers: list[KernelTensors], optimizer: LayerwiseOptimizer) -> None:
        super().__init__(form, layers, optimizer)
        device = layers[0].weight.device
        settings = [MUON_RULE.read(group) for group in optimizer.param_groups]
        taken = [i for i, layer in enumerate(layers) if settings[layer.group].takes(layer.weight)]
        matrices = []
        for i in taken:
            rows, columns = memory_shape(layers[i].weight) or (0, 0)  # None: excluded by `why_not_fused`
            matrices.append(Matrix(rows, columns, tuple(settings[layers[i].group].polynomials)))
        dtype = next((product_dtype(settings[layers[i].group], layers[i].weight) for i in taken), torch.bfloat16)
        self._dtype, self._tile = PRODUCT_DTYPES[dtype], best_tile(matrices, dtype)
        iterations = max((len(matrix.polynomials) for matrix in matrices), default=0)

        # The result must be in `found`, so an odd number of iterations starts with the direction in `other`.
        slack = self._tile * max((matrix.padded[1] for matrix in matrices), default=0)  # tiles reach past the last
        squares = [_padded(matrix.side) ** 2 for matrix in matrices]
        self._shares = optimizer.shares
        deal = self._deal(matrices)
        self._found, self._other = (torch.zeros(deal.numel + slack, dtype=dtype, device=device) for _ in range(2))
        self._grams, self._squares = (torch.zeros(sum(squares) + slack, dtype=dtype, device=device) for _ in range(2))
        rows, factors, square = [], [], 0
        for i, matrix, share, squared in zip(taken, matrices, deal.shares, squares, strict=True):
            layer, h = layers[i], settings[layers[i].group]
            turns = [flat[share.offset :].data_ptr() for flat in (self._found, self._other)]
            first = turns if len(matrix.polynomials) % 2 == 0 else turns[::-1]
            smaller = [flat[square:].data_ptr() for flat in (self._grams, self._squares)]
            shape = (matrix.rows, matrix.columns, matrix.padded[1], _padded(matrix.side))
            rows.append((*first, turns[0], *smaller, *shape, *self._spans[i]))
            polynomials = [number for polynomial in matrix.polynomials for number in polynomial]
            unused = [0.0] * (3 * iterations - len(polynomials))
            factors.append([h.eps, h.adjustment(layer.weight), len(layer.weight) ** 0.5, *polynomials, *unused])
            square += squared

        tiles: list[tuple[int, ...]] = []
        self._waves: list[tuple[list[int], Tensor]] = []  # sizes of the launches; the results that other ranks need
        for wave, (start, stop) in enumerate(deal.waves):
            mine = (self._shares.comm.rank if self._shares else 0, wave)
            own = [m if (s.rank, s.wave) == mine else None for m, s in zip(matrices, deal.shares, strict=True)]
            more, counts = tile_rows(own, self._tile)
            tiles += more
            self._waves.append(([len(more)] if ONE_LAUNCH and more else counts, self._found[start:stop]))
        place_of = {i: place for place, i in enumerate(taken)}
        self._places = torch.tensor([place_of.get(i, -1) for i in range(len(layers))], dtype=torch.int64).to(device)
        self._matrices = torch.tensor(rows or [(0,)], dtype=torch.int64).to(device)
        self._factors = torch.tensor(factors or [(0.0,)]).to(device)
        self._tiles = torch.tensor(tiles or [(0,)], dtype=torch.int32).to(device)
        self._counters = torch.zeros(1 + len(matrices), dtype=torch.int32, device=device)

    def _launch(
        self, grads: list[Tensor | None], groups: list[Group], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        self._send(grads, groups)
        scaled, told = grad_scale is not None, found_inf is not None
        scale, common = self.outcome if grad_scale is None else grad_scale, self._common()
        # A launch may start while the previous one still runs, unless there is an exchange between them.
        follows: dict[str, Any] = {"launch_pdl": True} if self._overlap and self._shares is None else {}
        columns = self._factors.shape[1]
        direction_kernel[(self._count,)](
            *self._tables(),
            scale,
            self._places,
            self._matrices,
            self._counters,
            COUNTERS=len(self._counters),
            DTYPE=self._dtype,
            SCALED=scaled,
            **common,
        )
        handles = []
        for counts, found in self._waves:
            for count in counts:
                product_kernel[(count,)](
                    self._tiles,
                    self._matrices,
                    self._factors,
                    self._direction_partials,
                    self._counters,
                    FACTORS=columns,
                    PARTIALS=self._partials,
                    DTYPE=self._dtype,
                    TILE=self._tile,
                    OVERLAP=self._overlap,
                    num_warps=8 if self._tile == 128 else 4,
                    num_stages=STAGES,
                    maxnreg=REGISTERS,
                    **follows,
                )
            if self._shares is not None and not is_compiling():
                handles.append(self._shares.gather(found))
        for handle in handles:
            handle.wait()
        apply_kernel[(self._count,)](
            self._chunks,
            self._grads.tensor,
            self._grad_partials,
            self._weight_partials,
            self._new_weight_partials,
            self._clock,
            self._numbers.tensor,
            self._rates.tensor,
            scale,
            found_inf if told else self.outcome,
            self.outcome,
            self.stats,
            self._places,
            self._matrices,
            self._factors,
            SCALED=scaled,
            TOLD=told,
            DTYPE=self._dtype,
            FACTORS=columns,
            PARTIALS=self._partials,
            **common,
            **follows,
        )

    def _deal(self, matrices: list[Matrix]) -> Deal:
        """Returns the place of each matrix in the buffers, and the rank that orthogonalises it."""
        costs = [product_cost(matrix.rows, matrix.columns, len(matrix.polynomials)) for matrix in matrices]
        sizes = [matrix.size for matrix in matrices]
        return deal_out(costs, sizes, 1, waves=1) if self._shares is None else self._shares.deal(costs, sizes)


def _flags(group: Group) -> tuple[Any, ...]:
    """The settings that the tables depend on."""
    h = MUON_RULE.read(group)
    return "muon", tuple(h.polynomials), h.eps, h.adjust_lr, h.adapt, h.product_dtype


def _settings(group: Group) -> list[float]:
    names = ("momentum", "nesterov", "decoupled_weight_decay")
    return [*(float(group[name]) for name in names), -1.0 if group["maximize"] else 1.0, group["normalize_weights"]]


MUON_FORM = KernelForm(_flags, _settings, MuonKernels)
