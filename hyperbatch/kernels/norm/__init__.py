"""Batch norm, ReLU and the residual add of 16-bit channels-last tensors, in as few passes as possible (Triton).

A channels-last tensor [n, c, h, w] is a matrix of n*h*w rows and c columns. Bytes are counted in passes over it:

    statistics   x                      -> coef: mean, rstd, scale, shift; running statistics     1 read
    normalise    relu(x * scale + shift [+ shortcut])                                             1 read, 1 write
    join         relu(norm(x) + shortcut), and one bit per element: whether the ReLU passed it
                                                                                                  2 reads, 1 1/16 writes
    reduce       g = dy where the ReLU passed x -> sums of g and g * (x - mean)                   2 reads
                                        -> back: a, b, d; gradients of weight and bias
    apply        dx = a * g + b * x + d                                                           2 reads, 1 write

Each file is one way to compute this, with a reference with which it must agree:

    two_pass     for any tensor: the passes above, one launch each               torch.batch_norm, relu, add
    one_pass     for a small tensor: programs keep their tile in registers from  the same
                 one pass to the next, in one launch: 1 read, 1 write
    dispatch     what a layer calls: one_pass if the tensor is small, else two_pass
    product      after a 1x1 convolution, from the moments of its input:         two_pass after torch's convolution
    moments      the convolution's output is not read
    gated        before a sum, when each image scales its channels (squeeze-     torch.batch_norm, mean, mul, add, relu
                 excite)
    pool         with a max-pool after it; nothing of x's size is stored         torch.batch_norm, relu, max_pool2d
    unit         with a max-pool before it, and SiLU or GELU after it            torch.max_pool2d, batch_norm, silu

All of them use `tiles`, which divides rows among programs, and `sums`, which adds up the programs' sums. The tests
compare all of them with float64: tests/norm_reference.py, product_reference.py, gated_reference.py, pool_reference.py
and unit_reference.py.
"""

from hyperbatch.kernels.norm.dispatch import join_backward, norm_join, norm_relu, norm_relu_backward
from hyperbatch.kernels.norm.sums import Branch, NormGradients, new_coef, new_counters
from hyperbatch.kernels.norm.tiles import Handed, OfBlurred, OfMeans, matrix
from hyperbatch.kernels.norm.two_pass import (
    apply_gradient,
    join,
    normalise,
    reduce_gradient,
    reduce_joined_gradient,
    statistics,
)

__all__ = [
    "Branch",
    "Handed",
    "NormGradients",
    "OfBlurred",
    "OfMeans",
    "apply_gradient",
    "join",
    "join_backward",
    "matrix",
    "new_coef",
    "new_counters",
    "norm_join",
    "norm_relu",
    "norm_relu_backward",
    "normalise",
    "reduce_gradient",
    "reduce_joined_gradient",
    "statistics",
]
