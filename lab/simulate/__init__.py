"""A whole network in one process on simulated time."""
