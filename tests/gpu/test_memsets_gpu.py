"""Memsets of captured graphs become kernels that write the same."""

from __future__ import annotations

import ctypes

import pytest
import torch

from hyperbatch.kernels import memsets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def memset(tensor: torch.Tensor, value: int, size: int, count: int) -> None:
    """By the driver, on the stream that is captured."""
    name = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[size]
    kinds = {1: ctypes.c_ubyte, 2: ctypes.c_ushort, 4: ctypes.c_uint}
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointer = ctypes.c_uint64(tensor.data_ptr())
    memsets._call(name, pointer, kinds[size](value), ctypes.c_size_t(count), stream)


def captured(run) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize(
    ("size", "count", "value"), [(4, 1, 0), (4, 1, 0xDEADBEEF), (4, 1000, 7), (1, 8, 0xAB), (2, 6, 0x1234)]
)
def test_what_they_write_and_when_stays_the_same(size, count, value):
    target = torch.empty(1024, dtype=torch.int32, device="cuda")
    before, after = torch.empty_like(target), torch.empty_like(target)

    def run():
        target.fill_(-1)
        before.copy_(target)
        memset(target, value, size, count)
        after.copy_(target)
        target.add_(1)

    run()
    want = before.clone(), after.clone(), target.clone()
    graph = captured(run)
    assert memsets.replace_memsets(graph) == 1
    graph.instantiate()
    for tensor in (before, after, target):
        tensor.fill_(5)
    graph.replay()
    for got, expected in zip((before, after, target), want, strict=True):
        assert torch.equal(got, expected)
    assert not torch.equal(want[0], want[1])


def test_large_and_odd_ones_stay():
    target = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def run():
        memset(target, 3, 1, 1 << 20)
        memset(target, 4, 1, 7)

    graph = captured(run)
    assert memsets.replace_memsets(graph) == 0
    graph.instantiate()
    graph.replay()
    assert target[:8].tolist() == [4] * 7 + [3]


def test_two_that_nothing_follows():
    target = torch.zeros(4, dtype=torch.int32, device="cuda")

    def run():
        memset(target, 1, 4, 2)
        memset(target[2:], 2, 4, 2)

    graph = captured(run)
    assert memsets.replace_memsets(graph) == 2
    graph.instantiate()
    graph.replay()
    assert target.tolist() == [1, 1, 2, 2]


def test_a_driver_that_does_not_tell_leaves_the_graph_as_it_is(monkeypatch):
    target = torch.zeros(4, dtype=torch.int32, device="cuda")
    graph = captured(lambda: memset(target, 9, 4, 4))
    call = memsets._call

    def refuse(name, *arguments):
        if name == "cuGraphNodeGetDependencies":
            raise RuntimeError("no")
        call(name, *arguments)

    monkeypatch.setattr(memsets, "_call", refuse)
    assert memsets.replace_memsets(graph) == 0
    graph.instantiate()
    graph.replay()
    assert target.tolist() == [9] * 4
