"""Hostile bytes are what they say they are: refused for the reason that they were made for."""

import pickle

import pytest
import torch

from lab.adversary.hostile import TRAP, padded, pickle_bytes
from lab.adversary.mutations import MUTATIONS
from lab.hotkeys import hotkey_from_seed
from templar.canonical import sha256_hex
from templar.errors import Reason, RejectedError
from templar.exchange.payload_cache import PayloadCache
from templar.gradient.codec.wire import Header, Payload, encode
from templar.gradient.compress import FeedbackRule, compress
from templar.gradient.layout import Layout
from templar.neuron.private_state import PrivateState
from templar.training.model import parameter_shapes
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
