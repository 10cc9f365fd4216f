"""Memsets of a graph become kernels: what is done to the graph, with a driver that is played. Truth: tests/gpu."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from hyperbatch.kernels import memsets


class Driver:
    """A chain of nodes, kept as the dependencies of each; some calls may be refused."""

    def __init__(self, monkeypatch, kinds, refuse=()):
        self.before = {i + 1: {i} if i else set() for i in range(len(kinds))}
        self.kinds, self.refuse = dict(enumerate(kinds, 1)), refuse
        monkeypatch.setattr(memsets, "_call", self.call)
        monkeypatch.setattr(memsets, "_nodes", self.nodes)
        monkeypatch.setattr(memsets, "_small_memset", lambda node: self.kinds[node.value] == "memset" or None)
        monkeypatch.setattr(memsets, "_add_fill", self.add_fill)

    def nodes(self, name, of):
        if name == "cuGraphGetNodes":
            found = list(self.before)
        elif name == "cuGraphNodeGetDependencies":
            found = self.before[of.value]
        else:
            found = [node for node, before in self.before.items() if of.value in before]
        return [ctypes.c_void_p(node) for node in found]

    def add_fill(self, graph, before, memset):
        node = max(self.before) + 1
        self.before[node], self.kinds[node] = {other.value for other in before}, "fill"
        return ctypes.c_void_p(node)

    def call(self, name, *arguments):
        if name in self.refuse:
            raise RuntimeError(f"{name} answers with error 1")
        if name == "cuGraphAddDependencies":
            _, before, after, count = arguments
            for i in range(count.value):
                self.before[after[i]].add(before[i])
        else:
            assert name == "cuGraphDestroyNode"
            gone = arguments[0].value
            del self.before[gone]
            for before in self.before.values():
                before.discard(gone)

    def chain(self):
        """Kinds in the order they run."""
        order, left = [], dict(self.before)
        while left:
            (ready,) = [node for node, before in left.items() if not before & set(left)]  # never two at once
            order.append(self.kinds[ready])
            del left[ready]
        return order


def test_the_kernel_compiled_for_hopper_takes_what_the_node_hands_it(monkeypatch):
    """Triton adds arguments of its own: one that the node lacks would be read from wherever the list ends."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from hyperbatch.kernels import fill

    compiled = fill.compile_fill(GPUTarget("cuda", 90, 32))
    handed = []

    def call(name, *arguments):
        if name == "cuModuleLoadData":
            assert arguments[1].startswith(b"\x7fELF")
        elif name == "cuModuleGetFunction":
            assert arguments[2] == b"fill"
            arguments[0]._obj.value = 7
        else:
            kernel = arguments[-1]._obj
            handed.append((kernel.function, tuple(kernel.grid), tuple(kernel.block), kernel.shared_bytes))
            words = [ctypes.cast(kernel.arguments[i], ctypes.POINTER(ctypes.c_uint32))[0] for i in (1, 2)]
            handed.append((ctypes.cast(kernel.arguments[0], ctypes.POINTER(ctypes.c_uint64))[0], *words))

    memsets._fill_function.cache_clear()
    monkeypatch.setattr(fill, "compile_fill", lambda: compiled)
    monkeypatch.setattr(memsets, "_call", call)
    monkeypatch.setattr(memsets.torch.cuda, "current_device", lambda: 0)
    memset = memsets._Memset(to=1 << 40, value=0xAB, size=1, width=8, height=1)
    memsets._add_fill(ctypes.c_void_p(1), [], memset)
    memsets._fill_function.cache_clear()
    assert handed == [(7, (1, 1, 1), (fill.THREADS, 1, 1), compiled.metadata.shared), (1 << 40, 0xABABABAB, 2)]
    ptx = compiled.asm["ptx"]
    head = ptx[ptx.index(".entry fill(") : ptx.index("{", ptx.index(".entry fill("))]
    types = [line.split()[1] for line in head.splitlines() if line.strip().startswith(".param")]
    assert types == [".u64", ".u32", ".u32", ".u64", ".u64"], "an address, two words, and Triton's two addresses"
    assert f".reqntid {fill.THREADS}" in head


GRAPH = SimpleNamespace(raw_cuda_graph=lambda: 1)


@pytest.mark.parametrize(
    "kinds", [["kernel", "memset", "kernel"], ["memset", "memset", "kernel", "memset"], ["kernel"], ["memset"]]
)
def test_the_order_stays(monkeypatch, kinds):
    driver = Driver(monkeypatch, kinds)
    assert memsets.replace_memsets(GRAPH) == kinds.count("memset")  # type: ignore[arg-type]
    assert driver.chain() == ["fill" if kind == "memset" else kind for kind in kinds]


def test_a_kernel_that_nobody_would_wait_for_goes_again(monkeypatch):
    """It would clear a counter while the next kernel counts."""
    driver = Driver(monkeypatch, ["kernel", "memset", "kernel"], refuse=("cuGraphAddDependencies",))
    assert memsets.replace_memsets(GRAPH) == 0  # type: ignore[arg-type]
    assert driver.chain() == ["kernel", "memset", "kernel"]


def test_without_a_driver_nothing_happens(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(memsets, "_driver", missing)
    assert memsets.replace_memsets(GRAPH) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "width", "height", "to", "small"),
    [(4, 1, 1, 512, True), (1, 8, 1, 512, True), (1, 7, 1, 512, False), (4, 1, 2, 512, False), (4, 1, 1, 514, False)]
    + [(4, 1024, 1, 0, True), (4, 1025, 1, 0, False)],
)
def test_which_are_replaced(monkeypatch, size, width, height, to, small):
    def call(name, node, answer):
        if name == "cuGraphNodeGetType":
            answer._obj.value = 2
        else:
            for field, value in (("to", to), ("size", size), ("width", width), ("height", height)):
                setattr(answer._obj, field, value)

    monkeypatch.setattr(memsets, "_call", call)
    assert (memsets._small_memset(ctypes.c_void_p(1)) is not None) == small
