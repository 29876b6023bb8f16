"""A checkpoint as somebody without a node takes it: only of a state that a quorum proved."""

import json

import pytest

from templar.agreement.model_folder import CARD_FILE, read_weights
from templar.agreement.proven_state import fetch_model, newest_proven_window, proven_state
from templar.agreement.state import parameters_digest
from templar.data.tokenizer import load_tokenizer
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import Kind, checkpoint_key, window_key
from templar.housekeeping.maintenance import publish_newest_checkpoint
from tests.support.checkpoints import publish_with
from tests.support.errors import raising
from tests.support.foreign_bytes import NESTED, OVERFLOWING, PANICKING, entry, safetensors

AGGREGATOR, UID = "aggregator-1", 1


def fetch(network, home, window=None):
    node = network.miners[0]
    return fetch_model(node.exchange, node.birth, home, window=window)


def missing(network, home, window, reason=Reason.OBJECT_MISSING, **words):
    with raising(PermanentError, reason, **words):
        fetch(network, home, window)


def key(file):
    return checkpoint_key(2, UID, file)


@pytest.fixture(scope="module")
def shared(build_shared):
    """After two windows, with the checkpoint of the second one."""
    network = build_shared(windows=[1, 2])
    publish_newest_checkpoint(network.config(AGGREGATOR), preset="test")
    return network


@pytest.fixture
def published(shared):
    with shared.restored() as network:
        yield network


def test_the_newest_one_is_taken_and_kept(published, tmp_path):
    state, node = published.aggregator.state, published.miners[0]
    start = node.birth.start
    kept = fetch(published, tmp_path)
    assert (kept.window, kept.root, kept.outer_steps) == (2, state.root, state.outer_steps)
    assert proven_state(node.exchange, 2) == (state.root, state.outer_steps)
    assert newest_proven_window(node.exchange) == 2
    assert parameters_digest(read_weights(kept.folder, published.hparams.model)) == parameters_digest(state.params)
    assert load_tokenizer(str(kept.folder)).digest == start.tokenizer
    assert [path.name for path in tmp_path.iterdir()] == [kept.folder.name]
    assert not (kept.folder / CARD_FILE).exists(), "no proof covers the publisher's"

    card = published.bucket(AGGREGATOR).get(key(CARD_FILE), max_bytes=1 << 20).decode()
    honest = [member.hotkey.address for member in published.members if member.role == "honest"]
    parts = (state.root, start.digest, start.dataset, "| Preset | test |", "| window | loss |", *honest)
    assert not [part for part in parts if part not in card]

    published.bucket(AGGREGATOR).delete([key("model.safetensors")])
    assert fetch(published, tmp_path) == kept, "it is here already"
    genesis = fetch(published, tmp_path, window=0)
    assert (genesis.window, genesis.root) == (0, start.root), "taken by its signed root"


def test_what_is_not_there_is_said_with_what_is_and_an_unfinished_upload_is_passed_over(published, tmp_path):
    missing(published, tmp_path, 1, match="of window 1; there are those of windows 0, 2")
    published.bucket(AGGREGATOR).delete([key("manifest.json")])
    assert fetch(published, tmp_path).window == 0
    missing(published, tmp_path, 2)


HOSTILE = {
    "TypeError": {"model-x.safetensors": OVERFLOWING},
    "not the network's": {"tokenizer.json": PANICKING.encode()},
    "RecursionError": {"tokenizer_config.json": b'{"eos_token": ' + NESTED[:50_000]},
    "do not fit the model": {"model.safetensors": safetensors({"evil" * 200: entry([1], 4)}, bytes(4))},
}
"""Files beside or instead of those of the proven state, by what is said of them."""


def test_hostile_files_are_refused_with_one_short_error_and_not_fetched_again(published, tmp_path):
    for words, files in HOSTILE.items():
        publish_with(published, published.aggregator, files)
        for expected in (words, "refused before"):
            with raising(PermanentError, Reason.CHECKPOINT_BROKEN, "of window 2 of uid", expected) as caught:
                fetch(published, tmp_path, window=2)
            assert len(str(caught.value)) < 2000
    assert fetch(published, tmp_path).window == 0, "the newest good one"
    publish_with(published, published.aggregator, {"README.md": b"# Buy", "config.json": NESTED})
    kept = fetch(published, tmp_path)
    assert kept.window == 2, "the publisher has replaced it"
    assert not (kept.folder / CARD_FILE).exists()
    assert json.loads((kept.folder / "config.json").read_text())["model_type"] == "llama"


def test_windows_that_a_bucket_invents_are_not_waited_for(published, tmp_path):
    """Nor is every one of them looked up."""
    node, bucket = published.miners[0], published.bucket(AGGREGATOR)
    before = node.chain.clock.now()
    for window in range(10**9, 10**9 + 50):
        bucket.put(window_key(Kind.PROOF, window, UID), b"{}")
        bucket.put(checkpoint_key(window, UID, "manifest.json"), b"{}")
    assert newest_proven_window(node.exchange) == 2
    assert fetch(published, tmp_path).window == 2
    assert node.chain.clock.now() == before


def test_a_checkpoint_without_proofs_or_of_another_network_is_refused(published, tmp_path):
    node = published.miners[0]
    other = type(node.birth)(node.birth.start.model_copy(update={"start_window": 3}), node.birth.publisher)
    exchange = type(node.exchange)(node.chain, node.buckets, other.network, node.hparams)
    with raising(PermanentError, Reason.WRONG_NETWORK):
        fetch_model(exchange, other, tmp_path, window=2)
    for each in published.nodes.values():
        published.bucket(each).delete(published.objects(each, "proof-2-"))
    missing(published, tmp_path, 2, Reason.ROOT_DIFFERS, match="no quorum of stake proves a state of window 2")
    assert newest_proven_window(node.exchange) == 1


def test_a_bucket_that_fails_is_no_absence(published, tmp_path):
    with published.outage(AGGREGATOR), raising(TransientError, Reason.STORE_UNREACHABLE, match="try again"):
        fetch(published, tmp_path)
