"""The training loop, evaluation, the clock, and the handling of faults."""
