"""The benchmark of the data path runs on a small shard, and its last line holds what it promises."""

from dataclasses import replace

import pytest

from benchmarks import loader


@pytest.mark.slow
def test_the_figures(monkeypatch, tmp_path):
    """The other readers are not installed here: a script answers for them, as their interpreter would."""
    others = tmp_path / "python"
    others.write_text("#!/bin/sh\necho 'more words'\necho '[1.0, 1000.0]'\n")
    others.chmod(0o755)
    small = replace(
        loader.QUICK,
        shard_bytes=16 << 20,
        packed_tokens=100_000,
        repetitions=1,
        window_bytes=4 << 20,
        compared_bytes=4 << 20,
    )
    monkeypatch.setattr(loader, "QUICK", small)
    figures = loader.run(quick=True, others=others)
    assert isinstance(figures.pop("holds"), bool)
    assert figures.keys() >= loader.BARS.keys()
    assert all(isinstance(figure, int | float) and figure >= 0 for figure in figures.values())
    assert all(figures[name] > 0 for name in loader.BARS)
    assert figures["shard_mib"] == 16
