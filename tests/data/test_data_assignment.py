import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.data.assignment import (
    LEAD,
    Epoch,
    ShardEpoch,
    SlotPlan,
    advanced,
    assign,
    epoch_of,
    first_epochs,
    spare_units,
)
from templar.errors import PermanentError, Reason, TransientError
from tests.support.errors import raising


def block_hash(number):
    return f"0x{number:064x}"


plans = st.builds(SlotPlan, num_slots=st.integers(1, 6), units_per_slot=st.integers(1, 4))
miners = st.lists(st.integers(0, 255), unique=True, max_size=8).map(sorted).map(tuple)


@settings(max_examples=60)
@given(
    plan=plans,
    spare=st.integers(0, 60),
    key=st.text(max_size=4),
    first_window=st.integers(0, 1000),
    registered=st.lists(miners, min_size=1, max_size=6),
)
def test_no_unit_repeats_in_a_round_while_miners_come_and_go(plan, spare, key, first_window, registered):
    """`registered` has the miners of each window."""
    epoch = Epoch(key, plan.units_per_window + spare, first_window)
    windows_per_round = epoch.total_units // plan.units_per_window
    seen: set[int] = set()
    for number, uids in enumerate(registered):
        if number % windows_per_round == 0:
            seen.clear()
        window = first_window + number
        drawn = [assign(window, uid, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash(window)) for uid in uids]
        served = [each.units for each in drawn if each.units]
        assert len(served) == min(len(uids), plan.num_slots)
        assert all(len(units) == plan.units_per_slot for units in served)
        unserved = spare_units(window, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash(window))
        units = [*itertools.chain.from_iterable(served), *unserved]
        assert len(units) == len(set(units)) == plan.units_per_window
        assert not seen & set(units)
        seen.update(units)
        assert seen <= set(range(epoch.total_units))


def test_a_dataset_without_one_whole_window_is_refused():
    with raising(PermanentError, Reason.DATASET_TOO_SMALL, "5 units but one window of 3 slots takes 6"):
        assign(0, 1, epoch=Epoch("small", 5), plan=SlotPlan(3, 2), uids=(1,), block_hash=block_hash(0))


def test_wrong_arguments_are_named():
    epoch, plan = Epoch("wrong", 10, first_window=5), SlotPlan(1, 1)
    with pytest.raises(ValueError, match="window 4 lies before"):
        assign(4, 1, epoch=epoch, plan=plan, uids=(1,), block_hash=block_hash(0))
    for uids in [(2, 1), (1, 1)]:
        with pytest.raises(ValueError, match="rising order"):
            assign(5, 1, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash(0))
    with pytest.raises(ValueError, match="at least 1"):
        SlotPlan(0, 1)


START = 100


def states(applied, outer_steps_per_shard):
    """The epochs of the state before the first window, and of that after each; a window is null or an outer step."""
    found, steps = [first_epochs(START)], 0
    for window, is_step in enumerate(applied, START):
        steps += is_step
        found.append(advanced(found[-1], window, steps, outer_steps_per_shard))
        assert advanced(found[-1], window, steps, outer_steps_per_shard) == found[-1]
    return found


def test_the_shard_of_another_window_is_not_known_yet_or_any_more():
    words = "window 123: its shard follows from the state of window 121, and this is that of window 120"
    with raising(TransientError, Reason.WINDOW_NOT_OPEN, words):
        epoch_of((ShardEpoch(100, 0),), 120, 123)
    words = "window 109: the state of window 120 knows shards from window 110 on"
    with raising(PermanentError, Reason.WINDOW_PASSED, words):
        epoch_of((ShardEpoch(110, 3), ShardEpoch(121, 4)), 120, 109)


@given(applied=st.lists(st.booleans(), max_size=60), outer_steps_per_shard=st.integers(1, 7))
def test_the_shard_of_a_window_follows_the_outer_steps_two_windows_before(applied, outer_steps_per_shard):
    steps = [0, 0, *itertools.accumulate(applied, initial=0)]  # those that count for window START + i
    positions = [count // outer_steps_per_shard for count in steps][1:]
    for number, found in enumerate(states(applied, outer_steps_per_shard)):
        state_window = START + number - 1
        assert found[0].first_window <= max(state_window, START)
        for window in range(max(state_window, START), state_window + LEAD + 1):
            epoch = epoch_of(found, state_window, window)
            assert epoch.position == positions[window - START]
            assert epoch.first_window == START + positions.index(epoch.position)
