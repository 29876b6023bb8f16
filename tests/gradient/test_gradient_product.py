"""Inner products of payloads' updates with gradients: those of the updates themselves, without making them."""

import math
import warnings

import gradient_cases as cases
import pytest
import torch
from hypothesis import given

from templar.gradient import kernels
from templar.gradient.aggregate import single_update, target_norms
from templar.gradient.kernels import Backend
from templar.gradient.product import UpdateProducts
from tests.support.threads import threads

IMPLEMENTATIONS: tuple[Backend, ...] = ("torch", "numba")
LAYOUTS = [
    cases.layout_of(cases.SHAPES, cases.settings_of(use_dct=use_dct), recipe)
    for recipe in cases.RECIPES
    for use_dct in (False, True)
]


def payloads_of(layout):
    """Small, medium, large and made up: some are clipped."""
    made_up = [cases.any_payload(layout, 4), cases.any_payload(layout, 5)]
    return [*(cases.random_payload(layout, seed, size=size) for seed, size in enumerate((0.01, 1.0, 50.0))), *made_up]


def gradients_of(layout, seed=9):
    return cases.random_update(layout, seed)


def products(payloads, layout, gradients, targets=None):
    known = target_norms(payloads, layout) if targets is None else targets
    return UpdateProducts(payloads, layout, known).with_gradients(gradients, range(len(payloads)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@cases.few
@given(layout=cases.layouts, seed=cases.seeds)
def test_a_product_is_that_of_the_update(implementation, layout, seed):
    payloads = [
        cases.any_payload(layout, seed),
        cases.random_payload(layout, seed),
        cases.random_payload(layout, 1, size=50.0),
    ]
    zeros = {tensor.name: torch.zeros(tensor.shape) for tensor in layout.tensors}
    with kernels.forced(implementation):
        assert products(payloads[1:], layout, zeros) == [0.0, 0.0]
        large = {name: torch.full_like(tensor, 3e38) for name, tensor in zeros.items()}
        assert all(map(math.isfinite, products(payloads, layout, large)))
        gradients, targets = gradients_of(layout, seed), target_norms(payloads, layout)
        for payload, found in zip(payloads, products(payloads, layout, gradients, targets), strict=True):
            update = single_update(payload, layout, targets)
            terms = torch.cat([(update[name].double() * gradients[name].double()).flatten() for name in update])
            rounding = 2.0**-23 * math.fsum(terms.abs().tolist())  # of the update to float32; the product has none
            assert found == pytest.approx(math.fsum(terms.tolist()), rel=1e-12, abs=rounding)


@cases.few
@given(layout=cases.layouts, seed=cases.seeds)
def test_both_implementations_give_the_same_bits(layout, seed):
    payloads, gradients = (
        [cases.any_payload(layout, seed), cases.random_payload(layout, seed)],
        gradients_of(layout, seed),
    )
    found = []
    for implementation in IMPLEMENTATIONS:
        for count in (1, 2):
            with kernels.forced(implementation), threads(count):
                found.append([value.hex() for value in products(payloads, layout, gradients)])
    if layout.recipe == "sparseloco" and not layout.use_dct:
        assert all(each == found[0] for each in found)
    else:
        assert found[0] == found[2], "one thread sums a dense update in one order"


# Queries.


@pytest.mark.parametrize("layout", LAYOUTS[:3:2] + LAYOUTS[4:5])
def test_one_at_a_time_or_all_at_once_in_any_order(layout):
    payloads, gradients = payloads_of(layout), gradients_of(layout)
    asked = UpdateProducts(payloads, layout, target_norms(payloads, layout))
    together = asked.with_gradients(gradients, range(len(payloads)))
    assert [asked.with_gradients(gradients, [index])[0] for index in range(len(payloads))] == together
    assert asked.with_gradients(gradients, [3, 1, 1]) == [together[3], together[1], together[1]]
    assert asked.with_gradients(gradients, []) == []
    other = gradients_of(layout, 10)
    assert asked.with_gradients(other, range(len(payloads))) == products(payloads, layout, other), "nothing is kept"
    assert asked.with_gradients(gradients, range(len(payloads))) == together


def test_gradients_are_only_read_in_any_memory_layout():
    layout = LAYOUTS[0]
    gradients = gradients_of(layout)
    before = {name: tensor.clone() for name, tensor in gradients.items()}
    found = products([cases.random_payload(layout, 1)], layout, gradients)
    assert all(torch.equal(gradients[name], before[name]) for name in before)
    turned = {name: tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor for name, tensor in gradients.items()}
    turned = {name: tensor.requires_grad_() for name, tensor in turned.items()}
    assert products([cases.random_payload(layout, 1)], layout, turned) == found


def test_a_payload_of_another_layout_is_refused():
    own, foreign = cases.random_payload(LAYOUTS[0], 1), cases.random_payload(cases.layout_of({"p": (8,), "q": (4,)}), 1)
    with pytest.raises(ValueError, match="another layout"):
        UpdateProducts([own, foreign], LAYOUTS[0], target_norms([own], LAYOUTS[0]))


# Gradients that are not finite.


def active(layout):
    """No chunk is silent."""
    return cases.published(layout, {tensor.name: torch.randn(tensor.shape) + 3 for tensor in layout.tensors})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS[:3:2], ids=lambda each: f"{each.recipe}-{each.use_dct}")
def test_gradients_that_are_not_finite_give_no_number_and_no_warning(layout, implementation):
    payload = active(layout)
    gradients = gradients_of(layout)
    broken = [
        {**gradients, name: torch.full_like(gradients[name], bad)}
        for name in layout.names
        for bad in (-math.inf, math.nan)
    ]
    # The products of two tensors are plus and minus infinity.
    update = single_update(payload, layout, target_norms([payload], layout))
    signs = {name: 1 if place % 2 else -1 for place, name in enumerate(layout.names)}
    cancelling = {
        name: torch.where(tensor != 0, torch.sign(tensor) * signs[name] * math.inf, torch.ones(()))
        for name, tensor in update.items()
    }
    with warnings.catch_warnings(), kernels.forced(implementation):
        warnings.simplefilter("error")
        assert not any(math.isfinite(products([payload], layout, each)[0]) for each in broken)
        assert math.isnan(products([payload], layout, cancelling)[0])
