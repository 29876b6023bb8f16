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


def test_agreement_takes_half_of_a_window_at_most():
    numbers = RULES.model_dump()
    assert Windows(**numbers | {"roster_slot_seconds": 14}).reserved_seconds == 60
    with pytest.raises(ValueError, match="leave at least half of it for training: raise blocks_per_window"):
        Windows(**numbers | {"roster_slot_seconds": 15})
