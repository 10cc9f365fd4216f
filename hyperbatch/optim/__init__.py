"""LARS, LAMB and Muon as torch optimizers, mixed precision and loss scaling, the sharded update, averaged weights."""

from hyperbatch.optim.lamb import LAMB
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.muon import Muon
from hyperbatch.params import param_groups

__all__ = ["LAMB", "LARS", "Muon", "param_groups"]
