"""Similarity and size of payloads: whole, scaled and partial copies, and honest ones."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import alike, plain

from templar.gradient.codec.wire import encode
from templar.gradient.layout import Layout
from templar.hparams import Gradient, load_hparams
from templar.scoring.measure import find_likenesses, norm_ratios
from tests.docs.second_implementation import Judge, Spec
from tests.support.payloads import mixed, payload_of, random_payload, zero_payload

GRADIENT = Gradient(momentum_decay=0.95, topk_compression=4, target_chunk=8, use_dct=False)
LAYOUT = Layout.of(dict.fromkeys("abcd", (64, 64)), GRADIENT, "sparseloco")
SCORING = load_hparams("templar-2.1.3").scoring
LEVEL = SCORING.overlap_level


def of(seed):
    return random_payload(LAYOUT, seed)


parts = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=4, max_size=4)
crowds = st.dictionaries(st.integers(2, 6), parts, max_size=4)
SOURCES = {seed: of(seed) for seed in (1, 2, 3)} | {4: zero_payload(LAYOUT)}
SPEC = {
    "digest": LAYOUT.digest,
    "recipe": LAYOUT.recipe,
    "tensors": [{"name": name, "edges": [8, 8], "chunks": 64, "k": 4} for name in "abcd"],
}
READ = {seed: Spec.read_payload(encode(source, LAYOUT), SPEC)["tensors"] for seed, source in SOURCES.items()}


def patched(sources):
    """A payload with each tensor from some source, or silent."""
    found = SOURCES[sources[0]]
    for name, seed in zip("abcd", sources, strict=True):
        found = mixed(SOURCES[seed], found, lambda each, name=name: each == name)
    return found


def places_of(sources):
    """Where it has coefficients, as the second implementation says."""
    tensors = {name: READ[seed][name] for name, seed in zip("abcd", sources, strict=True)}
    return Judge.places({"tensors": tensors}, SPEC)


@settings(max_examples=60)
@given(now=crowds, past=crowds, applied=st.frozensets(st.integers(2, 6)))
def test_the_second_implementation_finds_the_same_likenesses(now, past, applied):
    """Of payloads that share tensors with others and with those of the window before, their own among them."""
    payloads, earlier = ({uid: patched(each) for uid, each in crowd.items()} for crowd in (now, past))
    overlaps, repeats = find_likenesses(payloads, earlier, applied, LAYOUT, threshold=LEVEL)
    mine, old = ({uid: places_of(each) for uid, each in crowd.items()} for crowd in (now, past))
    chance = Judge.chance(SPEC)
    for uid, own in mine.items():
        before = old.get(uid, set())
        present = {
            other: each for other, each in mine.items() if other != uid and Judge.share(each, before, chance) < LEVEL
        }
        kept = {other: each for other, each in old.items() if other != uid or other in applied}
        for found, others in ((overlaps, present), (repeats, kept)):
            assert alike(plain(found.get(uid)), Judge.most_alike(uid, own, others, chance, LEVEL))


# Norms.


def test_norms_are_taken_over_the_lower_median_of_those_that_say_something():
    payloads = {uid: random_payload(LAYOUT, 7, size=size) for uid, size in {2: 1.0, 3: 2.0, 4: 4.0, 5: 64.0}.items()}
    assert norm_ratios(payloads, LAYOUT) == {2: 0.5, 3: 1.0, 4: 2.0, 5: 32.0}
    assert norm_ratios({5: payloads[5]}, LAYOUT) == {5: 1.0}
    assert norm_ratios({4: payloads[4], 5: payloads[5]}, LAYOUT) == {4: 1.0, 5: 16.0}
    nothing = {uid: zero_payload(LAYOUT) for uid in (1, 2, 3, 4)}
    assert norm_ratios(nothing | {5: of(5)}, LAYOUT) == {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 1.0}
    assert norm_ratios({1: nothing[1]}, LAYOUT) == {1: 0.0}
    assert norm_ratios({}, LAYOUT) == {}
    huge = payload_of(LAYOUT, {tensor.name: torch.full(tensor.shape, 1000.0) for tensor in LAYOUT.tensors})
    ratios = norm_ratios({1: random_payload(LAYOUT, 1, size=2.0**-30), 2: of(3), 3: huge}, LAYOUT)
    assert ratios[1] < 1e-6 < ratios[2] == 1.0 < SCORING.oversized_ratio < ratios[3], "no legal payload overflows"
