"""The toy run as a recipe for the command line, and a model that brings a fault about where FAULT says, once.

FAULT="KILL 1 12 MARKER": in its 12th forward pass in training (the first one measures the order of gradients) rank 1
sends itself SIGKILL, unless the file MARKER is there already ("never": in every attempt).
"parent" before a signal's name sends it to the process that has started the rank; "EXIT" leaves without a word.
"""

import os
import signal
import time
from pathlib import Path

import toy
from torch import nn


def recipe():
    return toy.config(model="faulty:model", epochs=8.0, eval_every_epochs=0.5)


class Faulty(nn.Module):
    def __init__(self, classes, in_channels):
        super().__init__()
        self.net = toy.normed(classes, in_channels)
        self.steps, self.slow_s = 0, 0.0

    def forward(self, images):
        if self.training:
            self.steps += 1
            self.fault()
        return self.net(images)

    def fault(self):
        time.sleep(self.slow_s)
        name, rank, step, marker = os.environ.get("FAULT", "none -1 0 .").split()
        if int(rank) != int(os.environ.get("RANK", "0")) or self.steps < int(step) or Path(marker).exists():
            return
        if marker != "never":
            Path(marker).touch()
        self.slow_s = 0.2  # who is asked to stop must not have finished before
        if name == "EXIT":
            os._exit(7)
        pid = os.getppid() if name.startswith("parent") else os.getpid()
        os.kill(pid, signal.Signals[f"SIG{name.removeprefix('parent')}"])


def model(classes, in_channels):
    return Faulty(classes, in_channels)
