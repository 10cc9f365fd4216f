"""Replaces small memsets in a captured CUDA graph by kernels.

cuBLAS and cuDNN clear a counter of 4 bytes before many of their kernels. In a graph this is a memset node, which
interrupts the chain of kernels: 5 to 6 us each on an H200, 30 to 80 times in a step of ResNet-50. A kernel takes 2 us
instead (`kernels.fill`). This uses the driver's interface, since torch gives access to graphs, but not to their nodes.

    before   kernel -> memset -> kernel          after   kernel -> fill -> kernel
"""

from __future__ import annotations

import ctypes
import functools

import torch

MAX_BYTES = 4096  # larger memsets are left to the copy engines
_MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET


class _Memset(ctypes.Structure):  # CUDA_MEMSET_NODE_PARAMS
    _fields_ = (
        ("to", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("size", ctypes.c_uint),  # bytes of an element
        ("width", ctypes.c_size_t),  # number of elements
        ("height", ctypes.c_size_t),
    )


class _Kernel(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def replace_memsets(graph: torch.cuda.CUDAGraph) -> int:
    """Replaces small memsets in a graph that was captured with keep_graph=True and is not instantiated yet.

    Returns how many were replaced. Without Triton, or if the driver refuses, these are fewer or none, and the graph
    remains valid.
    """
    handle, replaced = ctypes.c_void_p(graph.raw_cuda_graph()), 0
    try:
        for node in _nodes("cuGraphGetNodes", handle):
            memset = _small_memset(node)
            if memset is not None:
                _replace(handle, node, memset)
                replaced += 1
    except (
        ImportError,
        OSError,
        AttributeError,
        RuntimeError,
    ):  # no Triton, no driver, no such function, or an error of the driver
        pass
    return replaced


def _replace(graph: ctypes.c_void_p, node: ctypes.c_void_p, memset: _Memset) -> None:
    after = _nodes("cuGraphNodeGetDependentNodes", node)
    fill = _add_fill(graph, _nodes("cuGraphNodeGetDependencies", node), memset)
    try:
        if after:
            count = ctypes.c_size_t(len(after))
            _call("cuGraphAddDependencies", graph, _array([fill] * len(after)), _array(after), count)
    except RuntimeError:
        _call("cuGraphDestroyNode", fill)  # otherwise nothing would wait for it
        raise
    _call("cuGraphDestroyNode", node)


def _small_memset(node: ctypes.c_void_p) -> _Memset | None:
    """Returns the parameters of a node if it is a memset of a few whole words, else None."""
    kind, memset = ctypes.c_int(), _Memset()
    _call("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != _MEMSET:
        return None
    _call("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
    nbytes = memset.size * memset.width
    if memset.height != 1 or nbytes > MAX_BYTES or nbytes % 4 or memset.to % 4:
        return None
    return memset


def _add_fill(graph: ctypes.c_void_p, before: list[ctypes.c_void_p], memset: _Memset) -> ctypes.c_void_p:
    element = memset.value & ((1 << 8 * memset.size) - 1)
    word = sum(element << 8 * at for at in range(0, 4, memset.size))  # repeats the element to fill a word
    function, threads = _fill_function(torch.cuda.current_device())
    values = ctypes.c_uint64(memset.to), ctypes.c_uint32(word), ctypes.c_uint32(memset.size * memset.width // 4)
    values += ctypes.c_uint64(0), ctypes.c_uint64(0)  # scratch memory of Triton, which the kernel does not use
    addresses = (ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
    kernel = _Kernel(function=function, grid=(1, 1, 1), block=(threads, 1, 1))
    kernel.arguments = (ctypes.c_void_p * len(values))(*addresses)
    node = ctypes.c_void_p()
    count = ctypes.c_size_t(len(before))
    _call("cuGraphAddKernelNode_v2", ctypes.byref(node), graph, _array(before), count, ctypes.byref(kernel))
    return node


@functools.cache
def _fill_function(device: int) -> tuple[int, int]:
    """Returns the kernel and its number of threads. Loaded once per device and never unloaded: graphs use it."""
    from hyperbatch.kernels.fill import THREADS, compile_fill

    compiled, module, function = compile_fill(), ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), compiled.asm["cubin"])
    _call("cuModuleGetFunction", ctypes.byref(function), module, compiled.metadata.name.encode())
    if function.value is None:
        raise RuntimeError("the driver loaded no function")
    return function.value, THREADS


def _nodes(name: str, of: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    """Calls the driver twice, as its interface requires: first for the number of nodes, then for the nodes."""
    count = ctypes.c_size_t(0)
    _call(name, of, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        _call(name, of, nodes, ctypes.byref(count))
    return [ctypes.c_void_p(node) for node in nodes]


def _array(nodes: list[ctypes.c_void_p]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(nodes))(*nodes)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name} answers with error {code}")
