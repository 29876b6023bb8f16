from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from templar.agreement.sync_proof import NUM_SLICES, SLICE_ELEMENTS, publish_proof, read_proof, state_proof
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.publish import PublishOutcome
from tests.support.scripted_store import failing
from tests.support.subnet import ROOT, Subnet

WINDOW = 3
HASH = "0x" + "5a" * 32
HOTKEY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"


def parameters(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (40, 16), "norm": (16,), "scale": (), "head": (16, 40)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def proof(params: dict[str, Tensor], window: int = WINDOW, block_hash: str = HASH, hotkey: str = HOTKEY) -> str:
    return state_proof(params, window=window, block_hash=block_hash, hotkey=hotkey)


def test_the_same_state_gives_the_same_proof() -> None:
    params = parameters()
    assert proof(params) == proof(parameters())
    assert proof(dict(reversed(params.items()))) == proof(params)
    assert len(proof(params)) == 64


def test_a_proof_depends_on_window_block_and_hotkey() -> None:
    params = parameters()
    proofs = {
        proof(params),
        proof(params, window=WINDOW + 1),
        proof(params, block_hash="0x" + "5b" * 32),
        proof(params, hotkey=HOTKEY[:-1] + "X"),
        proof(parameters(1)),
    }
    assert len(proofs) == 5


def test_the_layout_in_memory_does_not_matter() -> None:
    params = parameters()
    turned = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in params.items()}
    assert proof(turned) == proof(params)
    assert proof({name: tensor.requires_grad_() for name, tensor in turned.items()}) == proof(params)


def test_a_renamed_parameter_is_another_state() -> None:
    params = parameters()
    params["hear"] = params.pop("head")  # in the same place of the order
    assert proof(params) != proof(parameters())


def covered(params: dict[str, Tensor], window: int) -> dict[str, set[int]]:
    """The elements that a proof looks at: those whose change changes it."""
    before = proof(params, window)
    found: dict[str, set[int]] = {}
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


def test_any_change_of_a_covered_slice_changes_it_and_the_block_chooses_the_slices() -> None:
    generator = torch.Generator().manual_seed(0)
    params = {"embed": torch.randn(3000, generator=generator), "norm": torch.randn(16, generator=generator)}
    first, second = covered(params, WINDOW), covered(params, WINDOW + 1)
    for found in (first, second):
        assert found["norm"] == set(range(16))
        assert SLICE_ELEMENTS < len(found["embed"]) <= NUM_SLICES * SLICE_ELEMENTS
    assert first["embed"] != second["embed"]


@given(st.sampled_from(["embed", "norm", "scale", "head"]), st.integers(0, 2**20), st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_one_bit_of_a_small_model_is_enough(name: str, element: int, bit: int) -> None:
    params = {key: tensor.reshape(-1)[:SLICE_ELEMENTS].clone() for key, tensor in parameters().items()}
    before = proof(params)
    bits = params[name].view(torch.int32)
    bits[element % bits.numel()] ^= -(2**31) if bit == 31 else 2**bit
    assert proof(params) != before


# Publishing and reading.


@pytest.fixture
def subnet(tmp_path: Path) -> Subnet:
    return Subnet(tmp_path, num_miners=2)


def test_a_proof_is_published_once_and_can_be_recomputed(subnet: Subnet) -> None:
    author, params = subnet.miners[0], parameters()
    exchange = subnet.exchange(author)
    assert read_proof(subnet.exchange(), author.neuron, WINDOW) is None
    for expected in (PublishOutcome.STORED, PublishOutcome.ALREADY_THERE):
        receipt = publish_proof(exchange, params, window=WINDOW, block_hash=HASH, root=ROOT, outer_steps=2)
        assert receipt.outcome is expected
    found = read_proof(subnet.exchange(), author.neuron, WINDOW)
    assert found is not None
    assert (found.root, found.outer_steps, found.window) == (ROOT, 2, WINDOW)
    assert found.proof == proof(params, hotkey=author.hotkey.address)


def test_a_proof_stands(subnet: Subnet) -> None:
    exchange = subnet.exchange(subnet.miners[0])
    publish_proof(exchange, parameters(), window=WINDOW, block_hash=HASH, root=ROOT, outer_steps=2)
    with pytest.raises(PermanentError) as caught:
        publish_proof(exchange, parameters(1), window=WINDOW, block_hash=HASH, root=ROOT, outer_steps=2)
    assert caught.value.reason is Reason.OBJECT_DIFFERS


def test_a_copied_proof_is_somebody_elses(subnet: Subnet) -> None:
    author, copycat = subnet.miners
    publish_proof(subnet.exchange(author), parameters(), window=WINDOW, block_hash=HASH, root=ROOT, outer_steps=2)
    data = subnet.store(author).inner.get(window_key(Kind.PROOF, WINDOW, author.uid), max_bytes=10_000)
    subnet.store(copycat).inner.put(window_key(Kind.PROOF, WINDOW, copycat.uid), data)
    with pytest.raises(RejectedError) as caught:
        read_proof(subnet.exchange(), copycat.neuron, WINDOW)
    assert caught.value.reason is Reason.WRONG_IDENTITY


def test_a_proof_of_another_window_is_rejected(subnet: Subnet) -> None:
    author = subnet.miners[0]
    publish_proof(subnet.exchange(author), parameters(), window=WINDOW, block_hash=HASH, root=ROOT, outer_steps=2)
    data = subnet.store(author).inner.get(window_key(Kind.PROOF, WINDOW, author.uid), max_bytes=10_000)
    subnet.store(author).inner.put(window_key(Kind.PROOF, WINDOW + 1, author.uid), data)
    with pytest.raises(RejectedError) as caught:
        read_proof(subnet.exchange(), author.neuron, WINDOW + 1)
    assert caught.value.reason is Reason.WRONG_WINDOW


def test_a_failing_store_is_no_missing_proof(subnet: Subnet) -> None:
    subnet.store(subnet.miners[0]).before = failing(TransientError(Reason.STORE_BUSY, "for a test"))
    with pytest.raises(TransientError):
        read_proof(subnet.exchange(), subnet.miners[0].neuron, WINDOW)
