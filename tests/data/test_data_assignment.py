import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.canonical import canonical_json, sha256_hex
from templar.data.assignment import (
    LEAD,
    Assignment,
    Epoch,
    Epochs,
    ShardEpoch,
    SlotPlan,
    advanced,
    assign,
    epoch_of,
    first_epochs,
    spare_units,
)
from templar.errors import PermanentError, Reason, TransientError


def block_hash(number: int) -> str:
    return f"0x{number:064x}"


def assign_all(window: int, epoch: Epoch, plan: SlotPlan, uids: tuple[int, ...]) -> dict[int, Assignment]:
    return {uid: assign(window, uid, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash(window)) for uid in uids}


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
def test_disjoint_in_a_window_and_without_repeats_in_a_round(
    plan: SlotPlan, spare: int, key: str, first_window: int, registered: list[tuple[int, ...]]
) -> None:
    """Miners join and leave between windows; one list of them per window."""
    epoch = Epoch(key, plan.units_per_window + spare, first_window)
    windows_per_round = epoch.total_units // plan.units_per_window
    seen: Counter[int] = Counter()
    for number, uids in enumerate(registered):
        if number % windows_per_round == 0:
            seen.clear()
        assignments = assign_all(first_window + number, epoch, plan, uids)
        served = [assignment for assignment in assignments.values() if assignment.units]
        assert len(served) == min(len(uids), plan.num_slots)
        assert all(len(assignment.units) == plan.units_per_slot for assignment in served)
        seen.update(unit for assignment in served for unit in assignment.units)
        assert all(0 <= unit < epoch.total_units for unit in seen)
        assert not seen or max(seen.values()) == 1


def test_a_full_round_uses_every_unit_once_and_the_next_one_in_another_order() -> None:
    epoch, plan, uids = Epoch("round", 60, first_window=3), SlotPlan(4, 5), (1, 4, 6, 9)
    rounds = [
        [
            unit
            for window in range(3 + 3 * index, 6 + 3 * index)
            for assigned in assign_all(window, epoch, plan, uids).values()
            for unit in assigned.units
        ]
        for index in range(3)
    ]
    assert all(sorted(units) == list(range(60)) for units in rounds)
    slices = [{frozenset(units[start : start + 20]) for start in (0, 20, 40)} for units in rounds]
    assert slices[0] != slices[1] != slices[2] != slices[0]


def test_a_whole_round_while_miners_come_and_go() -> None:
    """No unit is assigned twice, and no unit of a filled slot is left out."""
    plan, num_windows = SlotPlan(16, 3), 60
    epoch = Epoch("churn", num_windows * plan.units_per_window + 7, first_window=5)
    generator = random.Random(1)
    subnet = set(range(16))
    seen: set[int] = set()
    for window in range(5, 5 + num_windows):
        subnet ^= set(generator.sample(range(24), generator.randrange(5)))  # some join, some leave
        uids = tuple(sorted(subnet))
        context = {"epoch": epoch, "plan": plan, "uids": uids, "block_hash": block_hash(window)}
        assigned = {uid: assign(window, uid, **context).units for uid in uids}
        units = [unit for each in assigned.values() for unit in each]
        spare = spare_units(window, **context)
        assert len(units) == min(len(uids), plan.num_slots) * plan.units_per_slot
        assert len({*units, *spare}) == len(units) + len(spare) == plan.units_per_window
        assert not seen & {*units, *spare}
        seen |= {*units, *spare}
    assert len(seen) == num_windows * plan.units_per_window


def test_the_hash_of_the_opening_block_decides_the_slots() -> None:
    epoch, plan, uids = Epoch("unpredictable", 64), SlotPlan(8, 1), tuple(range(8))
    got = Counter(
        assign(0, 3, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash(number)).units for number in range(400)
    )
    assert len(got) == 8
    assert max(got.values()) < 90
    pool = {unit for units in got for unit in units}
    assert pool == {epoch.unit_at(position) for position in range(8)}


def test_more_miners_than_slots_take_turns_in_waiting() -> None:
    epoch, plan, uids = Epoch("surplus", 100), SlotPlan(2, 1), (2, 3, 5, 7)
    served: Counter[int] = Counter()
    assert assign(0, 9, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash(0)).units == ()  # not registered
    for window in range(60):
        assignments = assign_all(window, epoch, plan, uids)
        served.update(uid for uid, assigned in assignments.items() if assigned.units)
    assert served.total() == 120
    assert set(served) == set(uids)
    assert min(served.values()) > 15


def test_the_digest_covers_the_units_and_their_inputs() -> None:
    epoch, plan, uids = Epoch("net/data/0", 40, first_window=5), SlotPlan(3, 2), (0, 4, 9)
    assigned = assign(11, 4, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash(77))
    content = {
        "window": 11,
        "uid": 4,
        "uids": [0, 4, 9],
        "block_hash": block_hash(77),
        "epoch": {"key": "net/data/0", "total_units": 40, "first_window": 5},
        "plan": {"num_slots": 3, "units_per_slot": 2},
        "units": list(assigned.units),
    }
    assert assigned.digest == sha256_hex(canonical_json(content))


def test_known_answer() -> None:
    """A fixed vector for other implementations."""
    epoch, plan = Epoch("vector", 100, first_window=10), SlotPlan(4, 3)
    assigned = assign(23, 7, epoch=epoch, plan=plan, uids=(1, 7, 8), block_hash="0x" + "ab" * 32)
    assert assigned.units == (51, 77, 71)
    assert assigned.digest == "37838f7da1c5df2e8b1c269ed0c6266c7ebd8be63a8e2f1661165cbc64220ea9"


def test_each_input_changes_the_digest() -> None:
    epoch, plan, uids = Epoch("digests", 40), SlotPlan(2, 2), (1, 2)
    base = {"epoch": epoch, "plan": plan, "uids": uids, "block_hash": block_hash(1)}
    variants = [
        base,
        {**base, "epoch": replace(epoch, key="other")},
        {**base, "epoch": replace(epoch, total_units=41)},
        {**base, "epoch": replace(epoch, first_window=1)},
        {**base, "plan": SlotPlan(4, 2)},
        {**base, "uids": (1, 2, 3)},
        {**base, "block_hash": block_hash(2)},
    ]
    digests = {assign(1, 1, **variant).digest for variant in variants}
    digests |= {assign(1, 2, **base).digest, assign(2, 1, **base).digest}
    assert len(digests) == len(variants) + 2


def test_a_dataset_without_one_whole_window_is_refused() -> None:
    with pytest.raises(PermanentError, match="5 units but one window of 3 slots takes 6") as caught:
        assign(0, 1, epoch=Epoch("small", 5), plan=SlotPlan(3, 2), uids=(1,), block_hash=block_hash(0))
    assert caught.value.reason is Reason.DATASET_TOO_SMALL


def test_wrong_arguments_are_named() -> None:
    epoch, plan = Epoch("wrong", 10, first_window=5), SlotPlan(1, 1)
    with pytest.raises(ValueError, match="window 4 lies before"):
        assign(4, 1, epoch=epoch, plan=plan, uids=(1,), block_hash=block_hash(0))
    for uids in [(2, 1), (1, 1)]:
        with pytest.raises(ValueError, match="rising order"):
            assign(5, 1, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash(0))
    with pytest.raises(ValueError, match="at least 1"):
        SlotPlan(0, 1)


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
def test_epochs_from_a_later_state_are_those_from_genesis(
    before: list[bool], after: list[bool], outer_steps_per_shard: int
) -> None:
    genesis = states(before + after, outer_steps_per_shard)
    found, steps = genesis[len(before)], sum(before)
    for window, is_step in enumerate(after, START + len(before)):
        steps += is_step
        found = advanced(found, window, steps, outer_steps_per_shard)
        assert found == genesis[window - START + 1]
    assert len(found) <= LEAD + 1
