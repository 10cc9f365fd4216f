"""Group plans and what they cost, without torch."""
