import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import Windows
from templar.timeline import Timing, WindowTimes, closing_block, first_block, window_of

RULES = Windows(
    blocks_per_window=10,
    block_seconds=12.0,
    commit_guard_seconds=3,
    time_window_delta_seconds=10,
    read_margin_seconds=4,
    roster_slot_seconds=7,
    roster_ranks=3,
    quorum=0.5,
    train_margin_seconds=5.5,
)
"""120 s a window, of which agreement takes 3 + 10 + 1 + 4 + 3 * 7 = 39."""

times = st.builds(
    lambda opened, length: WindowTimes(7, opened, opened + length, RULES),
    opened=st.floats(1e6, 2e9, allow_nan=False),
    length=st.floats(60, 600, allow_nan=False),
)


@settings(max_examples=100)
@given(times)
def test_the_instants_of_a_window(window):
    opened, close = math.floor(window.opened), math.floor(window.closed)
    # Commitments count from the second after the opening to the guard, reveals from that after the close to the grace.
    for interval, first, last in (
        (window.commit_interval, opened + 1, close - 3),
        (window.reveal_interval, close + 1, close + 10),
    ):
        timings = [interval.timing(second) for second in (first - 1, first, last, last + 1)]
        assert timings == [Timing.EARLY, Timing.IN_TIME, Timing.IN_TIME, Timing.LATE]
    assert window.close == close
    assert window.train_until == close - 3 - 5.5
    assert window.settles == close + 10 + 1 + 4
    # The next window's commitments, which are other objects, begin with this one's reveals.
    following = WindowTimes(8, window.closed, window.closed + 120, RULES)
    assert following.commit_interval.first == window.reveal_interval.first


@settings(max_examples=50)
@given(times)
def test_slots_are_disjoint_and_contiguous_from_the_settling_second_on(window):
    slots = [window.roster_slot(rank) for rank in range(3)]
    seconds = [second for slot in slots for second in range(slot.first, slot.last + 1)]
    assert seconds == list(range(window.settles + 1, window.settles + 3 * 7 + 1))
    assert all(slot.last - slot.first + 1 == 7 for slot in slots)
    assert window.null_after == seconds[-1]
    for rank in (-1, 3):
        with pytest.raises(ValueError, match=f"rank {rank} has no slot: roster_ranks is 3"):
            window.roster_slot(rank)


@settings(max_examples=100)
@given(st.integers(0, 10**9))
def test_every_block_belongs_to_the_window_between_its_first_and_its_closing_block(block):
    window = window_of(block, RULES)
    assert first_block(window, RULES) <= block < closing_block(window, RULES) == first_block(window + 1, RULES)


@settings(max_examples=100)
@given(
    blocks=st.integers(2, 200),
    guard=st.integers(1, 20),
    delta=st.integers(1, 60),
    margin=st.integers(0, 20),
    slot=st.integers(1, 30),
    ranks=st.integers(1, 4),
)
def test_hparams_refuse_windows_of_which_less_than_half_is_left(*, blocks, guard, delta, margin, slot, ranks):
    values = RULES.model_dump() | {
        "blocks_per_window": blocks,
        "commit_guard_seconds": guard,
        "time_window_delta_seconds": delta,
        "read_margin_seconds": margin,
        "roster_slot_seconds": slot,
        "roster_ranks": ranks,
    }
    if guard + delta + 1 + margin + slot * ranks <= blocks * 12.0 / 2:
        rules = Windows(**values)
        window = WindowTimes(0, 0.0, rules.seconds, rules)
        assert window.null_after - window.close + guard <= rules.seconds / 2
    else:
        with pytest.raises(ValueError, match="leave at least half of it for training: raise blocks_per_window"):
            Windows(**values)
