"""LARS, LAMB, Muon, precision and loss scaling, sharded update."""

from hyperbatch.optim.lamb import LAMB
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.muon import Muon
from hyperbatch.params import param_groups

__all__ = ["LAMB", "LARS", "Muon", "param_groups"]
