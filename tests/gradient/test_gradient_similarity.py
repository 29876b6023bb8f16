"""What copies share with their originals, and honest miners do not."""

import numpy as np
import pytest
import torch
from gradient_cases import HOTKEY, few, layouts, random_payload, seeds, settings_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from templar.gradient import backend
from templar.gradient.codec.sections import unpack
from templar.gradient.codec.wire import Header, Payload
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout
from templar.gradient.similarity import Similarity, similarity
from tests.support.threads import threads

LAYOUT = Layout.of({"matrix": (256, 256), "norm": (256,)}, settings_of(64, 64), "sparseloco")
BACKENDS = pytest.mark.parametrize("name", ["torch", "numba"])


def update(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in LAYOUT.tensors}


def publish(values: dict[str, Tensor], uid: int = 0) -> Payload:
    rule = FeedbackRule("sparseloco", decay=0.9, learning_rate=1.0)
    compressed = compress(FeedbackState.zeros(LAYOUT), values, layout=LAYOUT, rule=rule)
    return Payload.of(Header("sparseloco", 1, uid, HOTKEY, LAYOUT.digest), compressed.tensors, LAYOUT)


def mixed(one: dict[str, Tensor], other: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    return {name: one[name] * (1 - share) + other[name] * share for name in one}


def pair(first: Payload, second: Payload) -> Similarity:
    return similarity([first, second], LAYOUT)


def test_strangers_share_what_chance_gives_them() -> None:
    found = similarity([publish(update(seed)) for seed in range(6)], LAYOUT)
    apart = ~np.eye(6, dtype=bool)
    assert found.chance == pytest.approx(64 / 4096)
    assert np.abs(found.overlap[apart] - found.chance).max() < 0.02
    assert 0.2 < found.agreement[apart].mean() < 0.8
    assert found.copied[apart].max() < 0.02


@pytest.mark.parametrize("factor", [1.0, 0.01, 300.0])
def test_a_scaled_copy_is_all_there(factor: float) -> None:
    original = update(1)
    found = pair(publish(original), publish({name: tensor * factor for name, tensor in original.items()}))
    assert found.overlap[0, 1] == found.agreement[0, 1] == found.copied[0, 1] == 1.0


def test_a_sign_flipped_copy_shares_places_and_no_sign() -> None:
    original = update(1)
    found = pair(publish(original), publish({name: -tensor for name, tensor in original.items()}))
    assert (found.overlap[0, 1], found.agreement[0, 1]) == (1.0, 0.0)


def test_more_noise_leaves_less_of_a_copy_and_still_enough() -> None:
    original, noise = update(1), update(2)
    shares = [pair(publish(original), publish(mixed(original, noise, share))) for share in (0.0, 0.1, 0.2, 0.3, 0.4)]
    copied = [float(found.copied[0, 1]) for found in shares]
    assert copied == sorted(copied, reverse=True)
    assert copied[0] == 1.0
    assert copied[2] > 0.5  # a fifth of noise
    assert copied[4] > 0.15  # two fifths, still far beyond what strangers share
    assert all(found.agreement[0, 1] > 0.99 for found in shares)


def test_a_partial_copy_shows_the_part() -> None:
    original, own = update(1), update(2)
    kept = {"matrix": torch.cat([original["matrix"][:128], own["matrix"][128:]]), "norm": own["norm"]}
    found = pair(publish(original), publish(kept))
    assert found.copied[0, 1] == pytest.approx(0.5, abs=0.02)


def test_who_publishes_less_is_measured_by_what_it_publishes() -> None:
    """Silence in most chunks does not hide that the rest is copied."""
    original = update(1)
    quiet = {"matrix": original["matrix"].clone(), "norm": original["norm"] * 0}
    quiet["matrix"][64:] = 0
    found = pair(publish(original), publish(quiet))
    assert found.counts.tolist() == [16 * 64, 4 * 64]
    assert found.overlap[0, 1] == found.copied[0, 1] == 1.0


@BACKENDS
def test_nobody_shares_nothing(name: backend.Backend) -> None:
    with backend.forced(name):
        found = similarity([], LAYOUT)
    assert found.shared.shape == found.overlap.shape == (0, 0)


def test_empty_payloads_and_tensors_that_say_nothing() -> None:
    silent = publish({name: tensor * 0 for name, tensor in update(1).items()})
    found = pair(silent, publish(update(2)))
    assert (found.overlap[0].tolist(), found.agreement[0].tolist()) == ([0.0, 0.0], [0.0, 0.0])
    everything = Layout.of({"norm": (64,)}, settings_of(64, 64), "sparseloco")  # k is the chunk: no places to compare
    found = similarity([random_payload(everything, seed) for seed in (1, 2)], everything)
    assert not found.shared.any()
    assert not found.copied.any()


@BACKENDS
@given(layout=layouts, peers=st.lists(seeds, min_size=1, max_size=5))
@few
def test_counts_are_those_of_sets(name: backend.Backend, layout: Layout, peers: list[int]) -> None:
    payloads = [random_payload(layout, seed) for seed in peers]
    with backend.forced(name):
        found = similarity(payloads, layout)
    sets = [places(payload, layout) for payload in payloads]
    for row, one in enumerate(sets):
        for column, other in enumerate(sets):
            common = one.keys() & other.keys()
            assert found.shared[row, column] == len(common)
            assert found.agreeing[row, column] == sum(one[place] == other[place] for place in common)
    assert np.array_equal(found.counts, np.diag(found.shared))


def places(payload: Payload, layout: Layout) -> dict[tuple[str, int, int], bool]:
    """Place -> whether it is negative, of everything that is coded."""
    found = {}
    for tensor in layout.tensors:
        coefficients = unpack(payload.sections[tensor.name])
        for chunk in np.flatnonzero(coefficients.steps[:, -1]) if tensor.has_index_planes else []:
            signs = zip(coefficients.indices[chunk].tolist(), coefficients.negative[chunk].tolist(), strict=True)
            found |= {(tensor.name, int(chunk), index): negative for index, negative in signs}
    return found


@BACKENDS
def test_threads_do_not_matter(name: backend.Backend) -> None:
    payloads, found = [publish(update(seed)) for seed in range(4)], []
    for count in (1, 2):
        with threads(count), backend.forced(name):
            found.append(similarity(payloads, LAYOUT))
    assert np.array_equal(found[0].shared, found[1].shared)
    assert np.array_equal(found[0].agreeing, found[1].agreeing)


def test_a_payload_of_another_layout_is_an_error() -> None:
    other = Layout.of({"matrix": (128, 128)}, settings_of(64, 64), "sparseloco")
    with pytest.raises(ValueError, match="another layout"):
        similarity([publish(update(1)), random_payload(other, 1)], LAYOUT)
