import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reference.debug_values import DebugComparison, compare_debug
from templar.agreement.sync_proof import MINER_START, START, debug_values

INF = math.inf
RATE = 0.001
PARAMS = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
PUBLISHED = {"w": [1.001, 1.998]}


# Known answers.


def test_the_documented_vectors() -> None:
    found = compare_debug(PUBLISHED, PARAMS, (0, 2), RATE)
    assert found.count == 2
    assert found.l2 == pytest.approx(2.2360659e-3, rel=5e-8)
    assert found.avg_l2 == pytest.approx(2.2360659e-3 / 2, rel=5e-8)
    assert found.avg_abs_diff == pytest.approx(0.0015, rel=1e-5)
    assert found.avg_steps_behind == pytest.approx(1.50001, abs=5e-6)
    assert found.max_steps == pytest.approx(1.99997, abs=5e-6)
    assert found.median_steps_behind == pytest.approx(1.000047, abs=5e-7), "the lower one of two"
    assert found.max_steps_behind == found.max_steps
    known = compare_debug(PUBLISHED, PARAMS, (0, 2), RATE, steps={"w": [0.01, 0.02]})
    assert known.median_steps_behind == pytest.approx(0.0999987, abs=5e-8)
    assert known.max_steps_behind == pytest.approx(0.1000047, abs=5e-8)
    assert (known.avg_steps_behind, known.max_steps) == (found.avg_steps_behind, found.max_steps)
    for steps in ((0.5,), (0.5, 0.5, 0.5), ()):  # steps that do not fit are not used
        assert compare_debug(PUBLISHED, PARAMS, (0, 2), RATE, steps={"w": steps, "other": (1.0, 1.0)}) == found
    same = compare_debug({"w": [1.0, 2.0]}, PARAMS, (0, 2), RATE)
    assert same == DebugComparison(2, *[0.0] * 7)


def test_other_elements_are_compared_where_the_range_says_so() -> None:
    found = compare_debug({"w": [3.5, 4.25]}, PARAMS, (2, 4), 0.25)
    expected = DebugComparison(2, math.hypot(0.5, 0.25), math.hypot(0.5, 0.25) / 2, 0.375, 1.5, 2.0, 1.0, 2.0)
    assert found == expected


@pytest.mark.parametrize(
    ("apart", "median"), [((5,), 5), ((9, 7), 7), ((7, 9, 8), 8), ((5, 0, 0, 0), 0), ((9, 8, 1, 2), 2)]
)
def test_the_median_is_over_all_elements_and_the_lower_of_two(apart: tuple[int, ...], median: int) -> None:
    own = {str(index): torch.zeros(1) for index in range(len(apart))}
    found = compare_debug({str(index): [number] for index, number in enumerate(apart)}, own, (0, 1), 0.5)
    assert found.median_steps_behind == 2 * median
    assert found.max_steps_behind == 2 * max(apart)


# What cannot be compared.


@pytest.mark.parametrize("rate", [0.0, -0.0, -RATE, math.nan, INF])
def test_without_a_positive_rate_distances_in_steps_are_infinite(rate: float) -> None:
    found = compare_debug(PUBLISHED, PARAMS, (0, 2), rate)
    assert {found.avg_steps_behind, found.max_steps, found.median_steps_behind, found.max_steps_behind} == {INF}
    assert found.l2 == compare_debug(PUBLISHED, PARAMS, (0, 2), RATE).l2
    equal = compare_debug({"w": [1.0, 2.0]}, PARAMS, (0, 2), rate)
    assert (equal.avg_abs_diff, equal.avg_steps_behind) == (0.0, INF)


@pytest.mark.parametrize(
    ("values", "indices"),
    [({}, (0, 2)), ({"x": [1.0, 2.0]}, (0, 2)), ({"w": []}, (0, 2)), ({"w": [1.0]}, (0, 2)),
     ({"w": [1.0, 2.0, 3.0]}, (0, 2)), ({"w": [4.0, 5.0]}, (3, 5)), ({"w": [1.0, 2.0]}, (10, 12)),
     ({"w": []}, (10, 12))],
)  # fmt: skip
def test_nothing_compared_is_infinitely_far(values: dict[str, list[float]], indices: tuple[int, int]) -> None:
    assert compare_debug(values, PARAMS, indices, RATE) == DebugComparison(0, 0.0, INF, INF, INF, INF, INF, INF)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF, 1e300])
def test_a_difference_that_is_no_number_is_infinite(bad: float) -> None:
    good = {"a": torch.tensor([1.0]), "z": torch.tensor([1.0])}
    for name in good:
        found = compare_debug({"a": [1.0], "z": [1.0]} | {name: [bad]}, good, (0, 1), RATE)
        assert (found.count, found.l2, found.max_steps, found.max_steps_behind) == (2, INF, INF, INF)
        assert found.median_steps_behind == 0.0
        own = good | {name: torch.tensor([bad])}
        assert compare_debug({"a": [1.0], "z": [1.0]}, own, (0, 1), RATE) == found
    both = compare_debug({"a": [bad]}, {"a": torch.tensor([bad])}, (0, 1), RATE)
    assert both.avg_abs_diff == INF


# Properties.


@settings(max_examples=20)
@given(st.floats(1e-4, 1e-1), st.integers(1, 5))
def test_a_state_that_is_windows_behind_by_signs_is_so_many_steps_behind(rate: float, windows: int) -> None:
    """What the documented metric is made for: each window moves each element by the rate, up or down."""
    generator = torch.Generator().manual_seed(windows)
    old = {name: torch.randn((4, 5), generator=generator) for name in "ab"}
    signs = {name: torch.sign(tensor) for name, tensor in old.items()}
    new = {name: old[name].double() + windows * rate * signs[name] for name in old}
    for start in (START, MINER_START):
        found = compare_debug(debug_values(old, start), new, (start, start + 2), rate)
        assert found.avg_steps_behind == pytest.approx(windows, abs=1e-6 / rate)
        assert found.median_steps_behind == pytest.approx(windows, abs=1e-6 / rate)
