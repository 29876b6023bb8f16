"""The evaluation plan: properties, dependence on block and hotkeys only, and the rate of exact measurements."""

from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from templar.scoring.evaluation_plan import Candidate, draw_plan
from tests.docs.second_implementation import Judge
from tests.support.facts import hotkey

HASH = "0x" + "ab" * 32


def candidate(number, num_sequences=20, unmeasured=1):
    return Candidate(hotkey(number), num_sequences, unmeasured)


networks = st.dictionaries(
    st.integers(0, 255), st.tuples(st.integers(0, 20), st.sampled_from([1, 2, 50])), max_size=6
).map(lambda drawn: {uid: candidate(uid, *numbers) for uid, numbers in drawn.items()})
sizes = st.fixed_dictionaries(
    {
        "num_spare": st.integers(0, 6),
        "num_sequences": st.integers(1, 6),
        "exact_miners": st.integers(0, 8),
        "exact_segments": st.integers(1, 8),
    }
)


@settings(max_examples=60)
@given(candidates=networks.filter(bool), size=sizes)
def test_the_second_implementation_draws_the_same_plan(candidates, size):
    """It depends on block and hotkeys only: neither on the order of miners nor on their uids."""
    plan = draw_plan(candidates, block_hash=HASH, **size)
    miners = {str(uid): asdict(candidate) for uid, candidate in reversed(candidates.items())}
    segments, exact = Judge.plan({"block_hash": HASH, "miners": miners, **size})
    assert [[uid, list(places)] for uid, places in plan.segments.items()] == segments
    assert [[uid, list(others)] for uid, others in plan.exact.items()] == exact


# Who is measured exactly.


def test_every_miner_is_measured_exactly_within_few_windows():
    """A network of 30 of whom 8 are: with ages as weights nobody waits much longer than four windows."""
    last = dict.fromkeys(range(30), 0)
    waits = []
    sizes = {"num_spare": 0, "num_sequences": 1, "exact_miners": 8, "exact_segments": 1}
    for window in range(1, 121):
        ages = {uid: candidate(uid, unmeasured=window - measured) for uid, measured in last.items()}
        for uid in draw_plan(ages, block_hash=f"0x{window:064x}", **sizes).exact:
            waits.append(window - last[uid])
            last[uid] = window
    assert len(waits) == 8 * 120
    assert max(waits + [121 - measured for measured in last.values()]) <= 15
    assert sum(wait <= 8 for wait in waits) > 0.95 * len(waits)
