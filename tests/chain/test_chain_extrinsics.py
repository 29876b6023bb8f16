"""Weights as a chain stores them, and how they are compared with those that were sent."""

from hypothesis import given
from hypothesis import strategies as st

from templar.chain.extrinsics import differing_uids, normalise_weights, quantise_weights

WEIGHTS = st.dictionaries(st.integers(0, 255), st.floats(1e-9, 1.0), min_size=1, max_size=40)


@given(weights=WEIGHTS)
def test_what_a_chain_makes_of_weights_is_the_same_weights(weights: dict[int, float]) -> None:
    values = quantise_weights(weights)
    assert differing_uids(weights, normalise_weights(values)) == []
    assert differing_uids(weights, {uid: max(1, value - 1) for uid, value in values.items()}) == []


@given(weights=WEIGHTS, steps=st.integers(2, 65535), data=st.data())
def test_a_weight_that_is_off_by_two_steps_is_another_weight(
    weights: dict[int, float], steps: int, data: st.DataObject
) -> None:
    values = quantise_weights(weights)
    largest = max(values, key=lambda uid: values[uid])
    uid = data.draw(st.sampled_from(sorted({*values, 256} - {largest})))
    was = values.get(uid, 0)
    now = was + steps if was + steps <= 65535 else was - steps
    shown = {**values, uid: now} if now > 0 else {other: value for other, value in values.items() if other != uid}
    if abs(max(now, 0) - was) >= 2:
        assert differing_uids(weights, normalise_weights(shown)) == [uid]


def test_a_chain_without_weights_differs_in_all() -> None:
    assert (
        differing_uids({1: 0.5, 2: 0.3, 3: 0.2}, {}) == differing_uids({1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.0}) == [1, 2, 3]
    )
