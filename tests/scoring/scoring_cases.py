"""Strategies that the tests of the scoring room share."""

from hypothesis import strategies as st

from templar.scoring.standing import MU, SIGMA, ScoreCard
from tests.support.facts import WINDOW

cards = st.builds(
    ScoreCard,
    uid=st.none() | st.integers(2, 9),
    mu=st.sampled_from([10.0, MU, 40.0]),
    sigma=st.sampled_from([2.0, SIGMA]),
    binary_average=st.sampled_from([-0.5, 0.0, 0.3333333333, 0.5, 1.0]),
    advantage=st.sampled_from([-0.1, 0.0, 0.1]),
    own_excess=st.sampled_from([-0.1, 0.0, 0.1]),
    sync=st.sampled_from([0.0, 1.0]),
    final=st.sampled_from([-3.0, 0.0, 1e-4, 5.0, 6.6666666667]),
    last_reveal=st.none() | st.just(WINDOW - 1),
    idle=st.sampled_from([0, 2, 90]),
    measured=st.sampled_from([0, 99]),
    last_exact=st.none() | st.just(50),
    curvature=st.none() | st.sampled_from([-0.5, 0.0, 0.25]),
    predicted_gain=st.sampled_from([-1.0, 0.0, 0.05, 1.0]),
    fruitless=st.sampled_from([0.0, 2.5]),
    exclusions=st.sampled_from([0, 3]),
    excluded_until=st.none() | st.sampled_from([WINDOW - 1, WINDOW + 9]),
)
"""Any past of a miner, with ties."""
