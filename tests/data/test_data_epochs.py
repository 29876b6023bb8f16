"""Which windows train on which shard: the same for everybody, from genesis on or from any later state."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.data.assignment import LEAD, Epochs, ShardEpoch, advanced, epoch_of, first_epochs
from templar.errors import PermanentError, Reason, TransientError

START = 100


def epochs(*pairs: tuple[int, int]) -> Epochs:
    return tuple(ShardEpoch(*pair) for pair in pairs)


def states(applied: list[bool], outer_steps_per_shard: int) -> list[Epochs]:
    """The epochs of the state before the first window, and of that after each; a window is null or an outer step."""
    found, steps = [first_epochs(START)], 0
    for window, is_step in enumerate(applied, START):
        steps += is_step
        found.append(advanced(found[-1], window, steps, outer_steps_per_shard))
    return found


class TestAdvancing:
    def test_the_first_windows_train_on_the_first_shard(self) -> None:
        assert first_epochs(START) == epochs((START, 0))
        assert [epoch_of(first_epochs(START), START - 1, START + ahead) for ahead in range(LEAD)] == [
            ShardEpoch(START, 0)
        ] * LEAD

    def test_a_swap_takes_two_windows(self) -> None:
        assert states([True] * 5, 3) == [
            epochs((100, 0)),
            epochs((100, 0)),
            epochs((100, 0)),
            epochs((100, 0), (104, 1)),  # the third outer step is that of window 102
            epochs((100, 0), (104, 1)),
            epochs((104, 1)),
        ]

    def test_null_windows_put_off_a_swap_and_not_its_beginning(self) -> None:
        assert states([True, False, False, True, False, False], 2)[3:] == [
            epochs((100, 0)),
            epochs((100, 0), (105, 1)),
            epochs((100, 0), (105, 1)),
            epochs((105, 1)),
        ]

    def test_every_window_may_have_a_shard_of_its_own(self) -> None:
        assert states([True] * 4, 1)[-1] == epochs((103, 2), (104, 3), (105, 4))

    def test_a_window_is_asked_for_a_second_time_and_nothing_changes(self) -> None:
        found = states([True] * 6, 3)
        assert advanced(found[4], 103, 4, 3) == found[4]


class TestErrors:
    def test_a_later_window_is_not_open_yet(self) -> None:
        with pytest.raises(TransientError) as caught:
            epoch_of(epochs((100, 0)), 120, 123)
        assert caught.value.reason is Reason.WINDOW_NOT_OPEN
        assert "window 123: its shard follows from the state of window 121, and this is that of window 120" in str(
            caught.value
        )

    def test_an_earlier_window_is_not_known_any_more(self) -> None:
        with pytest.raises(PermanentError) as caught:
            epoch_of(epochs((110, 3), (121, 4)), 120, 109)
        assert caught.value.reason is Reason.WINDOW_PASSED
        assert "window 109: the state of window 120 knows shards from window 110 on" in str(caught.value)

    @pytest.mark.parametrize(("window", "position"), [(110, 3), (120, 3), (121, 4), (122, 5)])
    def test_what_is_known_is_answered(self, window: int, position: int) -> None:
        assert epoch_of(epochs((110, 3), (121, 4), (122, 5)), 120, window).position == position


@given(applied=st.lists(st.booleans(), max_size=60), outer_steps_per_shard=st.integers(1, 7))
def test_the_shard_of_a_window_follows_the_outer_steps_two_windows_before(
    applied: list[bool], outer_steps_per_shard: int
) -> None:
    steps = [0, 0, *itertools.accumulate(applied, initial=0)]  # those that count for window START + i
    positions = [count // outer_steps_per_shard for count in steps][1:]
    for number, found in enumerate(states(applied, outer_steps_per_shard)):
        state_window = START + number - 1
        assert found[0].first_window <= max(state_window, START)
        for window in range(max(state_window, START), state_window + LEAD + 1):
            epoch = epoch_of(found, state_window, window)
            assert epoch.position == positions[window - START]
            assert epoch.first_window == START + positions.index(epoch.position)


@given(
    before=st.lists(st.booleans(), max_size=40),
    after=st.lists(st.booleans(), max_size=20),
    outer_steps_per_shard=st.integers(1, 5),
)
def test_who_begins_at_a_later_state_agrees_with_who_began_at_genesis(
    before: list[bool], after: list[bool], outer_steps_per_shard: int
) -> None:
    genesis = states(before + after, outer_steps_per_shard)
    found, steps = genesis[len(before)], sum(before)
    for window, is_step in enumerate(after, START + len(before)):
        steps += is_step
        found = advanced(found, window, steps, outer_steps_per_shard)
        assert found == genesis[window - START + 1]
    assert len(found) <= LEAD + 1
