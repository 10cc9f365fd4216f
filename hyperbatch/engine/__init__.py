"""The train loop, evaluation, clock, faults."""
