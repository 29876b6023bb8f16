"""The benchmark of a neuron's memory runs whole windows, and its last line holds the figures."""

import pytest

from benchmarks.neuron_memory import Footprint, footprint, slope


def test_a_slope_is_what_one_more_parameter_takes():
    pair = Footprint(100, peak=5000, written=700), Footprint(300, peak=11000, written=2700)
    assert slope(pair, lambda each: each.peak) == 30.0
    assert slope(pair, lambda each: each.written) == 10.0


@pytest.mark.slow
@pytest.mark.parametrize("role", ["miner", "validator"])
def test_a_process_of_its_own_lives_through_the_windows(role):
    taken = footprint(role, 1)
    assert taken.parameters == 2_016_384
    assert taken.peak > 20 * taken.parameters
    private, agreed = 12 * (role == "miner"), 1
    assert private + agreed < taken.written / taken.parameters < private + agreed + 2
