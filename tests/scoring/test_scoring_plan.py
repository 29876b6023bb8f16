from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.scoring.plan import SPARE, EvaluationPlan, SequenceRef, draw, draw_plan

HASH = "0x" + "ab" * 32
OTHER_HASH = "0x" + "cd" * 32


def plan_of(
    available: Mapping[int, int],
    *,
    num_spare: int = 5,
    num_sequences: int = 4,
    trained_first: int = 8,
    block: str = HASH,
) -> EvaluationPlan:
    return draw_plan(
        available, num_spare=num_spare, num_sequences=num_sequences, trained_first=trained_first, block_hash=block
    )


networks = st.dictionaries(st.integers(0, 255), st.integers(0, 20), max_size=6)


@settings(max_examples=100)
@given(available=networks, num_spare=st.integers(0, 6), num_sequences=st.integers(1, 6), trained=st.integers(1, 12))
def test_what_a_plan_promises(available: dict[int, int], num_spare: int, num_sequences: int, trained: int) -> None:
    plan = plan_of(available, num_spare=num_spare, num_sequences=num_sequences, trained_first=trained)
    assert set(plan.own) == set(plan.random) == set(available)
    for uid, own in plan.own.items():
        assert len(own) == min(num_sequences, available[uid], trained)
        assert all(ref.uid == uid and ref.index < trained for ref in own)
        random = plan.random[uid]
        others = {ref for other, refs in plan.own.items() if other != uid for ref in refs}
        spare = {SequenceRef(SPARE, index) for index in range(num_spare)}
        assert set(random) <= others | spare
        assert len(random) == len(set(random)) == min(num_sequences, len(others | spare))
        assert not set(own) & set(random)
    used = {ref for refs in (*plan.own.values(), *plan.random.values()) for ref in refs}
    assert plan.batch == tuple(sorted(used))


@settings(max_examples=50)
@given(available=networks)
def test_the_plan_is_a_pure_function_of_the_block(available: dict[int, int]) -> None:
    assert plan_of(available) == plan_of(dict(reversed(available.items())))


def test_another_block_draws_another_plan() -> None:
    available = dict.fromkeys(range(5), 20)
    one, other = plan_of(available), plan_of(available, block=OTHER_HASH)
    assert any(one.own[uid] != other.own[uid] for uid in available)
    assert any(one.random[uid] != other.random[uid] for uid in available)


def test_a_miner_alone_is_measured_against_data_that_nobody_was_assigned() -> None:
    plan = plan_of({7: 20})
    assert {ref.uid for ref in plan.random[7]} == {SPARE}
    assert len(plan.random[7]) == 4


def test_without_any_other_data_there_is_nothing_random() -> None:
    plan = plan_of({7: 20}, num_spare=0)
    assert plan.random[7] == ()
    assert plan.batch == plan.own[7]


def test_a_miner_without_data_is_measured_on_others_only() -> None:
    plan = plan_of({7: 0, 8: 20})
    assert plan.own[7] == ()
    assert len(plan.random[7]) == 4


def test_every_sequence_that_was_trained_on_may_be_drawn_and_no_other() -> None:
    drawn = {ref.index for number in range(60) for ref in plan_of({7: 20}, block=f"0x{number:064x}").own[7]}
    assert drawn == set(range(8))


@pytest.mark.parametrize(("count", "length"), [(0, 0), (3, 3), (10, 10), (50, 10)])
def test_a_draw_has_as_many_as_there_are_in_rising_order(count: int, length: int) -> None:
    found = draw(range(10), count, "test", HASH)
    assert len(found) == len(set(found)) == length
    assert found == sorted(found)


def test_a_larger_draw_contains_the_smaller_one() -> None:
    assert set(draw(range(100), 5, "test", HASH)) < set(draw(range(100), 6, "test", HASH))
