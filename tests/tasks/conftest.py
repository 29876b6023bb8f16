import pytest

from tasks.sinks import sending
from tests.support.scripted_server import serving
from tests.support.sinks import Receiver


@pytest.fixture
def receiver(monkeypatch):
    """What sinks post to; they try again at once."""
    monkeypatch.setattr(sending, "PAUSES", (0.01,))
    with serving(Receiver()) as server:
        yield server
