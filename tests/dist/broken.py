"""Models whose rank 1 fails in the middle of a run, each in a way of its own; FAULT_STEP says at which forward pass.

FAULT_IN=evaluation: in the first evaluation after that; checkpoint: while the next checkpoint is taken; write: while
its file is written, which rank 0 does.
"""

import os
import signal
import time

import torch
import torch.distributed as dist
import toy
from torch import nn


class Faulty(nn.Module):
    """`fault` happens at rank FAULT_RANK (1) in training forward pass number FAULT_STEP (5), and at later ones, too."""

    def __init__(self, inner, fault):
        super().__init__()
        self.inner, self.fault, self.passes = inner, fault, 0

    def forward(self, images):
        self.passes += self.training and len(images) > 2  # those of two samples measure, before the run
        if self.is_time("training" if self.training else "evaluation"):
            return self.fault(self, images)
        return self.inner(images)

    def is_time(self, place):
        rank, step = int(os.environ.get("FAULT_RANK", "1")), int(os.environ.get("FAULT_STEP", "5"))
        here = os.environ.get("FAULT_IN", "training") == place
        return here and self.passes >= step and dist.is_initialized() and dist.get_rank() == rank


def raising(module, images):
    raise ValueError("the model has lost its head")


def leaving(module, images):
    os._exit(7)


def terminated(module, images):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # it ends in this step: a moment later, when its command has not been asked to make room
    return module.inner(images)


def stopped(module, images):
    os.kill(os.getpid(), signal.SIGSTOP)
    return module.inner(images)


def hanging(module, images):
    """It beats on, and never comes to the exchange."""
    time.sleep(600)
    return module.inner(images)


def sleeping(module, images):
    time.sleep(0.05)
    return module.inner(images)


FAULTS = {fault.__name__: fault for fault in (raising, leaving, terminated, stopped, hanging, sleeping)}


def in_checkpoints(model):
    """Brings the fault about there."""
    from hyperbatch import durable
    from hyperbatch.engine import saver

    take, write = saver.snapshot, durable._Summed.write

    def taking(*arguments):
        if model.is_time("checkpoint"):
            model.fault(model, torch.zeros(1, 1, 8, 8))
        return take(*arguments)

    def writing(self, data):
        if model.is_time("write"):
            model.fault(model, torch.zeros(1, 1, 8, 8))
        return write(self, data)

    saver.snapshot, durable._Summed.write = taking, writing


def model(classes, in_channels):
    torch.manual_seed(0)
    made = Faulty(toy.plain(classes, in_channels), FAULTS[os.environ["FAULT"]])
    in_checkpoints(made)
    return made
