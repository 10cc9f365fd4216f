"""Which kernel is fastest is measured once on a machine: a later process finds it on disk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyperbatch import choices
from hyperbatch.kernels import conv as convolution

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_products_are_timed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    conv = nn.Conv2d(64, 256, 1, bias=False).half().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(32, 64, 28, 28, device="cuda").half().to(memory_format=torch.channels_last)

    def results():
        monkeypatch.setattr(convolution, "_chosen", {})
        choices._opened.cache_clear()  # as a new process has it
        with torch.no_grad():
            z = convolution.convolve(x, conv)
            return z, convolution.input_gradient(z, x, conv, conv.weight), convolution.weight_gradient(z, x, conv, None)

    first = results()
    (path,) = (tmp_path / "choices").iterdir()
    assert torch.cuda.get_device_name() in path.read_text()
    monkeypatch.setattr(convolution, "_seconds", None)  # not needed
    assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
