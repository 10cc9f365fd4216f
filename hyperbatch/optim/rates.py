"""The rates of several steps, sent to the device in one copy. A CUDA graph of these steps reads them row by row.

host     write   [ lr, weight_decay, lr, ... of step 0 ]
                 [ lr, weight_decay, lr, ... of step 1 ]  -> one copy
device   apply   row of this step -> group["lr"], group["weight_decay"], ...
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperbatch.optim.build import settings_at


class RateTable:
    """The values that `set_rate` sets, for each step of a stride. Before the first `write` they are the groups' own."""

    def __init__(self, optimizer: torch.optim.Optimizer, rows: int) -> None:
        self._optimizer = optimizer
        self._settings = [(group, name) for group, name, _ in settings_at(optimizer, 0.0)]
        here = [group[name] for group, name in self._settings]
        self._rows = [[0.0 if isinstance(value, Tensor) else value for value in here]] * rows
        # Rates are on the device if steps can be captured (capturable), else on the host.
        device = next((value.device for value in here if isinstance(value, Tensor)), None)
        self._table = None
        if device is not None:
            row = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in here])
            self._table = row.repeat(rows, 1)

    def write(self, rates: Sequence[tuple[float, ...]]) -> None:
        """Writes the rates of the next steps, each as arguments of `settings_at`. Does not wait for the device."""
        self._rows = [[value for *_, value in settings_at(self._optimizer, *rate)] for rate in rates]
        if self._table is not None:
            # Each call allocates a new pinned block, since the copy from the last one may still be in progress.
            values = torch.tensor(self._rows, dtype=self._table.dtype, pin_memory=self._table.is_cuda)
            self._table[: len(values)].copy_(values, non_blocking=True)

    def apply(self, row: int) -> None:
        """Sets the groups' rates from this row. On the device this is one launch, which can be captured."""
        targets, sources = [], []
        for column, (group, name) in enumerate(self._settings):
            if isinstance(group[name], Tensor):
                assert self._table is not None
                targets.append(group[name])
                sources.append(self._table[row, column])
            else:
                group[name] = self._rows[row][column]
        if targets:
            torch._foreach_copy_(targets, sources)
