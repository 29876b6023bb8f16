"""The evaluation plan: what it promises, on what it depends and on what not, and who is measured exactly how often."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.scoring.evaluation_plan import SPARE, Candidate, EvaluationPlan, draw, draw_plan
from tests.support.facts import hotkey

HASH = "0x" + "ab" * 32
OTHER_HASH = "0x" + "cd" * 32


def candidate(number: int, num_sequences: int = 20, unmeasured: int = 1) -> Candidate:
    return Candidate(hotkey(number), num_sequences, unmeasured)


def crowd(count: int, **changes: Any) -> dict[int, Candidate]:
    return {uid: candidate(uid, **changes) for uid in range(count)}


def plan_of(
    candidates: Mapping[int, Candidate],
    *,
    num_spare: int = 5,
    num_sequences: int = 4,
    trained_first: int = 8,
    exact_miners: int = 3,
    exact_segments: int = 2,
    block: str = HASH,
) -> EvaluationPlan:
    return draw_plan(
        candidates,
        num_spare=num_spare,
        num_sequences=num_sequences,
        trained_first=trained_first,
        exact_miners=exact_miners,
        exact_segments=exact_segments,
        block_hash=block,
    )


def blocks(count: int) -> list[str]:
    return [f"0x{number:064x}" for number in range(count)]


networks = st.dictionaries(
    st.integers(0, 255),
    st.tuples(st.integers(0, 20), st.sampled_from([1, 2, 50])),
    max_size=6,
).map(lambda drawn: {uid: candidate(uid, *numbers) for uid, numbers in drawn.items()})


sizes = st.fixed_dictionaries(
    {
        "num_spare": st.integers(0, 6),
        "num_sequences": st.integers(1, 6),
        "trained_first": st.integers(1, 12),
        "exact_miners": st.integers(0, 8),
        "exact_segments": st.integers(1, 8),
    }
)


@settings(max_examples=100)
@given(candidates=networks, size=sizes)
def test_what_a_plan_promises(candidates: dict[int, Candidate], size: dict[str, int]) -> None:
    plan = plan_of(candidates, **size)
    num_spare, num_sequences, trained = size["num_spare"], size["num_sequences"], size["trained_first"]
    own = {uid: places for uid, places in plan.segments.items() if uid != SPARE}
    assert set(own) == {uid for uid, miner in candidates.items() if miner.num_sequences}
    for uid, places in own.items():
        assert len(places) == min(num_sequences, candidates[uid].num_sequences, trained)
        assert list(places) == sorted(set(places))
        assert all(place < min(trained, candidates[uid].num_sequences) for place in places)
    spare = plan.segments.get(SPARE)
    assert (spare is not None) == (len(own) < 2 and num_spare > 0 and len(candidates) > 0)
    if spare is not None:
        assert len(spare) == min(num_sequences, num_spare)
        assert all(place < num_spare for place in spare)
        assert list(plan.segments)[-1] == SPARE
    assert set(plan.exact) <= set(candidates)
    assert len(plan.exact) == min(size["exact_miners"], len(candidates))
    for uid, others in plan.exact.items():
        rest = set(plan.segments) - {uid}
        assert uid not in others, "nobody is its own random data"
        assert set(others) <= rest
        assert len(others) == len(set(others)) == min(size["exact_segments"], len(rest))


@settings(max_examples=50)
@given(candidates=networks)
def test_the_plan_is_a_pure_function_of_the_block(candidates: dict[int, Candidate]) -> None:
    again = plan_of(dict(reversed(candidates.items())))
    plan = plan_of(candidates)
    assert again == plan
    assert list(again.segments) == list(plan.segments), "the order of evaluation is part of it"


def test_a_plan_that_others_drew() -> None:
    """Whoever changes what is drawn makes another network."""
    plan = plan_of({3: candidate(1), 8: candidate(2, 6, 40), 200: candidate(3, 3)}, exact_miners=2, exact_segments=1)
    assert list(plan.segments.items()) == [(3, (0, 2, 6, 7)), (8, (1, 2, 3, 4)), (200, (0, 1, 2))]
    assert plan.exact == {8: (200,), 200: (8,)}


@settings(max_examples=60)
@given(candidates=networks, names=st.permutations(range(256)))
def test_other_uids_draw_the_same_plan(candidates: dict[int, Candidate], names: list[int]) -> None:
    """What a hotkey is measured on does not depend on the place that the chain gave it."""
    to = {uid: names[uid] for uid in candidates} | {SPARE: SPARE}
    plan = plan_of(candidates)
    other = plan_of({to[uid]: miner for uid, miner in candidates.items()})
    assert list(other.segments.items()) == [(to[uid], places) for uid, places in plan.segments.items()]
    assert other.exact == {to[uid]: tuple(to[each] for each in others) for uid, others in plan.exact.items()}


@settings(max_examples=50)
@given(candidates=networks, joins=st.integers(256, 300))
def test_who_joins_changes_nobodys_own_segment(candidates: dict[int, Candidate], joins: int) -> None:
    plan = plan_of(candidates)
    larger = plan_of({**candidates, joins: candidate(joins)})
    for uid, places in plan.segments.items():
        if uid != SPARE:
            assert larger.segments[uid] == places


def test_another_block_draws_another_plan() -> None:
    candidates = crowd(12)
    one, other = plan_of(candidates), plan_of(candidates, block=OTHER_HASH)
    assert sum(one.segments[uid] != other.segments[uid] for uid in candidates) > 8
    assert list(one.segments) != list(other.segments)
    assert set(one.exact) != set(other.exact)


def test_a_miner_alone_is_measured_against_data_that_nobody_was_assigned() -> None:
    plan = plan_of({7: candidate(7)})
    assert list(plan.segments) == [7, SPARE]
    assert plan.exact == {7: (SPARE,)}


def test_two_segments_need_no_data_that_nobody_was_assigned() -> None:
    assert SPARE not in plan_of(crowd(2)).segments
    assert SPARE in plan_of({7: candidate(7), 8: candidate(8, 0)}).segments


def test_without_any_other_data_there_is_nothing_random() -> None:
    plan = plan_of({7: candidate(7)}, num_spare=0)
    assert list(plan.segments) == [7]
    assert plan.exact == {7: ()}


def test_a_miner_without_data_is_measured_on_others_only() -> None:
    plan = plan_of({7: candidate(7, 0), 8: candidate(8)})
    assert set(plan.segments) == {8, SPARE}
    assert set(plan.exact[7]) == {8, SPARE}
    assert plan.exact[8] == (SPARE,)


def test_nobody_to_measure() -> None:
    assert plan_of({}) == EvaluationPlan({}, {})
    assert plan_of(crowd(3), exact_miners=0).exact == {}


def test_every_sequence_that_was_trained_on_may_be_drawn_and_no_other() -> None:
    drawn = {place for block in blocks(60) for place in plan_of({7: candidate(7)}, block=block).segments[7]}
    assert drawn == set(range(8))


# Who is measured exactly.


def test_everybody_is_measured_exactly_within_few_windows() -> None:
    """A network of 30 of whom 8 are: with ages as weights nobody waits much longer than four windows."""
    last = dict.fromkeys(range(30), 0)
    waits = []
    for window, block in enumerate(blocks(120), 1):
        ages = {uid: candidate(uid, unmeasured=window - measured) for uid, measured in last.items()}
        for uid in plan_of(ages, exact_miners=8, block=block).exact:
            waits.append(window - last[uid])
            last[uid] = window
    assert len(waits) == 8 * 120
    assert max(waits + [121 - measured for measured in last.values()]) <= 15
    assert sum(wait <= 8 for wait in waits) > 0.95 * len(waits)


def test_who_waited_longer_is_likelier_in_proportion() -> None:
    """Of two the one with three times the age, of 400 blocks in 300; five standard deviations are 43."""
    pair = {3: candidate(3, unmeasured=10), 9: candidate(9, unmeasured=30)}
    drawn = Counter(next(iter(plan_of(pair, exact_miners=1, block=block).exact)) for block in blocks(400))
    assert 257 <= drawn[9] <= 343


def test_among_equals_everybody_is_as_likely() -> None:
    """Four of ten in 500 blocks: each in 200; five standard deviations are 55."""
    drawn = Counter(uid for block in blocks(500) for uid in plan_of(crowd(10), exact_miners=4, block=block).exact)
    assert sum(drawn.values()) == 2000
    assert all(145 <= drawn[uid] <= 255 for uid in range(10))


def test_the_data_of_everybody_is_as_likely() -> None:
    drawn: Counter[int] = Counter()
    for block in blocks(300):
        for others in plan_of(crowd(6), exact_miners=6, exact_segments=2, block=block).exact.values():
            drawn.update(others)
    assert sum(drawn.values()) == 300 * 6 * 2
    assert all(480 <= drawn[uid] <= 720 for uid in range(6))


# Drawing.


@pytest.mark.parametrize(("count", "length"), [(0, 0), (3, 3), (10, 10), (50, 10)])
def test_a_draw_has_as_many_as_there_are_in_rising_order(count: int, length: int) -> None:
    found = draw(range(10), count, "test", HASH)
    assert len(found) == len(set(found)) == length
    assert found == sorted(found)


def test_a_larger_draw_contains_the_smaller_one() -> None:
    assert set(draw(range(100), 5, "test", HASH)) < set(draw(range(100), 6, "test", HASH))


def test_a_draw_depends_on_its_domain_and_key() -> None:
    draws = {tuple(draw(range(100), 5, *key)) for key in (("a", HASH), ("b", HASH), ("a", HASH, 1), ("a", HASH, 2))}
    assert len(draws) == 4
