"""Two accounts of one window: exactly the fields that differ are named."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from templar.hparams import load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.differences import GAIN_TOLERANCE, KEYS, LOSS_TOLERANCE, compare_evidence, compare_facts
from templar.scoring.evidence import MeasuredOn
from tests.support.facts import (
    AUTHOR,
    LOSS,
    WINDOW,
    absent,
    estimate,
    hotkey,
    like,
    measurement,
    revealed,
    standing_of,
    veteran,
    window_of,
)

HPARAMS = load_hparams("local")
FACTS = window_of(
    revealed(3, 0.25, measurement=measurement(0.19, 0.2)),
    revealed(4, 0.1, overlap=like(3, 0.02)),
    absent(5),
    revealed(6, -0.01),
)
STANDING = standing_of([veteran(uid) for uid in (3, 4, 5, 6, 9)], bans={hotkey(6): WINDOW + 5})
EVIDENCE = conclude(FACTS, STANDING, HPARAMS, AUTHOR)


def changed(facts, uid, **changes):
    """The facts with another account of one miner."""
    miners = (each.model_copy(update=changes) if each.uid == uid else each for each in facts.miners)
    return replace(facts, miners=tuple(miners))


def fields(found):
    return [each.where for each in found]


def test_the_same_has_no_differences():
    assert compare_facts(FACTS, FACTS) == ()
    assert compare_evidence(EVIDENCE, conclude(FACTS, STANDING, HPARAMS, AUTHOR)) == ()


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (replace(FACTS, loss=4.1), "loss: published 4.1, recomputed 4.0 (measurement outside the tolerance)"),
        (replace(FACTS, roster=None), "roster: published nothing, recomputed dddddddddddd (observation)"),
        (
            changed(FACTS, 3, estimate=estimate(0.3, 0.51)),
            "miners[uid 3].facts.estimate.random_gain: published 1.2, recomputed 1.0 "
            "(measurement outside the tolerance)",
        ),
        (
            changed(FACTS, 3, measurement=None),
            "miners[uid 3].facts.measurement: published nothing, recomputed "
            '{"own_before":4.0,"own_after":2.0,"random_before":4.0,"random_after":3.24,"rando... '
            "(measurement outside the tolerance)",
        ),
        (
            changed(FACTS, 4, overlap=None),
            "miners[uid 4].facts.overlap: published nothing, recomputed 0.02 like uid 3 (observation)",
        ),
        (
            changed(FACTS, 4, overlap=like(6, 0.02)),
            "miners[uid 4].facts.overlap.uid: published 6, recomputed 3 (observation)",
        ),
        (
            replace(FACTS, miners=(*FACTS.miners, FACTS.miners[-1])),
            "miners in order: published 3, 4, 5, 6, 6, recomputed 3, 4, 5, 6 (observation)",
        ),
    ],
)
def test_a_changed_fact_is_named(published, expected):
    assert [str(each) for each in compare_facts(published, FACTS)] == [expected]


def leaves(value):
    """The places of all numbers and texts in a value, each with a copy of the value in which it is another one."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            for where, other in leaves(getattr(value, name)):
                yield f".{name}{where}", value.model_copy(update={name: other})
    elif isinstance(value, tuple) and value and (key := next((key for key in KEYS if hasattr(value[0], key)), None)):
        for place, item in enumerate(value):
            for where, other in leaves(item):
                if getattr(other, key) == getattr(item, key):
                    yield f"[{key} {getattr(item, key)}]{where}", (*value[:place], other, *value[place + 1 :])
    else:
        yield "", value + 1 if isinstance(value, int | float) else f"not {value}"


def test_every_value_of_an_evidence_is_compared_exactly():
    places = set()
    for where, other in leaves(EVIDENCE):
        (found,) = compare_evidence(other, EVIDENCE)
        assert found.where == where.removeprefix(".")
        places.add(re.sub(r"\[.*?\]", "", where))
    assert {".weights.weight", ".bans.last_window", ".departed.card.mu", ".miners.slashes"} <= places
    without = EVIDENCE.model_copy(update={"bans": ()})
    assert fields(compare_evidence(without, EVIDENCE)) == [f"bans[subject {hotkey(6)}]"]


def test_measured_numbers_may_be_left_out():
    other = changed(replace(FACTS, loss=9.0), 3, estimate=None, measurement=None, norm_ratio=2.0, repeat=like(4, 0.9))
    assert fields(compare_facts(other, FACTS, measured=False)) == []
    seen = changed(other, 3, payload_sha256="ab" * 32)
    assert fields(compare_facts(seen, FACTS, measured=False)) == ["miners[uid 3].facts.payload_sha256"]


@settings(max_examples=30)
@given(st.floats(-9e-6, 9e-6), st.sampled_from([3, 4, 6]))
def test_a_tolerance_covers_measured_numbers_up_to_it(error, uid):
    miner = next(each for each in FACTS.miners if each.uid == uid)
    moved = miner.estimate.model_copy(update={"random_gain": miner.estimate.random_gain * (1 + error)})
    assert compare_facts(changed(FACTS, uid, estimate=moved), FACTS, tolerance=1e-5) == ()
    far = moved.model_copy(update={"random_gain": moved.random_gain + 0.1})
    assert fields(compare_facts(changed(FACTS, uid, estimate=far), FACTS, tolerance=1e-5)) == [
        f"miners[uid {uid}].facts.estimate.random_gain"
    ]


def test_an_almost_zero_gain_is_compared_with_the_typical_size():
    """The gain of noise is almost zero, and another such number on other hardware."""
    noise = changed(FACTS, 6, estimate=estimate(1e-9, 0.1))
    other = changed(FACTS, 6, estimate=estimate(-2e-9, 0.1))
    assert compare_facts(other, noise, tolerance=1e-6) == ()
    assert fields(compare_facts(other, noise, tolerance=1e-10)) == ["miners[uid 6].facts.estimate.random_gain"]


def test_other_devices_have_a_tolerance_of_losses_and_one_of_gains_and_none_of_anything_else():
    def found(uid, **changes):
        return fields(compare_facts(changed(FACTS, uid, **changes), FACTS, tolerance=None))

    honest, size = next(each.estimate for each in FACTS.miners if each.uid == 3), abs(LOSS_TOLERANCE * LOSS)
    for sign in (-1, 1):
        assert compare_facts(replace(FACTS, loss=LOSS + sign * 0.9 * size), FACTS, tolerance=None) == ()
        assert fields(compare_facts(replace(FACTS, loss=LOSS + sign * 1.1 * size), FACTS, tolerance=None)) == ["loss"]
        near, far = (honest.random_gain * (1 + sign * times * GAIN_TOLERANCE) for times in (0.9, 1.1))
        assert found(3, estimate=honest.model_copy(update={"random_gain": near})) == []
        far_estimate = honest.model_copy(update={"random_gain": far})
        assert found(3, estimate=far_estimate) == ["miners[uid 3].facts.estimate.random_gain"]
    gain = next(each.estimate for each in FACTS.miners if each.uid == 4).random_gain
    expected = 0.5 * GAIN_TOLERANCE * gain / LOSS  # as uncertain as the relative gains that it comes from
    assert found(3, estimate=honest.model_copy(update={"expected": honest.expected + expected})) == []
    assert found(3, norm_ratio=1.0001) == ["miners[uid 3].facts.norm_ratio"]
    assert found(4, overlap=like(3, 0.0200001)) == ["miners[uid 4].facts.overlap.share"]


def test_what_measured_is_not_compared():
    other = replace(FACTS, measured_on=MeasuredOn(device="cuda", precision="bfloat16", repeatable=False))
    assert compare_facts(other, FACTS) == ()
    assert fields(compare_evidence(conclude(other, STANDING, HPARAMS, AUTHOR), EVIDENCE)) == ["measured_on"]


def test_a_liar_cannot_widen_the_tolerance():
    huge = estimate(1e300)
    other = FACTS
    for uid in (3, 4, 6):
        other = changed(other, uid, estimate=huge)
    assert len(compare_facts(other, FACTS, tolerance=1e-3)) >= 3
    observed = changed(FACTS, 6, windows_behind=1)
    assert fields(compare_facts(observed, FACTS, tolerance=0.9)) == ["miners[uid 6].facts.windows_behind"]
