"""Plans gradient groups and predicts their cost on a cluster, without torch."""
