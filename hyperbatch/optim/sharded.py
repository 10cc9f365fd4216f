"""Weight-update sharding (Google): each rank updates its shard after the reduce-scatter."""
