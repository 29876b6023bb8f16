"""Attackers, faults and simulated networks, for tests, benchmarks and rehearsals: no code of a neuron imports them."""
