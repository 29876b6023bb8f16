"""Codec, aggregate, outer step and state root on a CUDA device; skipped where there is none. `make gpu` runs it."""

import pytest
import torch
from gradient_cases import RECIPES, header_of, layout_of, random_update, same_bits, settings_of

from templar.agreement.state import parameters_digest
from templar.gradient import kernels
from templar.gradient.aggregate import aggregate, outer_step
from templar.gradient.codec.wire import Payload, decode, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

SMALL = {"matrix": (128, 192), "odd": (65, 39), "vector": (320,), "prime": (97,), "stack": (2, 3, 64)}
LARGE = {"matrix": (1536, 1024), "vector": (1024,)}
"""Large enough for the compiled kernels, which a CPU then takes; a GPU takes the definitions."""
PEERS = 3


@pytest.mark.parametrize("shapes", [SMALL, LARGE])
@pytest.mark.parametrize("use_dct", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_windows_on_a_device_have_the_bits_of_the_cpu(recipe, shapes, *, use_dct):
    layout = layout_of(shapes, settings_of(64, 64, use_dct=use_dct), recipe)
    assert kernels.uses_kernels(layout.num_elements) == (shapes is LARGE)
    rule, places = FeedbackRule(recipe, decay=0.9, learning_rate=0.7), ("cpu", "cuda")
    states = {place: [FeedbackState.zeros(layout, place) for _ in range(PEERS)] for place in places}
    params = {place: moved(random_update(layout, 99), place) for place in places}
    for window in range(3):
        published: dict[str, list[bytes]] = {}
        for place in places:
            # 1. Each peer's payload.
            datas = published.setdefault(place, [])
            for peer in range(PEERS):
                update = moved(random_update(layout, 10 * window + peer), place)
                compressed = compress(states[place][peer], update, layout=layout, rule=rule)
                states[place][peer] = compressed.state
                datas.append(encode(Payload.of(header_of(layout, peer), compressed.tensors, layout), layout))
            # 2. The outer step.
            change = aggregate(
                [decode(data, layout) for data in datas], layout, out=moved(random_update(layout, 1), place)
            )
            assert {tensor.device.type for tensor in change.values()} == {place}
            outer_step(params[place], change, learning_rate=0.4, weight_decay=0.1)
        assert published["cpu"] == published["cuda"]
        assert parameters_digest(params["cpu"]) == parameters_digest(params["cuda"])
    for ours, theirs in zip(*states.values(), strict=True):
        assert same_bits(ours.buffers, moved(theirs.buffers, "cpu"))


def moved(tensors, place):
    return {name: tensor.to(place) for name, tensor in tensors.items()}
