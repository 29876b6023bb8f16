"""Hostile bytes are what they say they are: refused for the reason that they were made for."""

import pickle

import pytest

from lab.adversary.hostile import TRAP, padded, pickle_bytes
from lab.adversary.mutations import MUTATIONS
from templar.canonical import sha256_hex
from templar.errors import Reason, RejectedError
from templar.exchange.payload_cache import PayloadCache
from templar.gradient.layout import Layout
from templar.training.model import parameter_shapes
from tests.support.network import tiny
from tests.support.subnet import member, payload_bytes

AUTHOR, WINDOW = member(5), 3


@pytest.fixture(scope="module", params=["local", "local-demo"])
def layout(request):
    hparams = tiny(request.param)
    return Layout.of(parameter_shapes(hparams.model), hparams.gradient, hparams.training.recipe)


def admit(data, layout, folder):
    """What every reader does with a payload."""
    cache = PayloadCache(folder, layout)
    cache.check_size(len(data), uid=AUTHOR.uid)
    cache.admit(data, sha256_hex(data), window=WINDOW, uid=AUTHOR.uid, hotkey=AUTHOR.hotkey.address)


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
def test_every_mutation_is_refused_for_its_reason(name, layout, tmp_path):
    honest = payload_bytes(AUTHOR, WINDOW, layout=layout)
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
