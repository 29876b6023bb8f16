"""Adversaries and faults as code: who attacks, what is expected of the network, and a gauntlet that runs them."""
