"""Predictions without torch: clusters, convergence, sweeps."""
