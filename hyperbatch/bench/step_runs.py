"""The training steps that `bench step` times: forward, label-smoothed loss, backward, loss scaling, update.

    ours    the engine's step: fused kernels, compiled blocks or plain torch, weights in an arena, LARS, one CUDA graph
    peers   torchvision's, timm's or your own model as it is (ours if torchvision has none), torch's fused SGD:
            eager     autocast, GradScaler
            graph     the same, captured
            masters   16-bit weights with fp32 masters in the script, captured
            compile   torch.compile of the model; loss, scaler and SGD as in eager

All candidates use one batch that is already on the device, in the working precision and channels_last.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperbatch.bench.step_device import release_memory
from hyperbatch.config import BatchPhase, Config
from hyperbatch.data.batch import Batch
from hyperbatch.engine.cuda_graphs import forget_workspaces
from hyperbatch.engine.kernel_choice import training_kernels
from hyperbatch.engine.learner import build_learner
from hyperbatch.engine.loop import micro_step, train_stride
from hyperbatch.engine.measure import peak_bytes
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.runner import StepRunner
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.errors import RunFailed
from hyperbatch.models import create_model
from hyperbatch.models.build import foreign_model
from hyperbatch.models.fused import why_not_fused
from hyperbatch.models.layers import to_channels_last
from hyperbatch.optim.precision import working_dtype
from hyperbatch.params import HALF_DTYPES
from hyperbatch.schedule import resolve_phases, steps
from hyperbatch.stopwatch import wall_s
from hyperbatch.vocabulary import is_foreign

SMOOTHING = 0.1
LOSS_SCALE = 1024.0  # low enough that no step is skipped, because a skipped update would be faster
WARMUP_STEPS = 3  # before a capture, while kernels are selected and lazy state is created
PEERS = ("eager", "graph", "masters", "compile")
MAX_AUTOTUNE = "max-autotune"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The settings that all candidates share."""

    model: str
    precision: str
    image_size: int
    classes: int
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One batch and the setting in which it is trained."""

    setting: Setting
    images: Tensor
    labels: Tensor

    @property
    def device(self) -> torch.device:
        return self.setting.device

    @property
    def dtype(self) -> torch.dtype:
        return working_dtype(self.setting.precision)

    @property
    def half(self) -> bool:
        return self.dtype in HALF_DTYPES

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, which only fp16 needs."""
        return self.setting.precision == "fp16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A step that is ready to run. `loss_scale` reads the device; the scale decreases when an update is skipped."""

    run: Callable[[], Any]
    model: nn.Module
    loss_scale: Callable[[], float]
    compiled: dict[str, Any] | None = None  # details of our own compilation; None if there was none

    def is_finite(self) -> bool:
        """Whether all weights are finite. Steps with infinities and nans could be faster than real ones."""
        return all(bool(param.isfinite().all()) for param in self.model.parameters())


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A candidate before it is built."""

    name: str
    build: Callable[[Task], Built]
    peer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A built candidate, and the time and memory that building took. The memory excludes the batch, which all share."""

    spec: Spec
    built: Built
    set_up_s: float
    peak_memory_bytes: int | None


def make_task(setting: Setting, batch: int) -> Task:
    side, dtype = setting.image_size, working_dtype(setting.precision)
    images = torch.randn(batch, 3, side, side, device=setting.device, dtype=dtype)
    return Task(
        setting=setting,
        images=images.contiguous(memory_format=torch.channels_last),
        labels=torch.randint(setting.classes, (batch,), device=setting.device),
    )


def our_specs(setting: Setting) -> list[Spec]:
    """Returns the fused step if it can run, else one with compiled blocks; and the plain one."""
    if setting.device.type != "cuda":
        return [Spec(name="hyperbatch plain", build=lambda task: ours(task, fused=False, graph=False))]
    plain = Spec(name="hyperbatch plain, graph", build=lambda task: ours(task, fused=False))
    if not _can_fuse(setting):
        return [Spec(name="hyperbatch compiled, graph", build=partial(ours, fused=False, compiles=True)), plain]
    fused = Spec(name="hyperbatch fused, graph", build=lambda task: ours(task, fused=True))
    return [fused, plain]


def peer_specs(names: Sequence[str] = (*PEERS, MAX_AUTOTUNE)) -> list[Spec]:
    modes = {"compile": "reduce-overhead", MAX_AUTOTUNE: MAX_AUTOTUNE}
    known = {
        "eager": Spec(name="torch eager", build=eager, peer=True),
        "graph": Spec(name="torch graph", build=autocast_graph, peer=True),
        "masters": Spec(name="torch graph, fp32 masters", build=masters_graph, peer=True),
        **{
            name: Spec(name=f"torch.compile {mode}", build=lambda task, mode=mode: compiled(task, mode), peer=True)
            for name, mode in modes.items()
        },
    }
    return [known[name] for name in names]


def set_up(spec: Spec, setting: Setting, batch: int) -> Ready:
    """Builds a candidate including its first step, and runs two more steps."""
    torch.manual_seed(0)
    task = make_task(setting, batch)
    made: list[Built] = []
    seconds: list[float] = []

    def first_step() -> None:
        made.append(spec.build(task))
        made[0].run()

    def first_steps() -> None:
        seconds.append(wall_s(first_step, device=setting.device))
        for _ in range(2):  # torch.compile records its graphs in these steps
            made[0].run()

    release_memory(setting.device)
    peak = peak_bytes(first_steps, setting.device) if setting.device.type == "cuda" else first_steps()
    release_memory(setting.device)
    return Ready(spec=spec, built=made[0], set_up_s=seconds[0], peak_memory_bytes=peak)


# Ours


def _can_fuse(setting: Setting) -> bool:
    model = create_model(setting.model, classes=setting.classes)
    return why_not_fused(model, working_dtype(setting.precision), setting.device) is None


@training_kernels(deterministic=False)
def ours(task: Task, *, fused: bool, graph: bool = True, compiles: bool = False) -> Built:
    """The engine's own step on one rank, built, captured and run as in `hyperbatch train`, on the bench's own batch."""
    setting, batch = task.setting, len(task.labels)
    config = Config(recipe="bench-step").override(
        model=setting.model,
        fused="on" if fused else "off",
        compile="on" if compiles else "off",
        image_size=setting.image_size,
        eval_size=setting.image_size,  # a model of a fixed size is tested with this size
        precision=setting.precision,
        batch_phases=(BatchPhase(0, batch),),
        device=task.device.type,
        graph="on" if graph else "off",
    )
    ranks = Ranks()
    learner = build_learner(config, ranks, task.device, classes=setting.classes, in_channels=task.images.shape[1])
    runner = StepRunner(learner, micro_step, config, ranks, warnings=[])
    timer = StepTimer(task.device)
    step = next(steps(resolve_phases(config.schedule.batch_phases, batch, 1, accumulate=1), batch, 1.0))
    runner.compile((step,))
    if not runner.is_ready((step,)):
        runner.prepare((step,))
    if compiles and not learner.compilation.regions:
        raise RunFailed(f"bench step: {setting.model} is not compiled: {learner.compilation.reason}")
    learner.scaler.load_state_dict(learner.scaler.state_dict() | {"scale": LOSS_SCALE})
    batches = itertools.repeat(Batch(task.images, task.labels))

    def run() -> None:
        timer.start()
        train_stride(runner, (step,), batches, timer)

    return Built(
        run=run,
        model=learner.model,
        loss_scale=lambda: learner.scaler.state_dict()["scale"],
        compiled=learner.compilation.to_dict() if compiles else None,
    )


# Peers


def eager(task: Task) -> Built:
    """The step of a plain script."""
    network = peer_network(task)
    return _autocast_step(task, network, network)


def autocast_graph(task: Task) -> Built:
    network = peer_network(task)
    # A graph must not use 16-bit weights from autocast's cache: they would be those at the time of the capture.
    built = _autocast_step(task, network, network, cache_weights=False)
    return Built(run=captured(built.run), model=network, loss_scale=built.loss_scale)


def compiled(task: Task, mode: str) -> Built:
    network = peer_network(task)
    # dynamic=False, because otherwise a second batch size would be compiled for all sizes, which is slower.
    return _autocast_step(task, network, torch.compile(network, mode=mode, dynamic=False))


def _autocast_step(task: Task, network: nn.Module, call: Callable[..., Tensor], *, cache_weights: bool = True) -> Built:
    optimizer = _sgd(list(network.parameters()))
    scaler = torch.amp.GradScaler(task.device.type, init_scale=LOSS_SCALE, enabled=task.scaled)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(
            task.device.type,
            dtype=task.dtype if task.half else None,
            enabled=task.half,
            cache_enabled=cache_weights and task.half,
        ):
            loss = functional.cross_entropy(call(task.images), task.labels, label_smoothing=SMOOTHING)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Built(run=step, model=network, loss_scale=scaler.get_scale)


def masters_graph(task: Task) -> Built:
    """The fastest known form with torch's own parts: it does not cast every weight in every step."""
    network = peer_network(task)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(task.dtype)
    params = list(network.parameters())
    masters = [param.detach().float() if param.dtype in HALF_DTYPES else param for param in params]
    pairs = [(param, master) for param, master in zip(params, masters, strict=True) if param is not master]
    working = [param.detach() for param, _ in pairs]
    wide = [master for _, master in pairs]
    wide_grads = [torch.zeros_like(master) for master in wide]
    for master, grad in zip(wide, wide_grads, strict=True):
        master.grad = grad
    optimizer = _sgd(masters)
    scaler = torch.amp.GradScaler(task.device.type, init_scale=LOSS_SCALE, enabled=task.scaled)

    def step() -> None:
        for param in params:
            param.grad = None
        logits = network(task.images)
        scaler.scale(functional.cross_entropy(logits.float(), task.labels, label_smoothing=SMOOTHING)).backward()
        torch._foreach_copy_(wide_grads, [param.grad for param, _ in pairs if param.grad is not None])
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(working, wide)

    return Built(run=captured(step), model=network, loss_scale=scaler.get_scale)


def _sgd(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-5, fused=True)


def peer_network(task: Task) -> nn.Module:
    """torchvision's model if it is installed and has one, else ours; timm's and the user's own models as they are."""
    name, classes = task.setting.model, task.setting.classes
    build = torchvision_model(name)
    if is_foreign(name):
        network = foreign_model(name, classes)
    else:
        network = create_model(name, classes=classes) if build is None else build(num_classes=classes)
    return to_channels_last(network.to(task.device))


def torchvision_model(name: str) -> Callable[..., nn.Module] | None:
    try:
        from torchvision import models  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError):  # RuntimeError: this torchvision is incompatible with this torch
        return None
    return getattr(models, name, None)


def captured(step: Callable[[], Any]) -> Callable[[], None]:
    """Returns a replay of the captured step. Warms up on the capture's stream, where autograd's nodes are made too."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    forget_workspaces()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay(_: Any = step) -> None:  # the default keeps what the graph reads and writes alive
        graph.replay()

    return replay
