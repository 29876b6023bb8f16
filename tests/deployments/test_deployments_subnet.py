"""The doctor's rows on the subnet's settings, over the real SDK, and on backups that a swapped hotkey left."""

import bittensor_core
import pytest

from deployments.neuron.subnet import TRIED_RUNTIMES, DoubtError, backups, looks_at_subnet, require_yuma
from lab.hotkeys import hotkey_from_seed
from templar.chain.bittensor import BittensorChain
from templar.chain.clock import SimulatedClock
from templar.errors import PermanentError
from templar.exchange.encryption import Binding, encrypt
from templar.exchange.object_keys import Kind, window_key
from templar.store.directory import DirectoryStore
from tests.support.network import tiny
from tests.support.substrate import KeyPairWallet, MemorySubstrate

SEED = bytes(range(32))
HPARAMS = tiny()


@pytest.fixture
def substrate(tmp_path, monkeypatch):
    monkeypatch.setenv("BTCLI_TOKEN_SYMBOLS_CACHE", str(tmp_path / "symbols.json"))
    return MemorySubstrate(SimulatedClock(1_800_000_000.0), netuid=3)


@pytest.fixture
def chain(substrate):
    wallet = KeyPairWallet(bittensor_core.Keypair.create_from_seed(SEED))
    chain = BittensorChain("local", 3, wallet=wallet, substrates=lambda *_: substrate, clock=substrate.clock)
    yield chain
    chain.close()


def rows(chain):
    found = {}
    for topic, look in looks_at_subnet(chain, HPARAMS):
        try:
            found[topic] = ("good", look())
        except DoubtError as doubt:
            found[topic] = ("doubtful", str(doubt))
        except PermanentError as error:
            found[topic] = ("bad", error.message)
    return found


def test_a_usual_subnet_has_nothing_to_complain_of(chain, substrate):
    found = rows(chain)
    assert {topic for topic, (verdict, _) in found.items() if verdict != "good"} == set()
    assert list(found) == ["runtime", "consensus", "emission", "epochs", "rate limits", "largest weight"]
    assert found["epochs"][1] == "every 100 blocks, the next in 98; weights are shown at once"
    substrate.commit_reveal = True
    assert rows(chain)["epochs"][1].endswith("weights are hidden for 1 epochs (commit-reveal)")


CHANGES = [
    ("consensus", "bad", {"SubnetEpochConsensus": {"Null": None}}, "--name epoch_consensus --value Yuma"),
    ("emission", "doubtful", {"SubtokenEnabled": False}, "btcli hparams start --netuid 3"),
    ("emission", "doubtful", {"SubnetEmissionEnabled": False}, "root has not enabled"),
    ("largest weight", "bad", {"MaxWeightsLimit": 30_000}, "0.5 (burn_rate)"),
    ("largest weight", "doubtful", {"MaxWeightsLimit": 40_000}, "0.6104"),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
def test_a_setting_that_costs_pay_is_named_with_its_remedy(chain, substrate, change):
    topic, verdict, settings, words = change
    substrate.settings |= settings
    found = rows(chain)[topic]
    assert found[0] == verdict
    assert words in found[1]


def test_limits_are_held_against_the_interval_of_the_weights(chain, substrate):
    assert HPARAMS.weights.windows_per_weights * HPARAMS.windows.blocks_per_window == 36
    for limit, tempo, verdict in ((100, 100, "good"), (101, 100, "doubtful"), (36, 20, "good"), (37, 20, "doubtful")):
        substrate.weights_rate_limit, substrate.tempo = limit, tempo
        assert rows(chain)["rate limits"][0] == verdict, (limit, tempo)


def test_a_runtime_that_was_not_tried_is_said_to_be_so(chain, substrate, monkeypatch):
    async def newer():
        return max(TRIED_RUNTIMES) + 1

    monkeypatch.setattr(substrate, "spec_version", newer)
    verdict, text = rows(chain)["runtime"]
    assert verdict == "doubtful"
    assert "was tried with 435" in text


def test_a_subnet_with_one_permit_is_refused(chain, substrate):
    assert require_yuma(chain).startswith("Yuma")
    substrate.settings["SubnetEpochConsensus"] = "Null"
    with pytest.raises(PermanentError, match="only the hotkey with the most stake has a validator permit"):
        require_yuma(chain)


def test_backups_of_the_key_before_a_swap_are_named(tmp_path):
    (tmp_path / "bucket").mkdir()
    store, genesis = DirectoryStore(tmp_path / "bucket"), "a" * 64
    old, new = hotkey_from_seed(SEED), hotkey_from_seed(bytes(32))

    def look(signer):
        return backups(store, signer, netuid=3, genesis=genesis)

    assert look(new) == "none in the bucket yet"
    for window, signer in ((4, old), (5, old), (6, new)):
        path = tmp_path / "container"
        with path.open("wb") as target:
            encrypt([b"private"], 7, target, signer=signer, binding=Binding(3, genesis, signer.address, window))
        store.put(str(window_key(Kind.PRIVATE, window, 2)), path.read_bytes())
    with pytest.raises(DoubtError, match=r"private-5-2.*private-4-2.*only the old key reads them") as caught:
        look(new)
    assert "private-6" not in str(caught.value)
    store.delete([info.key for info in store.list() if "private-6" not in info.key])
    assert look(new) == "1 in the bucket, readable with this hotkey"
