"""Compiles the regions of a model (models/regions.py) with inductor, in place.

    model(images), training      stem -> [region] -> [region] -> head        each calls its kind's compiled function
    model(images), evaluation    stem -> block    -> block    -> head        the model's own code

A region remains the same module: names, parameters, hooks and the state dict do not change, and a copy of the model is
not compiled. The gradients of a region arrive together, and are copied to the arena group by group like those of any
other layer. Inductor makes no CUDA graphs of its own; the graph of the step contains everything.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hyperbatch.choices import cache_folder
from hyperbatch.config import Config
from hyperbatch.cores import usable_cores
from hyperbatch.models.alexnet import AlexNetBN
from hyperbatch.models.depthwise import DepthwiseConv2d
from hyperbatch.models.quick import quicken
from hyperbatch.models.regions import Region, find_regions
from hyperbatch.models.resnet import ResNet
from hyperbatch.models.whitenet import WhiteNet
from hyperbatch.params import HALF_DTYPES

MOST_VARIANTS = 64  # of one kind of region: one per batch shape and per setting that torch treats as a constant
Count = Callable[[int, int], None]


@dataclass(kw_only=True, slots=True)
class Compilation:
    """The effect of `--compile`, for the record and the report."""

    choice: str  # the option's value
    regions: int = 0  # number of regions that run compiled
    kinds: int = 0  # regions that are built alike are of one kind
    compilations: int = 0  # one per kind and shape; forward and backward count as one
    cache_hits: int = 0  # graphs (forward and backward count one each) that were found on the disk
    cache_misses: int = 0  # graphs that were compiled
    seconds: float = 0.0
    reason: str = ""  # why nothing is compiled
    to_dict = asdict


class CompiledRegions:
    """A model's regions. They run as plain code until `compiling` is entered, and again after `give_up`."""

    def __init__(self, regions: tuple[Region, ...], choice: str, options: dict[str, Any]) -> None:
        self.about = Compilation(choice=choice, kinds=len({region.kind for region in regions}))
        self._regions = regions
        self._functions = {
            region.kind: _function(f"{type(region.module).__name__}_{region.kind}") for region in regions
        }
        self._options = options
        self._called: set[int] = set()  # kinds whose forward has run in this `compiling`
        self._count: Count | None = None

    @property
    def failed(self) -> bool:
        return bool(self.about.reason)

    @property
    def stage(self) -> str:
        """The console's text while the regions are compiled."""
        return "compiling the model" if len(self._regions) == 1 else "compiling the model's blocks"

    @contextlib.contextmanager
    def compiling(self, count: Count | None = None) -> Iterator[None]:
        """Training steps inside this context compile the regions, which stay compiled afterwards. Errors of torch are
        not caught. count: called when a kind of region has completed its first forward pass."""
        import torch._dynamo.config as dynamo_config

        start_s, before = time.monotonic(), _counters()
        self._attach()
        self._called.clear()
        self._count = count
        try:
            # torch's default limit of 8 guards against endless recompilation; a run may legitimately have more shapes.
            with warnings.catch_warnings(), dynamo_config.patch(recompile_limit=MOST_VARIANTS):
                warnings.simplefilter("ignore")  # advice about how models should be written
                yield
        finally:
            self._count = None
            about, after = self.about, _counters()
            about.seconds += time.monotonic() - start_s
            about.compilations += after[0] - before[0]
            about.cache_hits += after[1] - before[1]
            about.cache_misses += after[2] - before[2]

    def give_up(self, reason: str) -> None:
        """Switches every region back to plain code. reason: for the record."""
        for region in self._regions:
            region.module._compiled_call_impl = None
        self.about.regions, self.about.reason = 0, reason

    def _attach(self) -> None:
        if self.about.regions:
            return
        compiled = {kind: compile_function(function, self._options) for kind, function in self._functions.items()}
        self.about.regions = len(self._regions)
        for region in self._regions:
            # `Module.compile` sets the same attribute. Copies and pickles of the module do not contain it. Unlike
            # there, `_Call` runs the compiled function in training only.
            region.module._compiled_call_impl = _Call(self, region, compiled[region.kind])

    def called(self, kind: int) -> None:
        if self._count is not None and kind not in self._called:
            self._called.add(kind)
            self._count(len(self._called), self.about.kinds)


@dataclass(frozen=True, slots=True)
class _Call:
    """Runs in place of a region's own code when the region is called."""

    regions: CompiledRegions
    region: Region
    compiled: Callable[..., Any]

    def __call__(self, *args: Any, **named: Any) -> Any:
        module = self.region.module
        # Evaluation may replace a module's tensors by others, and is not worth a compilation.
        if not (module.training and torch.is_grad_enabled()):
            return module._call_impl(*args, **named)
        result = self.compiled(module, *args, **named)
        self.regions.called(self.region.kind)
        return result


def _call_module(module: nn.Module, *args: Any, **named: Any) -> Any:
    return module._call_impl(*args, **named)


def _function(name: str) -> Callable[..., Any]:
    """Returns a copy of `_call_module` with its own code object and this name. torch stores compiled variants per code
    object and limits their number; otherwise all kinds, and modules that other code compiles, would share one limit.
    """
    return FunctionType(_call_module.__code__.replace(co_name=name), globals(), name)


def compile_function(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compiles a function as one graph, and separately for each shape.

    A graph break is an error, because its parts would be neither counted nor measured. Code for dynamic shapes would be
    slower, and a run has few shapes.
    """
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def prepare_compiler(ranks_per_host: int) -> None:
    """Lets torch's compiler keep its cache in the user's cache folder instead of /tmp, and share the cores between
    ranks. Values that the user has set are kept. Must be called early: torch reads these variables when it loads its
    compiler, and building an optimizer may load it."""
    folder = cache_folder()
    if folder.is_absolute():
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    if ranks_per_host > 1:
        processes = max(1, usable_cores() // ranks_per_host)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(processes))


def _counters() -> tuple[int, int, int]:
    """Returns the numbers of graphs that this process has traced, found on the disk, and compiled so far."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    misses = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    return counters["stats"]["unique_graphs"], inductor["fxgraph_cache_hit"], misses


def choose_regions(
    config: Config, model: nn.Module, dtype: torch.dtype, device: torch.device, *, fused: bool
) -> CompiledRegions | Compilation:
    """Returns the regions to compile, or the reason why there are none. On a GPU, it replaces some layers of the model
    by faster implementations of ours."""
    choice = config.model.compile
    reason = ""
    if choice == "off":
        reason = "--compile off"
    elif fused:
        reason = "fused kernels replace its layers"
    elif config.model.bn_group_ranks > 1:
        reason = "with --bn-group-ranks, its layers exchange statistics"
    elif choice == "auto":
        if device.type != "cuda":
            reason = f"--compile auto compiles only on a GPU, not on the {device.type.upper()}"
        elif dtype not in HALF_DTYPES:
            reason = "--compile auto compiles only in fp16 and bf16"
        elif isinstance(model, ResNet | AlexNetBN | WhiteNet):
            reason = "--compile auto does not compile models that have fused kernels"
        elif config.run.deterministic:
            reason = "--compile auto does not compile with --deterministic"
    if reason:
        return Compilation(choice=choice, reason=reason)
    options: dict[str, Any] = {"triton.cudagraphs": False}
    if config.run.deterministic:
        options["deterministic"] = True  # otherwise kernels are chosen by timing, and the order of additions may vary
    if device.type == "cuda" and dtype in HALF_DTYPES:
        quicken(model)
        if any(isinstance(module, DepthwiseConv2d) for module in model.modules()):
            from hyperbatch.models.depthwise_sums import SumsInDepthwise  # loads inductor

            options["post_grad_custom_post_pass"] = SumsInDepthwise()
    return CompiledRegions(find_regions(model), choice, options)


def reason_of(error: BaseException) -> str:
    """Returns in one line why the model could not be compiled."""
    inner = getattr(error, "inner_exception", None)  # set where torch wraps an error of the compiler's backend
    while inner is not None:
        error, inner = inner, getattr(inner, "inner_exception", None)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].strip()}".removesuffix(": ")
