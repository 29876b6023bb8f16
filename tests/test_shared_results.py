"""Results are shared by key within `sharing()`, and nowhere else."""

import pytest

from templar.shared_results import Same, shared, sharing

calls: list[int] = []


@shared(lambda value: value, most=2)
def halved(value):
    calls.append(value)
    if value % 2:
        raise ValueError(value)
    return value // 2


@pytest.fixture(autouse=True)
def fresh():
    calls.clear()


def test_nothing_is_shared_outside_of_a_context_or_if_it_is_not_wanted():
    with sharing(False):
        assert [halved(4), halved(4)] == [2, 2]
    assert [halved(4), halved(4)] == [2, 2]
    assert calls == [4] * 4


def test_results_are_shared_by_key_until_the_last_context_ends():
    with sharing():
        with sharing():
            assert [halved(4), halved(4), halved(6)] == [2, 2, 3]
        assert halved(4) == 2
        assert calls == [4, 6]
    with sharing():
        assert halved(4) == 2
    assert calls == [4, 6, 4]


def test_errors_and_the_least_recently_used_results_are_not_kept():
    with sharing():
        for value in (2, 4, 6, 2):
            halved(value)
        for _ in range(2):
            with pytest.raises(ValueError, match="3"):
                halved(3)
    assert calls == [2, 4, 6, 2, 3, 3]


def test_an_object_is_the_same_as_itself_alone():
    one, equal = [1], [1]
    assert Same(one) == Same(one)
    assert Same(one) != Same(equal)
    assert len({Same(one), Same(one), Same(equal)}) == 2
