import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.canonical import canonical_json, sha256_hex
from templar.data.assignment import Assignment, Epoch, SlotPlan, assign, spare_units
from templar.errors import PermanentError, Reason


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


def test_200_windows_of_64_slots_while_miners_come_and_go() -> None:
    """A whole epoch: nothing is assigned twice, nothing of a filled slot is left out, everybody finds every owner."""
    plan, num_windows = SlotPlan(64, 3), 200
    epoch = Epoch("churn", num_windows * plan.units_per_window + 7, first_window=5)
    generator = random.Random(1)
    subnet = set(range(64))
    seen: set[int] = set()
    for window in range(5, 5 + num_windows):
        subnet ^= set(generator.sample(range(90), generator.randrange(5)))  # some join, some leave
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


def test_the_last_units_of_a_round_come_up_in_another_one() -> None:
    epoch, plan = Epoch("rest", 7), SlotPlan(2, 3)
    used = [
        {unit for assigned in assign_all(window, epoch, plan, (0, 1)).values() for unit in assigned.units}
        for window in range(20)
    ]
    assert all(len(units) == 6 for units in used)
    assert set.union(*used) == set(range(7))


def test_the_opening_block_decides_who_gets_which_slot() -> None:
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
    for window in range(60):
        assignments = assign_all(window, epoch, plan, uids)
        served.update(uid for uid, assigned in assignments.items() if assigned.units)
    assert served.total() == 120
    assert set(served) == set(uids)
    assert min(served.values()) > 15


def test_who_was_not_registered_at_the_opening_gets_nothing() -> None:
    epoch, plan = Epoch("strangers", 10), SlotPlan(2, 2)
    assigned = assign(0, 9, epoch=epoch, plan=plan, uids=(1, 2), block_hash=block_hash(0))
    assert assigned.units == ()
    assert assign(0, 9, epoch=epoch, plan=plan, uids=(), block_hash=block_hash(0)).units == ()


def test_a_stranger_recomputes_the_digest() -> None:
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
    """Whoever implements the protocol anew must get this."""
    epoch, plan = Epoch("vector", 100, first_window=10), SlotPlan(4, 3)
    assigned = assign(23, 7, epoch=epoch, plan=plan, uids=(1, 7, 8), block_hash="0x" + "ab" * 32)
    assert assigned.units == (51, 77, 71)
    assert assigned.digest == "37838f7da1c5df2e8b1c269ed0c6266c7ebd8be63a8e2f1661165cbc64220ea9"


def test_everything_that_decides_changes_the_digest() -> None:
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
