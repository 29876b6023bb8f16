import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.agreement.sync_proof import (
    MINER_START,
    SLICE_ELEMENTS,
    START,
    debug_values,
    publish_debug,
    publish_proof,
    read_proof,
    state_proof,
)
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import MAX_DEBUG_PARAMETERS, Debug
from templar.exchange.publish import PublishOutcome
from templar.exchange.signed import seal, unseal
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner
from templar.neuron.validator import Validator
from tests.support.errors import raising
from tests.support.scripted_store import failing
from tests.support.subnet import ROOT, Subnet, member

WINDOW = 3
HASH = "0x" + "5a" * 32
HOTKEY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (40, 16), "norm": (16,), "scale": (), "head": (16, 40)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def proof(params, window=WINDOW, block_hash=HASH, hotkey=HOTKEY):
    return state_proof(params, window=window, block_hash=block_hash, hotkey=hotkey)


def test_a_proof_depends_on_what_is_proved_and_not_on_order_or_the_layout_in_memory():
    params = parameters()
    named = {"hear" if name == "head" else name: tensor for name, tensor in params.items()}  # in the same order
    proofs = [
        proof(params),
        proof(params, window=WINDOW + 1),
        proof(params, block_hash="0x" + "5b" * 32),
        proof(params, hotkey=HOTKEY[:-1] + "X"),
        proof(parameters(1)),
        proof(named),
    ]
    assert len(set(proofs)) == len(proofs)
    turned = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in params.items()}
    grown = {name: tensor.requires_grad_() for name, tensor in turned.items()}
    assert {proof(other) for other in (dict(reversed(params.items())), turned, grown)} == {proofs[0]}


def covered(params, window):
    """The elements that a proof looks at: those whose change changes it."""
    before = proof(params, window)
    found = {}
    for name, tensor in params.items():
        flat = tensor.view(-1)
        for index in range(flat.numel()):
            kept = flat[index].item()
            flat[index] = kept + 1.0
            if proof(params, window) != before:
                found.setdefault(name, set()).add(index)
            flat[index] = kept
    assert proof(params, window) == before
    return found


def test_any_change_of_a_covered_slice_changes_it_and_the_block_chooses_the_slices():
    generator = torch.Generator().manual_seed(0)
    params = {"embed": torch.randn(400, generator=generator), "norm": torch.randn(16, generator=generator)}
    first, second = covered(params, WINDOW), covered(params, WINDOW + 1)
    for found in (first, second):
        assert found["norm"] == set(range(16))
        assert SLICE_ELEMENTS < len(found["embed"]) <= 400
    assert first["embed"] != second["embed"]


@given(st.sampled_from(["embed", "norm", "scale", "head"]), st.integers(0, 2**20), st.integers(0, 31))
@settings(max_examples=40, deadline=None)
def test_one_bit_of_a_small_model_is_enough(name, element, bit):
    params = {key: tensor.reshape(-1)[:SLICE_ELEMENTS].clone() for key, tensor in parameters().items()}
    before = proof(params)
    bits = params[name].view(torch.int32)
    bits[element % bits.numel()] ^= -(2**31) if bit == 31 else 2**bit
    assert proof(params) != before


@pytest.fixture
def subnet(tmp_path):
    return Subnet(tmp_path, num_miners=2)


def publish(subnet, author, params):
    exchange = subnet.exchange(author)
    return publish_proof(exchange, params, window=WINDOW, block_hash=HASH, root=ROOT, outer_steps=2).outcome


def test_a_proof_is_published_once_and_can_be_recomputed(subnet):
    author, params = subnet.miners[0], parameters()
    assert read_proof(subnet.exchange(), author.neuron, WINDOW) is None
    assert publish(subnet, author, params) is PublishOutcome.STORED
    assert publish(subnet, author, params) is PublishOutcome.ALREADY_THERE
    with raising(PermanentError, Reason.OBJECT_DIFFERS):
        publish(subnet, author, parameters(1))
    found = read_proof(subnet.exchange(), author.neuron, WINDOW)
    assert (found.root, found.outer_steps, found.window) == (ROOT, 2, WINDOW)
    assert found.proof == proof(params, hotkey=author.hotkey.address)


def test_a_copied_proof_and_one_of_another_window_are_rejected(subnet):
    author, copycat = subnet.miners
    publish(subnet, author, parameters())
    data = subnet.store(author).inner.get(window_key(Kind.PROOF, WINDOW, author.uid), max_bytes=10_000)
    for owner, window, reason in ((copycat, WINDOW, Reason.WRONG_IDENTITY), (author, WINDOW + 1, Reason.WRONG_WINDOW)):
        subnet.store(owner).inner.put(window_key(Kind.PROOF, window, owner.uid), data)
        with raising(RejectedError, reason):
            read_proof(subnet.exchange(), owner.neuron, window)


@pytest.mark.parametrize("kind", [TransientError, PermanentError])
def test_a_failing_store_is_not_a_missing_proof(subnet, kind):
    author = subnet.miners[0]
    subnet.store(author).before = failing(kind(Reason.STORE_BUSY, "for a test"))
    with pytest.raises(kind):
        read_proof(subnet.exchange(), author.neuron, WINDOW)
    with pytest.raises(kind):
        publish_debug(subnet.exchange(author), parameters(), window=WINDOW, role="miner")


ALICE = member(5)


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


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_every_finite_float32_is_read_back_bit_for_bit(one, other):
    packed = struct.pack("<II", one, other)
    values = debug_values({"a": torch.frombuffer(bytearray(packed), dtype=torch.float32)}, START)
    body = Debug(**ALICE.signing, window=WINDOW, start=0, values=values)
    read = unseal(seal(body, ALICE.hotkey).encode(), Debug).body.values
    assert [struct.pack("<ff", *pair) for pair in read.values()] == [packed] * len(values)
    floats = struct.unpack("<ff", packed)
    assert bool(values) == all(map(math.isfinite, floats))


@pytest.mark.parametrize(("role", "start"), [("miner", 10), ("validator", 0), ("aggregator", 0)])
def test_debug_values_are_published_once_and_stay(subnet, role, start):
    author, exchange = subnet.miners[0], subnet.exchange(subnet.miners[0])
    for expected in (PublishOutcome.STORED, PublishOutcome.ALREADY_THERE):
        receipt = publish_debug(exchange, parameters(), window=WINDOW, role=role)
        assert receipt.outcome is expected
    assert publish_debug(exchange, parameters(1), window=WINDOW, role=role) is None
    key = window_key(Kind.DEBUG, WINDOW, author.uid)
    found = unseal(subnet.store(author).inner.get(key, max_bytes=Debug.max_bytes), Debug).body
    assert (found.start, found.indices, found.values) == (start, (start, start + 2), debug_values(parameters(), start))


def test_every_node_publishes_debug_values_beside_its_proof(network):
    # A miner of which other values are stored publishes its proof all the same.
    blocked = network.miners[0]
    other = Debug(**blocked.exchange.author(1), window=1, start=10, values={})
    key = window_key(Kind.DEBUG, 1, other.uid)
    network.bucket(blocked).put(key, seal(other, blocked.exchange.own_signer).encode())
    network.run([1])
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
