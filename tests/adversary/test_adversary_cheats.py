"""Cheats keep the rules of the exchange: each does what it says, and its payload counts all the same."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.adversary import cheats, copiers
from lab.adversary.copiers import SybilMiner, varied
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.signed import unseal
from templar.gradient.codec.sections import unpack
from templar.gradient.codec.wire import Payload, decode, encode
from templar.gradient.layout import Layout
from templar.gradient.similarity import similarity
from templar.hparams import Gradient
from templar.neuron.miner import Miner
from tests.support.network import Network, tiny
from tests.support.payloads import payload_of, random_update

pytestmark = pytest.mark.slow

TRAINING = ("half", "wrong_data", "one_batch", "overfitting", "sign_flip", "shuffled", "stale", "near_zero", "gaming")
COPYING = ("recycling", "plagiarising", "blending", "within_norm", "sybil", "sybil")
ROLES = ("honest", "honest", *TRAINING, *COPYING)
WINDOWS = 3
GRADIENT = {"target_chunk": 16, "topk_compression": 16}
"""Few coefficients of many, so that who copies and who does not are far apart."""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Three windows of a network with every cheat, all of them gathered."""
    peers = {"gather_peer_count": len(ROLES), "peer_replacement_frequency": 100}
    hparams = tiny(peers=peers, gradient=GRADIENT, training={"inner_steps": 4})
    network = Network(tmp_path_factory.mktemp("cheats"), hparams, actors=ROLES)
    network.run(range(1, WINDOWS + 1))
    yield network
    network.stop()
    assert not SybilMiner.families


def miners(network, role):
    names = [member.name for member in network.members if member.role == role]
    return [node for name in names if isinstance(node := network.nodes[name], Miner)]


def miner(network, role):
    return miners(network, role)[0]


def uid_of(node):
    return node.exchange.identity(1).uid


def published(network, node, window):
    """A miner's payload, as everybody can read it."""
    name = node.name
    data = network.bucket(name).get(window_key(Kind.GRADIENT, window, uid_of(node)), max_bytes=1 << 20)
    return decode(data, node.layout)


def learn(node, sequences, window=WINDOWS + 1):
    return node.learn(window, sequences, lambda: True).update


def text(num_sequences=16, seed=0):
    return torch.randint(0, 256, (num_sequences, 32), generator=torch.Generator().manual_seed(seed))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_every_payload_counts_and_all_nodes_hold_one_state(network):
    for window in range(1, WINDOWS + 1):
        assert len(network.roots(window)) == 1
        report = network.validator.gather(window)
        assert {each.uid for each in report.submissions} == {uid_of(node) for node in network.miners}


@pytest.mark.parametrize(
    ("role", "window", "steps"),
    [
        ("honest", 2, 4),
        ("half", 2, 2),
        ("overfitting", 2, 12),
        ("one_batch", 2, 4),
        *((role, 1, 4) for role in ("recycling", "plagiarising", "blending", "within_norm")),  # nothing to copy yet
    ],
)
def test_how_many_steps_are_trained(network, role, window, steps):
    known = miner(network, role).journal.result(window, "train")
    assert f'"num_steps":{steps},' in known


@pytest.mark.parametrize("role", [role for role in TRAINING if role not in ("half", "wrong_data", "overfitting")])
def test_a_cheat_of_training_learns_something_else_from_the_same_text(network, role):
    node, agreed = miner(network, role), miner(network, role).state.params
    factor = {"sign_flip": -1.0, "near_zero": cheats.NEAR_ZERO_FACTOR}.get(role)
    found, honest = learn(node, text()), Miner.learn(node, WINDOWS + 1, text(), lambda: True).update
    assert not same(found, honest)
    assert same(found, learn(node, text())), "the same seed gives the same update"
    assert factor is None or same(found, {name: tensor * factor for name, tensor in honest.items()})
    assert node.state.params is agreed


@pytest.mark.parametrize(
    ("role", "window", "most", "least"),
    [
        ("recycling", 2, 1.01, 0.99),  # its own of the window before
        ("plagiarising", 2, 1.01, 0.99),
        ("blending", 2, 0.9, copiers.BLENDED_SHARE - 0.05),
        ("sybil", 3, 0.999, 0.9),
    ],
)
def test_a_copier_publishes_so_much_of_somebody(network, role, window, most, least):
    """Of the window before, or of its twin in the same window."""
    node = miner(network, role)
    if role == "sybil":
        others = [published(network, miners(network, role)[1], window)]
    else:
        others = [
            published(network, each, window - 1) for each in network.miners if (each is node) == (role == "recycling")
        ]
    own = published(network, node, window)
    compared = [similarity([own, other], node.layout) for other in others]
    assert least <= max(found.shared[0, 1] / found.counts[0] for found in compared) < most


def test_wrong_data_is_anothers_of_the_window_before_under_the_own_name(network):
    node = miner(network, "wrong_data")
    trained = node._training_sequences(WINDOWS)
    uids = [uid_of(each) for each in network.miners]
    before = {uid: node.workload.sequences(node.workload.assignment(WINDOWS - 1, uid)) for uid in uids}
    assert [uid for uid in uids if np.array_equal(before[uid], trained)] not in ([], [uid_of(node)])
    key = window_key(Kind.MANIFEST, WINDOWS, uid_of(node))
    manifest = unseal(network.bucket(node).get(key, max_bytes=Manifest.max_bytes), Manifest).body
    assert manifest.assignment == node.workload.digest(WINDOWS, uid_of(node))


LAYOUT = Layout.of(
    {"matrix": (64, 64), "norm": (16,)},
    Gradient(momentum_decay=0.9, topk_compression=32, target_chunk=32, use_dct=False),
    "sparseloco",
)


@given(kept=st.floats(0.05, 0.99), scale_steps=st.integers(0, 1000), seed=st.integers(0, 2**64))
def test_a_varied_payload_is_legal_and_keeps_what_it_is_to_keep(kept, scale_steps, seed):
    update = random_update(LAYOUT, 1)
    update["matrix"][:32, :32] = 0.0  # a silent chunk
    original = payload_of(LAYOUT, update)
    found = varied(original.sections, kept=kept, seed=seed, scale_steps=scale_steps)
    assert found == varied(original.sections, kept=kept, seed=seed, scale_steps=scale_steps)
    copy = decode(encode(Payload(original.header, found), LAYOUT), LAYOUT)
    compared = similarity([original, copy], LAYOUT)
    assert abs(compared.shared[0, 1] / compared.counts[0] - kept) <= 1 / 32
    assert unpack(copy.sections["matrix"]).steps[0] == 0
    assert copy.sections["norm"].num_active == original.sections["norm"].num_active
