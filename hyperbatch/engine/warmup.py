"""Steps that leave no trace: kernels are chosen, compiled and captured before the clock of training runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from hyperbatch.engine.compiled import CompiledRegions, reason_of
from hyperbatch.engine.learner import Learner
from hyperbatch.engine.step import MicroStep, Work
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.kernels.compile import asking, compiling
from hyperbatch.models.quick import compile_quick, has_quick_kernels
from hyperbatch.optim.tensors import Scalar, write_setting


@contextlib.contextmanager
def preserved_state(learner: Learner) -> Iterator[None]:
    """Whatever steps run inside, the learner is afterwards as it was, bit for bit.

    That is weights, masters and their average, buffers of the model, optimizer state and rates, loss scale and skipped
    steps, random numbers, gradients, and what the exchange has counted. Numbers that a model keeps in Python are not
    preserved.
    """
    optimizer = learner.optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Flat buffers, so that parameters do not look as if somebody else had written them.
    tensors = [*learner.arena.flat_weights(), *learner.model.buffers()]
    tensors += [optimizer.init_state(param)[name] for param in params for name in optimizer.state_names]
    tensors += [] if learner.average is None else learner.average.tensors()
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
    """Compiles what the fused kernels of steps need side by side, while cuDNN makes its trials.

    For inside of `preserved_state`: our kernels are not launched, so what lay in memory goes through the rest of the
    model. It only speeds up what comes next: if it fails, the reason is returned, and the steps compile for themselves.
    batches: one of each shape, made anew by every call. other_trials: runs other convolutions of the model, after
    those of the steps. count: as for `compiling`.
    """

    def step(images: Tensor, labels: Tensor) -> None:
        # Not the last of its step: no exchange.
        part = MicroStep(len(labels), 2 * len(labels), first=True, last=False)
        work(learner, part, images, labels, total, StepTimer(learner.device))
        if learner.update is learner.optimizer:  # a sharded one exchanges weights
            with torch.no_grad():
                learner.optimizer.step_fused()
        learner.sync.forget()

    try:
        with compiling(ranks=ranks_per_host, count=count) as wait_for_cores:
            with asking():
                for batch in batches():
                    step(*batch)
            # The first shape's trials take about as long as most kernels do; the others are made when it is quiet.
            for batch in batches():
                step(*batch)
                wait_for_cores()
            if other_trials is not None:
                other_trials()
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    finally:
        learner.sync.forget()
        learner.optimizer.refresh()  # what its kernels should have left
    return None


def compile_layers(
    learner: Learner, *, ranks_per_host: int, count: Callable[[int, int], None] | None = None
) -> str | None:
    """Compiles the kernels of quicker layers side by side, before regions meet them one after the other. As
    `compile_kernels`, but nothing of the model runs."""
    try:
        if learner.device.type == "cuda" and has_quick_kernels(learner.model):
            with compiling(ranks=ranks_per_host, count=count):
                compile_quick(learner.model, learner.dtype)
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
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
    """Compiles what the regions of a step need; for inside of `preserved_state`. Returns why it failed, if so."""
    try:
        with regions.compiling(count):
            # Not the last of its step: no exchange.
            part = MicroStep(len(labels), 2 * len(labels), first=True, last=False)
            work(learner, part, images, labels, total, StepTimer(learner.device))
    except Exception as error:  # of torch's, of a backend, or of the model's own code, which plain steps then show
        return reason_of(error)
    finally:
        learner.sync.forget()
    return None


def _copy(value: Scalar) -> Scalar:
    return value.clone() if isinstance(value, Tensor) else value
