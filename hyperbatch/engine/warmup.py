"""Steps that leave no trace: kernels are chosen, compiled and captured before the clock of training runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hyperbatch.engine.job import Job
from hyperbatch.engine.step import Piece, micro_step
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.kernels.compile import compiling
from hyperbatch.optim.tensors import Scalar, write_setting


@contextlib.contextmanager
def put_back(job: Job) -> Iterator[None]:
    """Whatever steps run inside, the job is afterwards as it was, bit for bit.

    That is weights and masters, buffers of the model, optimizer state and rates, loss scale and skipped steps, random
    numbers, gradients, and what the exchange has counted. Numbers a model keeps in Python are its own affair.
    """
    optimizer = job.optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Flat buffers, so that parameters do not look as if somebody else had written them.
    tensors = [*job.arena.flat_weights(), *job.model.buffers()]
    tensors += [optimizer.init_state(param)[name] for param in params for name in optimizer.state_names]
    kept = [tensor.detach().clone() for tensor in tensors]
    names = ("lr", "weight_decay", *optimizer.group_state_names)
    numbers = [{name: _copy(group[name]) for name in names} for group in optimizer.param_groups]
    skipped = None if optimizer.skipped_steps is None else optimizer.skipped_steps.clone()
    scaler = job.scaler.state_dict()
    with torch.random.fork_rng(devices=[job.device] if job.device.type == "cuda" else []):
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
            job.scaler.load_state_dict(scaler)
            job.sync.forget()
            job.arena.zero_grad()
            optimizer.refresh()


def compile_kernels(job: Job, images: Tensor, labels: Tensor, total: Tensor) -> None:
    """Compiles what the fused kernels of a step need side by side, while cuDNN makes its trials.

    For inside of `put_back`: our kernels are not launched, so what lay in memory goes through the rest of the model. It
    speeds up what comes next and nothing more: if it fails, that is noted, and the steps compile for themselves.
    """
    # Norms over ranks exchange sums in forward: a rank that fails would leave the others waiting.
    if not job.fused or job.config.model.bn_group_ranks > 1:
        return
    try:
        with compiling(ranks=job.ranks.local_size):
            # Not the last of its step: no exchange.
            piece = Piece(len(labels), 2 * len(labels), first=True, last=False)
            micro_step(job, piece, images, labels, total, StepTimer(job.device))
            if job.update is job.optimizer:  # a sharded one exchanges weights
                with torch.no_grad():
                    job.optimizer.step_fused()
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        job.warnings.append(f"kernels are compiled one after the other: {line}")
    finally:
        job.sync.forget()
        job.optimizer.refresh()  # what its kernels should have left


def _copy(value: Scalar) -> Scalar:
    return value.clone() if isinstance(value, Tensor) else value
