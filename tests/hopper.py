"""Compiles kernels for a Hopper GPU where they would be launched. For machines without one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from hyperbatch.kernels.compile import Kernel

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    int: "i32",
    float: "fp32",
}


def compile_launches(monkeypatch: Any, *modules: Any) -> dict[str, str]:
    """From now on, what `modules` launch is compiled instead: name of each kernel -> its PTX, of the last launch."""
    compiled: dict[str, str] = {}
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            found = getattr(module, name)
            found = found.fn if isinstance(found, Kernel) else found
            monkeypatch.setattr(module, name, _Compiler(found, name, compiled))
    return compiled


def type_of(value: Any) -> Any:
    """As Triton writes it; a tuple of arguments has a tuple of types."""
    if isinstance(value, tuple):
        return tuple(type_of(item) for item in value)
    return TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]


def paths_of_tensors(value: Any, path: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Where tensors stand in an argument: its index, and indices of tuples in it."""
    if isinstance(value, tuple):
        return [found for i, item in enumerate(value) for found in paths_of_tensors(item, (*path, i))]
    return [path] if isinstance(value, torch.Tensor) else []


class _Compiler:
    def __init__(self, kernel: Any, name: str, compiled: dict[str, str]) -> None:
        self.kernel, self.name, self.compiled = kernel, name, compiled

    def __getitem__(self, grid: Any) -> _Compiler:
        return self

    def __call__(self, *args: Any, num_warps: int = 4, launch_pdl: bool = False, **constants: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        values = dict(zip(names, args))
        missing = {n: None for n, value in values.items() if value is None}  # a constant, as for Triton itself
        values = {n: value for n, value in values.items() if value is not None}
        signature = {n: type_of(values[n]) if n in values else "constexpr" for n in names}
        paths = [path for i, n in enumerate(names) for path in paths_of_tensors(values.get(n), (i,))]
        paths += [(i,) for i, n in enumerate(names) if n == "C" and n in values]
        aligned = {path: [["tt.divisibility", 16]] for path in paths}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants | missing, attrs=aligned)
        options = {"num_warps": num_warps, "launch_pdl": launch_pdl}
        asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
        self.compiled[self.name] = asm["ptx"]


def spilled_bytes(ptx: str) -> int:
    """What a thread would store in memory for want of registers."""
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", _assembled(ptx))))


def registers(ptx: str) -> int:
    """Of a thread."""
    (count,) = re.findall(r"Used (\d+) registers", _assembled(ptx))
    return int(count)


def _assembled(ptx: str) -> str:
    """What the assembler that comes with Triton says about a kernel."""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [assembler, "-v", "-arch=sm_90a", "-o", os.devnull, "-"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr


def before_the_wait(ptx: str) -> int:
    """How often a kernel touches global memory before it waits for the launch before it (griddepcontrol.wait)."""
    early, wait, _ = ptx.partition("griddepcontrol.wait")
    assert wait, "it does not wait"
    return sum(early.count(access) for access in ("ld.global", "st.global", "cp.async", "atom.global", "red.global"))
