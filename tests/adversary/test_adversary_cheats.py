"""Cheats keep the rules of the exchange: each does what it says, and its payload counts all the same."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.adversary import cheats, copiers
from lab.adversary.actors import IDLE
from lab.adversary.copiers import SybilMiner, others_payloads, varied
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.signed import unseal
from templar.gradient.aggregate import aggregate
from templar.gradient.codec.sections import unpack
from templar.gradient.codec.wire import Header, Payload, decode, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout
from templar.gradient.similarity import similarity
from templar.hparams import Gradient
from templar.neuron.miner import Miner
from templar.training.train import OptimizerState
from tests.support.network import Network, tiny

pytestmark = pytest.mark.long

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


def learn_honestly(node, sequences):
    """What an honest miner in the same place learns."""
    return Miner.learn(node, WINDOWS + 1, sequences, lambda: True).update


def text(num_sequences=16, seed=0):
    return torch.randint(0, 256, (num_sequences, 32), generator=torch.Generator().manual_seed(seed))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_every_payload_counts_and_all_nodes_hold_one_state(network):
    for window in range(1, WINDOWS + 1):
        assert len(network.roots(window)) == 1
        report = network.validator.gather(window)
        assert {each.uid for each in report.submissions} == {uid_of(node) for node in network.miners}


def test_a_network_without_training_runs_with_them(tmp_path_factory):
    actors = ("gaming", "half", "wrong_data", "recycling", "within_norm", "sybil")
    kinds = {name: IDLE[name] for name in (*actors, "validator")}
    hparams = tiny(peers={"gather_peer_count": len(actors)})
    network = Network(tmp_path_factory.mktemp("idle"), hparams, actors=actors, kinds=kinds)
    try:
        network.run((1, 2))
        report = network.validator.gather(2)
        assert len(report.submissions) == len(actors)
        assert len(network.roots(2)) == 1
    finally:
        network.stop()


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


@pytest.mark.parametrize(("role", "factor"), [("sign_flip", -1.0), ("near_zero", cheats.NEAR_ZERO_FACTOR)])
def test_a_scaled_update_is_an_honest_one_times_a_number(network, role, factor):
    node = miner(network, role)
    honest = learn_honestly(node, text())
    assert same(learn(node, text()), {name: tensor * factor for name, tensor in honest.items()})


def test_one_batch_is_trained_on_again_and_again(network):
    node = miner(network, "one_batch")
    batch = network.hparams.training.batch_size
    assert same(learn(node, text()), learn_honestly(node, text()[:batch]))
    assert not same(learn(node, text()), learn_honestly(node, text()))


def test_who_overfits_sees_what_an_honest_miner_sees(network):
    node, training = miner(network, "overfitting"), network.hparams.training
    seen = training.inner_steps * training.batch_size
    longer = torch.cat([text(seen), text(8, seed=1)])
    assert same(learn(node, longer), learn(node, text(seen)))
    assert node.hparams.training.adamw.learning_rate == training.adamw.learning_rate * cheats.OVERFIT_RATE


def test_shuffled_tokens_are_the_same_tokens(network):
    node = miner(network, "shuffled")
    one_token = torch.full((16, 32), 7)
    assert same(learn(node, one_token), learn_honestly(node, one_token))
    assert not same(learn(node, text()), learn_honestly(node, text()))
    assert same(learn(node, text()), learn(node, text()))
    assert not same(learn(node, text()), learn(node, text(), window=WINDOWS + 2))


def test_a_stale_miner_trains_from_the_parameters_of_long_ago(network):
    node = miner(network, "stale")
    agreed = node.state.params
    stale = learn(node, text())
    assert node.state.params is agreed
    node.state.params = node._past[min(node._past)]
    try:
        assert same(stale, learn_honestly(node, text()))
    finally:
        node.state.params = agreed
    assert not same(stale, learn_honestly(node, text()))
    genesis = miner(network, "honest").birth.mark.window
    assert min(node._past) == genesis + 1


def test_wrong_data_is_anothers_of_the_window_before_under_the_own_name(network):
    node = miner(network, "wrong_data")
    trained = node._training_sequences(WINDOWS)
    uids = [uid_of(each) for each in network.miners]
    before = {uid: node.workload.sequences(node.workload.assignment(WINDOWS - 1, uid)) for uid in uids}
    assert [uid for uid in uids if np.array_equal(before[uid], trained)] not in ([], [uid_of(node)])
    key = window_key(Kind.MANIFEST, WINDOWS, uid_of(node))
    manifest = unseal(network.bucket(node).get(key, max_bytes=Manifest.max_bytes), Manifest).body
    assert manifest.assignment == node.workload.digest(WINDOWS, uid_of(node))


def test_a_gaming_miner_goes_along_the_gradient(network):
    node = miner(network, "gaming")
    found = learn(node, text())
    training = network.hparams.training
    gradient = node.trainer.learn(
        node.state.params,
        text(),
        training=training.model_copy(update={"recipe": "demo"}),
        outer_steps=0,
        optimizer=OptimizerState.zeros(node.state.params),
        keep_going=lambda: True,
    ).update
    for name, tensor in found.items():
        assert torch.allclose(tensor / tensor.norm(), gradient[name] / gradient[name].norm(), atol=1e-6)
        assert float(tensor.square().mean().sqrt()) == pytest.approx(0.004 * training.inner_steps)


def test_recycled_is_every_second_payload(network):
    node = miner(network, "recycling")
    payloads = [published(network, node, window) for window in range(1, WINDOWS + 1)]
    assert [payload.header.window for payload in payloads] == [1, 2, 3]
    assert payloads[0].sections == payloads[1].sections
    assert payloads[1].sections != payloads[2].sections


def test_plagiarised_is_another_payload_of_the_window_before(network):
    node = miner(network, "plagiarising")
    for window in range(2, WINDOWS + 1):
        others = [published(network, each, window - 1).sections for each in network.miners if each is not node]
        assert published(network, node, window).sections in others


def test_a_blend_is_mostly_copied(network):
    node = miner(network, "blending")
    for window in range(2, WINDOWS + 1):
        others = [published(network, each, window - 1) for each in network.miners if each is not node]
        blended = published(network, node, window)
        assert blended.sections not in [other.sections for other in others]
        shares = [similarity([blended, other], node.layout).overlap[0, 1] for other in others]
        assert copiers.BLENDED_SHARE - 0.05 < max(shares) < 0.9


def test_a_payload_within_the_norm_pulls_against_the_mean(network):
    node = miner(network, "within_norm")
    payloads = others_payloads(node, WINDOWS)
    assert set(payloads) == {uid_of(each) for each in network.miners if each is not node}
    updates = [aggregate([payload], node.layout) for payload in payloads.values()]
    for name, pulled in learn(node, text()).items():
        values = torch.stack([update[name] for update in updates])
        mean, deviation = values.mean(dim=0), values.std(dim=0, correction=0)
        wanted = mean - copiers.WITHIN_NORM_DEVIATIONS * deviation * mean.sign()
        assert torch.allclose(pulled, wanted, atol=1e-6)
        assert float(pulled.norm()) < 2 * float(values.norm(dim=tuple(range(1, values.dim()))).max())


def test_sybils_share_one_training_and_hardly_differ(network):
    one, other = miners(network, "sybil")
    for window in range(1, WINDOWS + 1):
        assert torch.equal(one._training_sequences(window), other._training_sequences(window))
        payloads = [published(network, each, window) for each in (one, other)]
        assert payloads[0].sections != payloads[1].sections
        assert similarity(payloads, one.layout).overlap[0, 1] > 0.9
    honest = miner(network, "honest")
    assert (
        similarity([published(network, one, WINDOWS), published(network, honest, WINDOWS)], one.layout).taken[0, 1]
        < 0.6
    )


LAYOUT = Layout.of(
    {"matrix": (64, 64), "norm": (16,)},
    Gradient(momentum_decay=0.9, topk_compression=32, target_chunk=32, use_dct=False),
    "sparseloco",
)


def payload(seed):
    generator = torch.Generator().manual_seed(seed)
    update = {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in LAYOUT.tensors}
    update["matrix"][:32, :32] = 0.0  # a silent chunk
    rule = FeedbackRule("sparseloco", decay=0.9, learning_rate=1.0)
    compressed = compress(FeedbackState.zeros(LAYOUT), update, layout=LAYOUT, rule=rule)
    return Payload.of(Header("sparseloco", 1, 3, "hotkey", LAYOUT.digest), compressed.tensors, LAYOUT)


@given(kept=st.floats(0.05, 0.99), scale_steps=st.integers(0, 1000), seed=st.integers(0, 2**64))
def test_a_varied_payload_is_legal_and_keeps_what_it_is_to_keep(kept, scale_steps, seed):
    original = payload(seed=1)
    found = varied(original.sections, kept=kept, seed=seed, scale_steps=scale_steps)
    assert found == varied(original.sections, kept=kept, seed=seed, scale_steps=scale_steps)
    copy = decode(encode(Payload(original.header, found), LAYOUT), LAYOUT)
    shared = similarity([original, copy], LAYOUT)
    assert abs(float(shared.overlap[0, 1]) - kept) <= 1 / 32
    assert unpack(copy.sections["matrix"]).steps[0] == 0
    assert copy.sections["norm"].num_active == original.sections["norm"].num_active
