"""A whole network of each recipe with compiled kernels: the same history as with the definitions."""

import pytest

from templar.gradient import kernels
from templar.tensorfile import StoredTensors
from templar.training.model import parameter_shapes
from tests.support.network import Network, tiny

WINDOWS = [1, 2, 3]


def history(folder, preset):
    """The root that all nodes agree on after each window, and every payload."""
    network = Network(folder, tiny(preset))
    network.run(WINDOWS)
    for each in network.miners:
        assert (each.state.outer_steps, each.private.feedback.num_calls) == (len(WINDOWS), len(WINDOWS))
    roots = [root for window in WINDOWS for root in network.roots(window)]
    stored = (network.objects(each, "gradient-").values() for each in network.miners)
    network.stop()
    return roots, [data for objects in stored for _, data in objects]


@pytest.mark.parametrize("preset", ["local", "local-demo"])
def test_kernels_change_nothing(tmp_path, preset, monkeypatch):
    expected = history(tmp_path / "definition", preset)
    monkeypatch.setattr(kernels, "MIN_ELEMENTS", 1)
    read = []
    fetch = StoredTensors.__getitem__

    def spy(stored, name):
        read.append(name)
        return fetch(stored, name)

    monkeypatch.setattr(StoredTensors, "__getitem__", spy)
    assert history(tmp_path / "kernels", preset) == expected
    assert [len(each) for each in expected] == [len(WINDOWS), 2 * len(WINDOWS)]
    # Error feedback, and both moments where there are any, of two miners, in every window but the first.
    tensors, kinds = len(parameter_shapes(tiny(preset).model)), 1 if preset == "local-demo" else 3
    assert len(read) == 2 * (len(WINDOWS) - 1) * tensors * kinds
