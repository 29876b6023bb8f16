import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import Windows
from templar.timeline import WindowTimes, closing_block, first_block, window_of

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


@pytest.mark.parametrize("rank", [-1, 3])
def test_only_publishers_have_a_slot(rank):
    with pytest.raises(ValueError, match=f"rank {rank} has no slot: roster_ranks is 3"):
        WindowTimes(7, 0.0, 120.0, RULES).roster_slot(rank)


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
