"""Two accounts of one window: where they part, and nothing else, by the name of the field."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import Reason
from templar.hparams import load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.differences import Difference, compare_evidence, compare_facts, shown
from templar.scoring.evidence import Ban, Departed, Evidence, SlashRecord, WeightRecord, WindowFacts
from templar.scoring.standing import Event
from tests.support.facts import (
    AUTHOR,
    absent,
    estimate,
    hotkey,
    like,
    measurement,
    record_of,
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
STANDING = standing_of([veteran(uid) for uid in (3, 4, 5, 6)])
EVIDENCE = conclude(FACTS, STANDING, HPARAMS, AUTHOR)


def changed(facts: WindowFacts, uid: int, **changes: Any) -> WindowFacts:
    """The facts with another account of one miner."""
    miners = (each.model_copy(update=changes) if each.uid == uid else each for each in facts.miners)
    return replace(facts, miners=tuple(miners))


def rewritten(evidence: Evidence, uid: int, **changes: Any) -> Evidence:
    """The evidence with another record of one miner."""
    miners = (each.model_copy(update=changes) if each.uid == uid else each for each in evidence.miners)
    return evidence.model_copy(update={"miners": tuple(miners)})


def fields(found: tuple[Difference, ...]) -> list[str]:
    return [each.where for each in found]


def test_the_same_has_no_differences() -> None:
    assert compare_facts(FACTS, FACTS) == ()
    assert compare_evidence(EVIDENCE, conclude(FACTS, STANDING, HPARAMS, AUTHOR)) == ()


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (replace(FACTS, loss=4.1), "loss: published 4.1, recomputed 4.0"),
        (replace(FACTS, loss=None), "loss: published nothing, recomputed 4.0"),
        (replace(FACTS, roster=None), "roster: published nothing, recomputed dddddddddddd"),
        (replace(FACTS, root_before="ab" * 32), "root_before: published abababababab, recomputed cccccccccccc"),
        (replace(FACTS, seed_block=4001), "seed_block: published 4001, recomputed 4000"),
        (
            changed(FACTS, 3, estimate=estimate(0.3, 0.51)),
            "miners[uid 3].facts.estimate.random_gain: published 1.2, recomputed 1.0",
        ),
        (
            changed(FACTS, 3, measurement=None),
            "miners[uid 3].facts.measurement: published nothing, recomputed "
            '{"own_before":4.0,"own_after":2.0,"random_before":4.0,"random_after":3.24,"rando...',
        ),
        (
            changed(FACTS, 4, overlap=None),
            "miners[uid 4].facts.overlap: published nothing, recomputed 0.02 like uid 3",
        ),
        (
            changed(FACTS, 4, overlap=like(6, 0.02)),
            "miners[uid 4].facts.overlap.uid: published 6, recomputed 3",
        ),
        (
            changed(FACTS, 5, reason=Reason.MALFORMED),
            "miners[uid 5].facts.reason: published malformed, recomputed commit_missing",
        ),
        (changed(FACTS, 6, tier="other"), "miners[uid 6].facts.tier: published other, recomputed gather"),
        (changed(FACTS, 6, windows_behind=None), "miners[uid 6].facts.windows_behind: published nothing, recomputed 0"),
    ],
)
def test_a_changed_fact_is_named(published: WindowFacts, expected: str) -> None:
    assert [str(each) for each in compare_facts(published, FACTS)] == [expected]


def test_a_miner_that_is_missing_moves_no_other() -> None:
    without = replace(FACTS, miners=tuple(each for each in FACTS.miners if each.uid != 4))
    (skipped,) = compare_facts(without, FACTS)
    assert skipped.where == "miners[uid 4]"
    assert skipped.published == "nothing"
    (added,) = compare_facts(FACTS, without)
    assert (added.where, added.recomputed) == ("miners[uid 4]", "nothing")


def test_the_order_and_the_number_of_miners_count() -> None:
    backwards = replace(FACTS, miners=FACTS.miners[::-1])
    (found,) = compare_facts(backwards, FACTS)
    assert str(found) == "miners in order: published 6, 5, 4, 3, recomputed 3, 4, 5, 6"
    twice = replace(FACTS, miners=(*FACTS.miners, FACTS.miners[-1]))
    assert fields(compare_facts(twice, FACTS)) == ["miners in order"]


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (rewritten(EVIDENCE, 3, gradient_score=0.5), "miners[uid 3].gradient_score"),
        (rewritten(EVIDENCE, 3, indicator=-1), "miners[uid 3].indicator"),
        (rewritten(EVIDENCE, 4, before=veteran(4, mu=41.0)), "miners[uid 4].before.mu"),
        (
            rewritten(EVIDENCE, 4, after=record_of(EVIDENCE, 4).after.model_copy(update={"sigma": 1.0})),
            "miners[uid 4].after.sigma",
        ),
        (rewritten(EVIDENCE, 5, slashes=()), "miners[uid 5].slashes"),
        (
            rewritten(EVIDENCE, 6, slashes=(SlashRecord(event=Event.MISSING, reason=Reason.COMMIT_LATE),)),
            "miners[uid 6].slashes",
        ),
        (EVIDENCE.model_copy(update={"weights": EVIDENCE.weights[1:]}), "weights[uid 0]"),
        (
            EVIDENCE.model_copy(update={"weights": (*EVIDENCE.weights, WeightRecord(uid=9, weight=0.1))}),
            "weights[uid 9]",
        ),
        (
            EVIDENCE.model_copy(update={"bans": (Ban(subject=hotkey(6), last_window=200),)}),
            f"bans[subject {hotkey(6)}]",
        ),
        (
            EVIDENCE.model_copy(update={"departed": (Departed(hotkey=hotkey(9), card=veteran(9)),)}),
            f"departed[hotkey {hotkey(9)}]",
        ),
        (EVIDENCE.model_copy(update={"previous": None}), "previous"),
        (EVIDENCE.model_copy(update={"previous_window": 7}), "previous_window"),
    ],
)
def test_whatever_follows_is_compared_exactly(published: Evidence, expected: str) -> None:
    assert fields(compare_evidence(published, EVIDENCE)) == [expected]


def test_penalties_read_as_what_happened() -> None:
    (found,) = compare_evidence(rewritten(EVIDENCE, 5, slashes=()), EVIDENCE)
    assert str(found) == "miners[uid 5].slashes: published nothing, recomputed missing (commit_missing)"


def test_measured_numbers_may_be_left_out() -> None:
    other = changed(replace(FACTS, loss=9.0), 3, estimate=None, measurement=None, norm_ratio=2.0, repeat=like(4, 0.9))
    assert fields(compare_facts(other, FACTS, measured=False)) == []
    seen = changed(other, 3, payload_sha256="ab" * 32)
    assert fields(compare_facts(seen, FACTS, measured=False)) == ["miners[uid 3].facts.payload_sha256"]


@given(st.floats(-9e-6, 9e-6), st.sampled_from([3, 4, 6]))
def test_a_tolerance_covers_measured_numbers_up_to_it(error: float, uid: int) -> None:
    miner = next(each for each in FACTS.miners if each.uid == uid)
    assert miner.estimate is not None
    assert miner.estimate.random_gain is not None
    moved = miner.estimate.model_copy(update={"random_gain": miner.estimate.random_gain * (1 + error)})
    other = changed(FACTS, uid, estimate=moved)
    assert compare_facts(other, FACTS, tolerance=1e-5) == ()
    far = moved.model_copy(update={"random_gain": moved.random_gain + 0.1})
    assert fields(compare_facts(changed(FACTS, uid, estimate=far), FACTS, tolerance=1e-5)) == [
        f"miners[uid {uid}].facts.estimate.random_gain"
    ]


def test_next_to_nothing_is_held_against_what_is_usual() -> None:
    """Noise lowers the loss by next to nothing, and on other hardware by next to nothing else."""
    noise = changed(FACTS, 6, estimate=estimate(1e-9, 0.1))
    other = changed(FACTS, 6, estimate=estimate(-2e-9, 0.1))
    assert compare_facts(other, noise, tolerance=1e-6) == ()
    assert fields(compare_facts(other, noise, tolerance=1e-10)) == ["miners[uid 6].facts.estimate.random_gain"]


def test_a_liar_cannot_widen_the_tolerance() -> None:
    huge = estimate(1e300)
    other = FACTS
    for uid in (3, 4, 6):
        other = changed(other, uid, estimate=huge)
    assert len(compare_facts(other, FACTS, tolerance=1e-3)) >= 3


def test_seen_things_have_no_tolerance() -> None:
    other = changed(FACTS, 6, windows_behind=1)
    assert fields(compare_facts(other, FACTS, tolerance=0.9)) == ["miners[uid 6].facts.windows_behind"]


def test_who_may_be_at_fault_is_said_where_it_is_not_one() -> None:
    one = Difference("loss", "1.0", "2.0", (2,))
    assert str(one) == "loss: published 1.0, recomputed 2.0"
    assert str(replace(one, suspects=(2, 7))) == "loss: published 1.0, recomputed 2.0 (uid 2 or uid 7)"
    assert str(Difference("evidence", "[malformed] no JSON", "")) == "evidence: [malformed] no JSON"


def test_values_are_short_and_exact() -> None:
    assert shown(None) == shown(()) == "nothing"
    assert shown(0.1 + 0.2) == "0.30000000000000004"
    assert shown("ab" * 32) == "abababababab"
    assert len(shown("x" * 1000)) == 80
    assert len(shown(tuple(range(1000)))) == 83
