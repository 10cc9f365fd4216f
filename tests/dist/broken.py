"""Models whose rank 1 fails in the middle of a run, each in a way of its own; FAULT_STEP says at which forward pass."""

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
        if self.training:
            self.passes += len(images) > 2  # those of two samples measure, before the run
            rank, step = int(os.environ.get("FAULT_RANK", "1")), int(os.environ.get("FAULT_STEP", "5"))
            if self.passes >= step and dist.is_initialized() and dist.get_rank() == rank:
                return self.fault(self, images)
        return self.inner(images)


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


def model(classes, in_channels):
    torch.manual_seed(0)
    return Faulty(toy.plain(classes, in_channels), FAULTS[os.environ["FAULT"]])
