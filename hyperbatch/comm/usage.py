"""Checks that all ranks used the same parameters in a step: one bit per rank and parameter, summed over the ranks.

A parameter that only some ranks used would be updated only there, and the weights would differ from then on. The bits
are sent after the last gradient group of every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperbatch.comm.collectives import all_reduce_now
from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.place import ranges
from hyperbatch.errors import InputError

_RANKS_PER_WORD = 62  # one power of two per rank, so that a sum shows its ranks and stays below the sign bit
_SHOWN_NAMES = 3


def usage_bits(used: Sequence[bool], comm: GridComm, device: torch.device) -> Tensor:
    """Returns this rank's bits on the host, words x parameters. For a GPU they are pinned, so that the copy does not
    block."""
    words = -(-comm.size // _RANKS_PER_WORD)
    bits = torch.zeros(words, len(used), dtype=torch.int64, pin_memory=device.type == "cuda")
    bits[comm.rank // _RANKS_PER_WORD] = torch.tensor(used) * (1 << comm.rank % _RANKS_PER_WORD)
    return bits


def exchange_usage(bits: Tensor, comm: GridComm, device: torch.device) -> None:
    """Sums the bits over ranks in place. It runs as an exchange: on a GPU the sum is ready when the exchange's handle
    is done."""
    summed = bits.to(device, non_blocking=True)
    all_reduce_now(summed, comm, "flat", "sum")
    if summed is not bits:
        bits.copy_(summed, non_blocking=True)


def check_usage(bits: Tensor, names: Sequence[str], comm: GridComm) -> None:
    """Raises the same InputError on every rank if the summed bits show a parameter that only some ranks used."""
    places = range(0, comm.size, _RANKS_PER_WORD)
    everyone = torch.tensor([[(1 << min(_RANKS_PER_WORD, comm.size - first)) - 1] for first in places])
    partly = ~((bits == everyone).all(0) | (bits == 0).all(0))
    if not partly.any():
        return
    index = int(partly.nonzero()[0])
    column: list[int] = bits[:, index].tolist()
    alike: list[int] = (bits == bits[:, index : index + 1]).all(0).nonzero().flatten().tolist()
    users = [r for i, r in enumerate(comm.members) if column[i // _RANKS_PER_WORD] >> i % _RANKS_PER_WORD & 1]
    more = len(alike) - _SHOWN_NAMES
    shown = ", ".join(names[i] for i in alike[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
    raise InputError(
        f"{shown}: got a gradient on {len(users)} of {comm.size} ranks only ({ranges(users)}); "
        "make every rank run the same layers in each step, or freeze these parameters"
    )
