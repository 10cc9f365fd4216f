"""Gradient group plans, and predictions of their cost on a cluster, without torch."""
