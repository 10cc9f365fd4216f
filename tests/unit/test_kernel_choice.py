"""The gradient of average pools that training uses, in place of torch's on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hyperbatch.engine.kernel_choice import right_pool_gradients

POOLS = {
    "padding": {"kernel_size": 3, "stride": 2, "padding": 1},
    "edges that count less": {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    "padding of one side": {"kernel_size": (2, 3), "padding": (0, 1), "ceil_mode": True},
    "a divisor": {"kernel_size": 3, "padding": 1, "divisor_override": 5},
    "no padding": {"kernel_size": 2, "ceil_mode": True},
}


def gradient(memory_format, options):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 6).contiguous(memory_format=memory_format).requires_grad_()
    y = F.avg_pool2d(x, **options)
    return torch.autograd.grad(y, x, torch.randn(y.shape))[0]


@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_of_pools_are_torchs_and_padded_ones_are_computed_in_nchw(memory_format, options):
    expected = gradient(memory_format, options)
    with right_pool_gradients("CPU"):
        with right_pool_gradients("CPU"):
            pass
        replaced = gradient(memory_format, options)
    assert torch.equal(replaced, expected)
    in_nchw = memory_format == torch.contiguous_format or "padding" in options
    assert replaced.is_contiguous(memory_format=torch.contiguous_format if in_nchw else torch.channels_last)
    after = gradient(memory_format, options)
    assert after.is_contiguous(memory_format=memory_format)
