"""The evaluation plan: properties, dependence on block and hotkeys only, and the rate of exact measurements."""

from collections import Counter
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from templar.scoring.evaluation_plan import SPARE, Candidate, EvaluationPlan, draw_plan
from tests.docs.second_implementation import Judge
from tests.support.facts import hotkey

HASH = "0x" + "ab" * 32


def candidate(number, num_sequences=20, unmeasured=1):
    return Candidate(hotkey(number), num_sequences, unmeasured)


def crowd(count, **changes):
    return {uid: candidate(uid, **changes) for uid in range(count)}


def plan_of(candidates, *, num_spare=5, num_sequences=4, trained_first=8, exact_miners=3, exact_segments=2, block=HASH):
    return draw_plan(
        candidates,
        num_spare=num_spare,
        num_sequences=num_sequences,
        trained_first=trained_first,
        exact_miners=exact_miners,
        exact_segments=exact_segments,
        block_hash=block,
    )


def blocks(count):
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


@settings(max_examples=60)
@given(candidates=networks.filter(bool), size=sizes)
def test_the_second_implementation_draws_the_same_plan(candidates, size):
    """It depends on block and hotkeys only: neither on the order of miners nor on their uids."""
    plan = plan_of(candidates, **size)
    miners = {str(uid): asdict(candidate) for uid, candidate in reversed(candidates.items())}
    segments, exact = Judge.plan({"block_hash": HASH, "miners": miners, **size})
    assert [[uid, list(places)] for uid, places in plan.segments.items()] == segments
    assert [[uid, list(others)] for uid, others in plan.exact.items()] == exact


@settings(max_examples=20)
@given(candidates=networks, joins=st.integers(256, 300))
def test_a_newcomer_changes_no_own_segment(candidates, joins):
    assert plan_of({}) == EvaluationPlan({}, {})
    larger = plan_of({**candidates, joins: candidate(joins)})
    for uid, places in plan_of(candidates).segments.items():
        assert uid == SPARE or larger.segments[uid] == places


# Who is measured exactly.


def test_every_miner_is_measured_exactly_within_few_windows():
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


def test_the_chance_of_a_measurement_grows_with_the_wait():
    """Three times the wait: drawn in 300 of 400 blocks; five standard deviations are 43."""
    pair = {3: candidate(3, unmeasured=10), 9: candidate(9, unmeasured=30)}
    drawn = Counter(next(iter(plan_of(pair, exact_miners=1, block=block).exact)) for block in blocks(400))
    assert 257 <= drawn[9] <= 343


def test_every_segment_is_equally_likely_and_every_trained_sequence_is_drawn():
    drawn: Counter[int] = Counter()
    sequences = set()
    orders = set()
    for block in blocks(150):
        plan = plan_of(crowd(6), exact_miners=6, exact_segments=2, block=block)
        orders.add(tuple(plan.segments))
        sequences |= set(plan.segments[0])
        for others in plan.exact.values():
            drawn.update(others)
    assert sum(drawn.values()) == 150 * 6 * 2
    assert all(230 <= drawn[uid] <= 370 for uid in range(6))
    assert sequences == set(range(8))
    assert len(orders) > 100
