import bittensor_core
import pytest

from lab.hotkeys import hotkey_from_seed
from templar import interrupt
from templar.chain.bittensor import BittensorChain
from templar.chain.clock import SimulatedClock
from templar.chain.remote import CallLimits
from tests.support.substrate import KeyPairWallet, MemorySubstrate

NETUID = 3
START = 1_800_000_000.0
SEED = bytes(range(32))
ADDRESS = hotkey_from_seed(SEED).address
OTHER = hotkey_from_seed(bytes(32)).address
WALLET = KeyPairWallet(bittensor_core.Keypair.create_from_seed(SEED))
LIMITS = CallLimits(attempts=3, read_seconds=60, backoff_seconds=1.0, longest_backoff_seconds=4.0)


@pytest.fixture(autouse=True)
def _own_home_and_no_stop(tmp_path, monkeypatch):
    """The SDK caches token symbols in the home folder, and a stop request belongs to one test."""
    monkeypatch.setenv("BTCLI_TOKEN_SYMBOLS_CACHE", str(tmp_path / "symbols.json"))
    yield
    interrupt.clear_stop()


@pytest.fixture
def clock():
    return SimulatedClock(START)


@pytest.fixture
def substrate(clock):
    substrate = MemorySubstrate(clock, netuid=NETUID)
    substrate.register(ADDRESS, stake=100.0, validator_permit=True)
    substrate.register(OTHER)
    return substrate


@pytest.fixture
def open_chain(clock, substrate):
    opened = []

    def open_(wallet=None, netuid=NETUID):
        chain = BittensorChain(
            "local", netuid, wallet=wallet, substrates=lambda *_: substrate, clock=clock, limits=LIMITS
        )
        opened.append(chain)
        return chain

    yield open_
    for chain in opened:
        chain.close()


@pytest.fixture
def chain(open_chain):
    return open_chain(WALLET)
