"""A network of processes in which one miner is a group of two ranks, and loses one of them in every second window.

`python -m tests.support.rank_faults FOLDER FAULTS` injects more faults than fit here.
"""

from collections.abc import Iterator

import pytest

from templar.window import Missed
from tests.support.live_network import logs_on_failure
from tests.support.rank_faults import KINDS, Outcome, RankFaults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REASONS = {"out of memory": "out_of_memory"}
"""Why nothing is published in the window of a fault, where it is not `trainer_failed`."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankFaults]:
    faults = RankFaults(tmp_path_factory.mktemp("ranks"))
    with faults.up(), logs_on_failure(faults.network):
        yield faults


@pytest.fixture(scope="module")
def outcomes(faults: RankFaults) -> list[Outcome]:
    """One of each kind."""
    return faults.inject(len(KINDS))


class TestAGroupThatIsHurt:
    def test_the_window_of_a_fault_ends_with_its_reason(self, outcomes: list[Outcome]) -> None:
        assert [each.kind for each in outcomes] == [*KINDS]
        for outcome in outcomes:
            if outcome.kind == "worker killed":  # the next one takes the window up, and may be too late
                assert outcome.history.index("Crashed") < outcome.history.index("AwaitingRetry"), outcome
                assert outcome.state in ("Completed", "Skipped", Missed.NOTHING_PUBLISHED), outcome
                assert outcome.state == "Completed" or "[" in outcome.message, outcome
            else:
                assert outcome.state == Missed.NOTHING_PUBLISHED, outcome
                assert f"not trained [{REASONS.get(outcome.kind, 'trainer_failed')}]" in outcome.message

    def test_the_next_window_trains(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.next_window <= outcome.window + 2  # two only if a busy machine left no time in the first
            assert outcome.next_state == "Completed", outcome
            assert "published" in outcome.next_message
            assert outcome.next_measured, outcome

    def test_everybody_has_one_state_and_the_group_is_paid(self, faults: RankFaults, outcomes: list[Outcome]) -> None:
        network, last = faults.network, faults.settle()
        assert last > outcomes[-1].window
        roots = [network.view.roots(window) for window in range(network.first_window, last + 1)]
        assert {len(set(each.values())) for each in roots} == {1}
        assert roots[-1].keys() == network.names
        assert faults.weight() > 0

    def test_no_run_is_left_open_and_no_process(self, faults: RankFaults) -> None:
        assert faults.open_runs() == []
        assert faults.orphans() != []
        faults.network.down()
        faults.network.wait(lambda: not faults.orphans(), "all processes have ended")
        assert faults.leftovers() == []
