"""A whole network whose codec is compiled: the same history as with the definitions."""

from pathlib import Path

import pytest

from templar.gradient import kernels
from templar.neuron import miner
from tests.support.network import Network, tiny

WINDOWS = [1, 2, 3, 4]


def history(folder: Path, preset: str) -> tuple[list[str], dict[str, bytes]]:
    """The roots of all nodes, and every payload."""
    network = Network(folder, tiny(preset))
    try:
        network.run(WINDOWS)
        payloads = {
            key: value[1]
            for each in network.miners
            for key, value in network.objects(network.name(each)).items()
            if key.startswith("gradient-")
        }
        return [node.state.root for node in network.nodes.values()], payloads
    finally:
        network.stop()


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
    assert len(expected[1]) == 2 * len(WINDOWS)
    assert spares[:2] == [None, None]  # nobody has anything to spare in the first window
    assert all(spare is not None for spare in spares[2:])
