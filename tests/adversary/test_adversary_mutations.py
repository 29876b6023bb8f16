"""Hostile bytes are what they say they are: refused for the reason that they were made for."""

import pickle

import pytest
import torch

from lab.adversary import hostile
from lab.adversary.hostile import TRAP, padded, pickle_bytes
from lab.adversary.mutations import MUTATIONS
from lab.hotkeys import hotkey_from_seed
from templar.canonical import sha256_hex
from templar.errors import Reason, RejectedError
from templar.exchange.objects import Manifest
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.signed import seal, unseal
from templar.gradient.codec.wire import Header, Payload, encode
from templar.gradient.compress import FeedbackRule, compress
from templar.gradient.layout import Layout
from templar.neuron.private_state import PrivateState
from templar.training.model import parameter_shapes
from tests.support.errors import raising
from tests.support.network import tiny

SIGNER = hotkey_from_seed(bytes(32))
UID, WINDOW = 5, 3


@pytest.fixture(scope="module", params=["local", "local-demo"])
def layout(request):
    hparams = tiny(request.param)
    return Layout.of(parameter_shapes(hparams.model), hparams.gradient, hparams.training.recipe)


@pytest.fixture(scope="module")
def honest(layout):
    params = {tensor.name: torch.zeros(tensor.shape) for tensor in layout.tensors}
    generator = torch.Generator().manual_seed(1)
    update = {name: torch.randn(tensor.shape, generator=generator) * 1e-3 for name, tensor in params.items()}
    rule = FeedbackRule(layout.recipe, 0.9, 1.0)
    tensors = compress(PrivateState.fresh(layout).feedback, update, layout=layout, rule=rule).tensors
    return encode(
        Payload.of(Header(layout.recipe, WINDOW, UID, SIGNER.address, layout.digest), tensors, layout), layout
    )


def admit(data, layout, folder):
    """What every reader does with a payload."""
    cache = PayloadCache(folder, layout)
    cache.check_size(len(data), uid=UID)
    cache.admit(data, sha256_hex(data), window=WINDOW, uid=UID, hotkey=SIGNER.address)


PROBES = {
    "index_beyond": Reason.BAD_PAYLOAD,
    "index_twice": Reason.BAD_PAYLOAD,
    "scale_nan": Reason.BAD_PAYLOAD,
    "scale_below_table": Reason.BAD_PAYLOAD,
    "no_largest_scale": Reason.NOT_CANONICAL,
    "other_k": Reason.WRONG_SHAPES,
}
"""Length, header and checksum are legal: the reason is that of the check itself."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_refused_for_its_reason(name, honest, layout, tmp_path):
    admit(honest, layout, tmp_path)
    mutation, reasons = MUTATIONS[name]
    hostile_bytes = mutation(honest, layout)
    assert hostile_bytes != honest
    assert mutation(honest, layout) == hostile_bytes
    with pytest.raises(RejectedError) as caught:
        admit(hostile_bytes, layout, tmp_path)
    assert caught.value.reason in ({PROBES[name]} if name in PROBES else reasons)
    assert str(caught.value).isprintable()


def test_a_pickle_is_one(tmp_path):
    data = padded(pickle_bytes(tmp_path), 500)
    assert len(data) == 500
    pickle.loads(data)
    assert (tmp_path / TRAP).is_dir()


def manifest():
    author = {"netuid": 1, "genesis": "0" * 64, "uid": UID, "hotkey": SIGNER.address, "window": WINDOW}
    hashes = dict.fromkeys(("payload_sha256", "assignment", "root_before"), "1" * 64)
    return seal(Manifest(**author, **hashes, payload_bytes=1000, steps=1, tokens=128), SIGNER).encode()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (hostile.deep_json, Reason.MALFORMED),
        (hostile.huge_string, Reason.MALFORMED),
        (hostile.control_characters, Reason.MALFORMED),
        (hostile.raw_control_characters, Reason.MALFORMED),
        (hostile.not_a_number, Reason.MALFORMED),
        (hostile.spaced, Reason.NOT_CANONICAL),
        (hostile.forged_signature, Reason.BAD_SIGNATURE),
        (hostile.no_manifest, Reason.MALFORMED),
    ],
)
def test_every_spoilt_manifest_is_refused_for_its_reason(spoil, reason):
    honest_bytes = manifest()
    assert unseal(honest_bytes, Manifest).body.uid == UID
    with raising(RejectedError, reason) as caught:
        unseal(spoil(honest_bytes), Manifest)
    assert str(caught.value).isprintable()
