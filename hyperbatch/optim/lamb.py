"""LAMB (You et al., 2019) on the same norms as LARS."""

from __future__ import annotations

import torch


class LAMB(torch.optim.Optimizer):
    pass
