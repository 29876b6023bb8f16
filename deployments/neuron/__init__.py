"""One neuron of this host as one command: its processes, started, watched and stopped together."""
