"""The definitions on a GPU give the bytes that they give on a CPU. Skipped where there is none."""

import pytest
import torch
from gradient_cases import RECIPES, header_of, random_payload, random_update, settings_of

from templar.gradient import Recipe
from templar.gradient.aggregate import aggregate
from templar.gradient.codec.wire import Payload, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SHAPES = {"matrix": (192, 320), "odd": (65, 39), "vector": (640,), "prime": (97,), "zero": ()}

each_kind = pytest.mark.parametrize("use_dct", [False, True])
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


@each_kind
@each_recipe
@pytest.mark.parametrize("levels", [1, 2])
def test_compression(recipe: Recipe, levels: int, *, use_dct: bool) -> None:
    layout = Layout.of(SHAPES, settings_of(64, 64, levels=levels, use_dct=use_dct), recipe)
    rule, update = FeedbackRule(recipe, decay=0.9, learning_rate=0.7), random_update(layout, 1)
    found = []
    for device in ("cpu", "cuda"):
        state = FeedbackState.zeros(layout, device)
        there = {name: tensor.to(device) for name, tensor in update.items()}
        compressed = compress(state, there, layout=layout, rule=rule)
        residual = {name: buffer.cpu() for name, buffer in compressed.state.buffers.items()}
        found.append((encode(Payload.of(header_of(layout), compressed.tensors, layout), layout), residual))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in layout.names)


@each_kind
@each_recipe
def test_aggregates(recipe: Recipe, *, use_dct: bool) -> None:
    layout = Layout.of(SHAPES, settings_of(64, 64, use_dct=use_dct), recipe)
    payloads = [random_payload(layout, seed) for seed in range(5)]
    on_cpu, on_gpu = aggregate(payloads, layout), aggregate(payloads, layout, device="cuda")
    assert all(torch.equal(on_cpu[name], on_gpu[name].cpu()) for name in layout.names)
