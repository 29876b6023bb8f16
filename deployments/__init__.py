"""Processes that run the flows: the resident worker, the window clock, the local network."""
