"""Warm-up steps, which choose and compile kernels before the run's time starts. The state is restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from hyperbatch.engine.compiled import CompiledRegions, reason_of
from hyperbatch.engine.learner import Learner
from hyperbatch.engine.step import MicroStep, Work
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.errors import first_line
from hyperbatch.kernels.compile import asking, compiling
from hyperbatch.models.norm import buffer_places
from hyperbatch.models.quick import compile_quick, has_quick_kernels
from hyperbatch.optim.tensors import Scalar, write_setting


@contextlib.contextmanager
def preserved_state(learner: Learner) -> Iterator[None]:
    """Restores the learner, bit for bit, after the steps that run inside.

    This includes weights, masters and their average, buffers of the model, optimizer state and rates, loss scale and
    skipped steps, random state, gradients, and the counts of the exchange. Numbers that a model keeps in Python are not
    restored.
    """
    optimizer = learner.optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Flat buffers include the masters, so that the optimizer does not mistake restored weights for writes of other
    # code.
    tensors = [*learner.arena.flat_weights(), *learner.model.buffers()]
    tensors += [optimizer.init_state(param)[name] for param in params for name in optimizer.state_names]
    tensors += [] if learner.average is None else learner.average.tensors()
    buffers = [(module, name, module._buffers[name]) for module, name in buffer_places(learner.model).values()]
    kept = [tensor.detach().clone() for tensor in tensors]
    names = ("lr", "weight_decay", *optimizer.group_state_names)
    numbers = [{name: _copy(group[name]) for name in names} for group in optimizer.param_groups]
    skipped = None if optimizer.skipped_steps is None else optimizer.skipped_steps.clone()
    scaler = learner.scaler.state_dict()
    with torch.random.fork_rng(devices=[learner.device] if learner.device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer in buffers:
                    module._buffers[name] = buffer  # forward may have replaced it
                for tensor, value in zip(tensors, kept, strict=True):
                    tensor.copy_(value)
                for group, values in zip(optimizer.param_groups, numbers, strict=True):
                    for name, value in values.items():
                        write_setting(group, name, value)
                if optimizer.skipped_steps is not None:
                    optimizer.skipped_steps.zero_() if skipped is None else optimizer.skipped_steps.copy_(skipped)
                optimizer.clear_stats()
            learner.scaler.load_state_dict(scaler)
            learner.sync.forget()
            learner.arena.zero_grad()
            optimizer.refresh()


def compile_kernels(
    learner: Learner,
    work: Work,
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    total: Tensor,
    *,
    ranks_per_host: int,
    other_trials: Callable[[], None] | None = None,
    count: Callable[[int, int], None] | None = None,
) -> str | None:
    """Compiles the fused kernels of steps in parallel, while cuDNN tries its algorithms.

    Must be called inside `preserved_state`: our kernels are not launched, so the rest of the model computes with
    uninitialised values. This only makes later steps start faster. If it fails, the reason is returned, and kernels are
    compiled at their first launch. batches: returns a new batch of each shape at every call. other_trials: runs other
    convolutions of the model after those of the steps. count: as for `compiling`.
    """

    def step(images: Tensor, labels: Tensor) -> None:
        _without_exchange(learner, work, images, labels, total)
        if learner.update is learner.optimizer:  # a sharded update would exchange weights
            with torch.no_grad():
                learner.optimizer.step_fused()
        learner.sync.forget()

    try:
        with compiling(ranks=ranks_per_host, count=count) as wait_for_cores:
            with asking():
                for batch in batches():
                    step(*batch)
            # cuDNN's trials of the first shape take about as long as compiling most kernels. Those of other shapes wait
            # for idle cores.
            for batch in batches():
                step(*batch)
                wait_for_cores()
            if other_trials is not None:
                other_trials()
    except Exception as error:
        return first_line(error)
    finally:
        learner.sync.forget()
        learner.optimizer.refresh()  # its kernels, which were not launched, would have kept this up to date
    return None


def compile_layers(
    learner: Learner, *, ranks_per_host: int, count: Callable[[int, int], None] | None = None
) -> str | None:
    """Compiles the kernels of our faster layers in parallel; the regions would compile them one by one. Like
    `compile_kernels`, but it does not run the model."""
    try:
        if learner.device.type == "cuda" and has_quick_kernels(learner.model):
            with compiling(ranks=ranks_per_host, count=count):
                compile_quick(learner.model, learner.dtype)
    except Exception as error:
        return first_line(error)
    return None


def compile_regions(
    learner: Learner,
    work: Work,
    regions: CompiledRegions,
    images: Tensor,
    labels: Tensor,
    total: Tensor,
    *,
    count: Callable[[int, int], None] | None = None,
) -> str | None:
    """Compiles the regions of a model by running a step, inside `preserved_state`. Returns the reason if it fails."""
    try:
        with regions.compiling(count):
            _without_exchange(learner, work, images, labels, total)
    except Exception as error:  # of torch, a backend, or the model's own code; plain steps then raise the latter
        return reason_of(error)
    finally:
        learner.sync.forget()
    return None


def _without_exchange(learner: Learner, work: Work, images: Tensor, labels: Tensor, total: Tensor) -> None:
    """Runs a micro-step that is not the last of its step, so there is no exchange."""
    part = MicroStep(len(labels), 2 * len(labels), first=True, last=False)
    work(learner, part, images, labels, total, StepTimer(learner.device))


def _copy(value: Scalar) -> Scalar:
    return value.clone() if isinstance(value, Tensor) else value
