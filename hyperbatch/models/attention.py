"""Torch's attention, without cuDNN's kernels where these may give wrong gradients.

On Hopper, torch uses cuDNN's kernels, which are the fastest: attention takes a fifth of ViT-S's step. But cuDNN's
backward pads keys to tiles of 128, and if 64 of them are left for the last tile, the padding counts as logits of 0. For
a query whose logits are all below -88, this leads to exp(88), which is infinite, and the gradient is nan, although the
output is right. In a network of 64 tokens, this happened after ten epochs. Other lengths are masked correctly. With a
single query, the gradients of keys and values have also been seen to be nan (NVIDIA/cudnn-frontend 628 and 1072,
pytorch/pytorch 196678).

Training therefore disables cuDNN's attention for all callers of torch's function (`without_cudnn`), and `attention`
enables it again for the shapes for which it is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TILE = 128  # number of keys in a tile of cuDNN's backward
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ALL = [SDPBackend.CUDNN_ATTENTION, *OTHERS]


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Returns F.scaled_dot_product_attention of tensors [samples, heads, tokens, width]."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    with sdpa_kernel(ALL if suits_cudnn(q.shape[2], k.shape[2]) else OTHERS):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def suits_cudnn(queries: int, keys: int) -> bool:
    return queries > 1 and keys % TILE != TILE // 2


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Disables cuDNN's attention for all calls of torch's function inside the block, and restores the setting after
    it."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
