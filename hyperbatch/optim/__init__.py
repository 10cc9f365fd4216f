"""LARS, LAMB, AdamW and Muon as torch optimizers, mixed precision, loss scaling, sharded update, averaged weights."""

from hyperbatch.optim.lamb import LAMB, AdamW
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.muon import Muon
from hyperbatch.params import param_groups

__all__ = ["LAMB", "LARS", "AdamW", "Muon", "param_groups"]
