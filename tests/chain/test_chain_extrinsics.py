"""Roles and weights as a chain stores them, and how weights are compared with those that were sent."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.chain.base import Role
from templar.chain.extrinsics import announced_role, differing_uids, normalise_weights, quantise_weights, role_record

AXONS = json.loads((Path(__file__).parents[1] / "support" / "chain_shapes.json").read_text())["metagraph_raw"]["axons"]
WEIGHTS = st.dictionaries(st.integers(0, 255), st.floats(1e-9, 1.0), min_size=1, max_size=40)


@given(weights=WEIGHTS)
def test_what_a_chain_makes_of_weights_is_the_same_weights(weights):
    values = quantise_weights(weights)
    assert differing_uids(weights, normalise_weights(values)) == []
    assert differing_uids(weights, {uid: max(1, value - 1) for uid, value in values.items()}) == []


@given(weights=WEIGHTS, steps=st.integers(2, 65535), data=st.data())
def test_a_weight_that_is_off_by_two_steps_is_another_weight(weights, steps, data):
    values = quantise_weights(weights)
    largest = max(values, key=lambda uid: values[uid])
    uid = data.draw(st.sampled_from(sorted({*values, 256} - {largest})))
    was = values.get(uid, 0)
    now = was + steps if was + steps <= 65535 else was - steps
    shown = {**values, uid: now} if now > 0 else {other: value for other, value in values.items() if other != uid}
    if abs(max(now, 0) - was) >= 2:
        assert differing_uids(weights, normalise_weights(shown)) == [uid]


def test_a_chain_without_weights_differs_in_all():
    assert (
        differing_uids({1: 0.5, 2: 0.3, 3: 0.2}, {}) == differing_uids({1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.0}) == [1, 2, 3]
    )


@pytest.mark.parametrize("role", list(Role))
def test_a_role_fits_the_axon_records_of_a_real_runtime(role):
    """The recorded metagraph has every field that a role is written to, and an untouched record announces none."""
    for axon in AXONS:
        assert announced_role(axon) is None
        assert axon.keys() == {"block", *role_record(role)}
        assert announced_role(axon | role_record(role) | {"block": 7}) is role


@given(
    role=st.sampled_from(list(Role)),
    name=st.sampled_from(sorted(role_record(Role.MINER))),
    value=st.integers(0, 255) | st.none(),
)
def test_any_other_axon_record_announces_another_role_or_none(role, name, value):
    assert {announced_role(each) for each in (None, 1, "axon", [], {})} == {None}
    record = role_record(role)
    changed = announced_role({"block": 7, **record, name: value})
    assert (changed is role) == (value == record[name])
    assert announced_role({key: each for key, each in record.items() if key != name}) is None
