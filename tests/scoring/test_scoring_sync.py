import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.scoring.score import MAX_BEHIND, sync_score, windows_behind

ROOTS = {window: f"{window:064x}" for window in range(3, 11)}


@pytest.mark.parametrize(
    ("behind", "score"),
    [
        (0, 1),
        (0.5, 0.768433),
        (1, 0.572433),
        (2, 0.278855),
        (2.5, 0.176777),
        (3, 0.101193),
        (4, 0.017889),
        (5, 0),
        (9, 0),
        (-1, 1),
    ],
)
def test_the_documented_curve(behind: float, score: float) -> None:
    assert sync_score(behind) == pytest.approx(score, abs=5e-7)


@given(st.floats(-10, 20), st.floats(-10, 20))
def test_being_further_behind_never_scores_higher(one: float, other: float) -> None:
    near, far = sorted((one, other))
    assert 0 <= sync_score(far) <= sync_score(near) <= 1


def test_a_root_says_how_many_windows_ago_it_was_the_networks() -> None:
    assert [windows_behind(ROOTS[window], ROOTS, 10) for window in (10, 9, 8, 7, 6)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("root", [ROOTS[5], ROOTS[3], "f" * 64])
def test_an_old_or_foreign_root_is_as_far_behind_as_can_be(root: str) -> None:
    assert windows_behind(root, ROOTS, 10) == MAX_BEHIND
    assert sync_score(MAX_BEHIND) == 0


def test_a_root_that_stood_twice_counts_as_the_newer_one() -> None:
    assert windows_behind("a" * 64, {9: "a" * 64, 8: "a" * 64}, 10) == 1


def test_without_known_roots_nobody_is_in_sync() -> None:
    assert windows_behind(ROOTS[10], {}, 10) == MAX_BEHIND
