import pytest

from templar import interrupt


@pytest.fixture(autouse=True)
def _own_home_and_no_stop(tmp_path, monkeypatch):
    """The SDK caches token symbols in the home folder, and a stop request belongs to one test."""
    monkeypatch.setenv("BTCLI_TOKEN_SYMBOLS_CACHE", str(tmp_path / "symbols.json"))
    yield
    interrupt.clear_stop()
