"""python -m hyperbatch: the same as the hyperbatch command, for torchrun -m."""

from hyperbatch.cli import command

command()
