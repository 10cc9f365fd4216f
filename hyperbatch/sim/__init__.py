"""Predictions without torch: convergence and sweeps over cluster sizes."""
