import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import Windows
from templar.timeline import WindowTimes, closing_block, first_block, window_of
from tests.support.subnet import RULES


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
    """Of 60 seconds, guard, grace, margins and three roster slots take 2 + 4 + 1 + 2 + 3 * 7."""
    numbers = RULES.model_dump()
    assert Windows(**numbers | {"roster_slot_seconds": 7}).reserved_seconds == 30
    with pytest.raises(ValueError, match="leave at least half of it for training: raise blocks_per_window"):
        Windows(**numbers | {"roster_slot_seconds": 8})
