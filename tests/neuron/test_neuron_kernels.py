"""A whole network of each recipe with compiled kernels: the same history as with the definitions."""

from pathlib import Path

import pytest

from templar.gradient import kernels
from templar.neuron import miner
from tests.support.network import Network, tiny

WINDOWS = [1, 2, 3]


def history(folder: Path, preset: str) -> tuple[list[str], list[bytes]]:
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
def test_kernels_change_nothing(tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = history(tmp_path / "definition", preset)
    monkeypatch.setattr(kernels, "MIN_ELEMENTS", 1)
    spares = []
    compress = miner.compress

    def spy(*arguments: object, **options: object) -> object:
        spares.append(options["spare"])
        return compress(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(miner, "compress", spy)
    assert history(tmp_path / "kernels", preset) == expected
    assert [len(each) for each in expected] == [len(WINDOWS), 2 * len(WINDOWS)]
    assert spares[:2] == [None, None]  # nobody has anything to spare in the first window
    assert all(spare is not None for spare in spares[2:])
