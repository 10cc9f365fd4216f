"""Torch's attention, without the one of its kernels that may spoil gradients.

On Hopper torch takes cuDNN's kernels, which are the fastest: attention is a fifth of ViT-S's step. But cuDNN's backward
pads keys to tiles of 128, and where 64 of them are left for the last tile, the padding counts as logits of 0. A query
all of whose logits are below -88 then meets exp(88), which is infinite, and gets a gradient of nan, while its output is
right. A network of 64 tokens came to that after ten epochs. Other lengths are masked as they should be. With a single
query, keys and values have been seen to get nan, too (NVIDIA/cudnn-frontend 628 and 1072, pytorch/pytorch 196678).

So training is done without cuDNN's attention, whoever calls torch's function (`without_cudnn`), and `attention` takes
it nevertheless where it is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TILE = 128  # keys that cuDNN's backward takes at once
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ALL = [SDPBackend.CUDNN_ATTENTION, *OTHERS]


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """F.scaled_dot_product_attention of [samples, heads, tokens, width]."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    with sdpa_kernel(ALL if suits_cudnn(q.shape[2], k.shape[2]) else OTHERS):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def suits_cudnn(queries: int, keys: int) -> bool:
    return queries > 1 and keys % TILE != TILE // 2


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """For all calls of torch's function; as before when the block is left."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
