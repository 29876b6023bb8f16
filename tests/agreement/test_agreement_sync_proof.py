import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from templar.agreement.sync_proof import MINER_START, START, debug_values, publish_proof, read_proof, state_proof
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import MAX_DEBUG_PARAMETERS, Debug
from templar.exchange.signed import seal, unseal
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner
from templar.neuron.validator import Validator
from tests.docs.second_implementation import Spec
from tests.support.errors import raising
from tests.support.subnet import ROOT, Subnet

WINDOW = 3
HASH = "0x" + "5a" * 32
HOTKEY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
SHAPES = {"embed": (40, 16), "norm": (16,), "scale": (), "head": (16, 40)}


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@given(
    names=st.sets(st.sampled_from(list(SHAPES)), min_size=1),
    window=st.integers(0, 2**40),
    block_hash=st.sampled_from([HASH, "0x" + "5b" * 32]),
    hotkey=st.sampled_from([HOTKEY, HOTKEY[:-1] + "X"]),
    seed=st.integers(0, 9),
)
def test_the_second_implementation_proves_the_same(names, window, block_hash, hotkey, seed):
    """In any order, and in any layout in memory."""
    params = {name: tensor for name, tensor in parameters(seed).items() if name in names}
    turned = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in params.items()}
    key = {"window": window, "block_hash": block_hash, "hotkey": hotkey}
    written = {name: tensor.numpy().tobytes().hex() for name, tensor in reversed(params.items())}
    expected = Spec.proof({"parameters": written, **key})["proof"]
    assert state_proof(params, **key) == state_proof(turned, **key) == expected


@pytest.fixture
def subnet(tmp_path):
    return Subnet(tmp_path, num_miners=2)


def publish(subnet, author, params):
    return publish_proof(subnet.exchange(author), params, window=WINDOW, block_hash=HASH, root=ROOT, outer_steps=2)


def test_a_proof_is_published_once_and_can_be_recomputed(subnet):
    author, params = subnet.miners[0], parameters()
    assert read_proof(subnet.exchange(), author.neuron, WINDOW) is None
    assert publish(subnet, author, params) == publish(subnet, author, params)
    with raising(PermanentError, Reason.OBJECT_DIFFERS):
        publish(subnet, author, parameters(1))
    found = read_proof(subnet.exchange(), author.neuron, WINDOW)
    assert (found.root, found.outer_steps, found.window) == (ROOT, 2, WINDOW)
    assert found.proof == state_proof(params, window=WINDOW, block_hash=HASH, hotkey=author.hotkey.address)


def test_a_copied_proof_and_one_of_another_window_are_rejected(subnet):
    author, copycat = subnet.miners
    publish(subnet, author, parameters())
    data = subnet.store(author).inner.get(window_key(Kind.PROOF, WINDOW, author.uid), max_bytes=10_000)
    for owner, window, reason in ((copycat, WINDOW, Reason.WRONG_IDENTITY), (author, WINDOW + 1, Reason.WRONG_WINDOW)):
        subnet.store(owner).inner.put(window_key(Kind.PROOF, window, owner.uid), data)
        with raising(RejectedError, reason):
            read_proof(subnet.exchange(), owner.neuron, window)


def test_debug_values_are_two_elements_of_each_parameter_that_has_them():
    """Illegal names and values are left out, and of too many parameters the first by name are published."""
    params = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.arange(12.0), "c": torch.arange(11.0)}
    params |= {"pair": torch.tensor([[3.0], [4.0]]), "one": torch.tensor([1.0]), "none": torch.zeros(0)}
    params |= {name: torch.ones(30) for name in ("", "x" * 81, "a b", "a\n", "\u00e9", "a/b")}
    params |= {str(bad): torch.tensor([0.0, bad]) for bad in (math.nan, math.inf, -math.inf)}
    assert debug_values(params, MINER_START) == {"a": (10.0, 11.0), "b": (10.0, 11.0)}
    assert debug_values(params, START) == dict.fromkeys("abc", (0.0, 1.0)) | {"pair": (3.0, 4.0)}
    many = {f"{index:05d}": torch.ones(2) for index in reversed(range(MAX_DEBUG_PARAMETERS + 100))}
    assert list(debug_values(many, START)) == sorted(many)[:MAX_DEBUG_PARAMETERS]


def test_every_node_publishes_debug_values_beside_its_proof(network):
    # A miner of which other values are stored publishes its proof all the same.
    blocked = network.miners[0]
    other = Debug(**blocked.exchange.author(1), window=1, start=10, values={})
    network.bucket(blocked).put(window_key(Kind.DEBUG, 1, other.uid), seal(other, blocked.exchange.own_signer).encode())
    network.run([1])
    for miner in network.miners:  # as after its next reveal
        miner.publish_sync_proof(1)
    starts = {Miner: 10, Validator: 0, Aggregator: 0}
    for name, node in network.nodes.items():
        ((_, data),) = network.objects(name, "debug-1-").values()
        found = unseal(data, Debug).body
        if node is blocked:
            assert found == other
        else:
            start = starts[type(node)]
            assert (found.start, found.values) == (start, debug_values(node.state.params, start))
        assert len(network.objects(name, "proof-1-")) == 1
        before = network.objects(name)
        assert node.publish_sync_proof(1) is not None
        assert network.objects(name) == before
    assert network.roots(1) == {blocked.state.root}
