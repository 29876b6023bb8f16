from tests.neuron.conftest import folder, network

__all__ = ["folder", "network"]
