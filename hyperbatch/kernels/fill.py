"""Sets a few words of memory to one value: the kernel with which `kernels.memsets` replaces a memset (Triton)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource

THREADS = 32


@triton.jit
def fill(to, value, count, BLOCK: tl.constexpr):
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(to + i, value, mask=i < count)


def compile_fill(target: Any = None) -> Any:
    """The kernel, compiled for this GPU or another target; `to` need not be aligned to more than a word.

    Its arguments: to, value, count, and two addresses of scratch memory, which Triton adds and this kernel never reads.
    """
    signature = {"to": "*i32", "value": "i32", "count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=fill, signature=signature, constexprs={"BLOCK": THREADS})
    return triton.compile(source, target=target, options={"num_warps": THREADS // 32})
