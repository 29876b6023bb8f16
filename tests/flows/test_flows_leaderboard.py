"""The leaderboard as an operator sees it: a table and a plot on the server, out of a validator's bucket."""

import json

import pytest

from flows.evidence import leaderboard
from templar.reports.leaderboard import Leaderboard
from tests.support.flow_network import run_flow
from tests.support.published import MINERS, evaluate_genesis, publish_evidence, with_reader

NAME = "looker"
NUM_WINDOWS = 4


@pytest.fixture(scope="module")
def network(tmp_path_factory, prefect_server):
    """A network, and a miner of it that looks at the fifth window."""
    return with_reader(tmp_path_factory.mktemp("standings"), prefect_server, NAME, after=NUM_WINDOWS)


@pytest.fixture(scope="module")
def published(network):
    """Evidence of the first windows but one, and the validator's uid."""
    first = network.first_window
    return publish_evidence(network, [first, first + 1, first + 3])


def run(**parameters):
    return run_flow(leaderboard, NAME, **parameters)


def test_nothing_published_is_no_failure(network, prefect_api):
    state = run()
    assert (state.is_completed(), state.name) == (True, "Skipped")
    last = network.first_window + NUM_WINDOWS - 1
    assert state.message == (
        f"[evidence_missing] no validator shows evidence of windows {network.first_window} to {last}: "
        "wait until a window was measured"
    )
    assert prefect_api.artifacts(state) == {}


def test_the_standings_are_a_table_and_a_plot_beside_the_newest_evaluations(network, published, prefect_api):
    uid, evidences = published
    board, first = Leaderboard(evidences), network.first_window
    score = evaluate_genesis(network).score
    state = run()
    read = f"evidence of uid {uid}: 3 of 4 windows, {first} to {first + 3}; nothing of {first + 2}"
    assert (state.name, state.message) == ("Completed", f"{read}: {board.summary}")
    shown = prefect_api.artifacts(state)
    names = ("leaderboard", "leaderboard-plot", "held-out")
    assert set(shown) == {f"{name}-{NAME}" for name in names}
    table, plot, held_out = (shown[f"{name}-{NAME}"] for name in names)
    assert json.loads(str(table.data)) == board.cells()
    assert {row["uid"] for row in board.cells()} == set(MINERS)
    assert table.description == f"{read}: {board.summary}"
    assert (plot.type, plot.description) == ("markdown", read)
    assert str(plot.data).startswith(f"![leaderboard-plot-{NAME}](data:image/svg+xml;base64,")
    (row,) = json.loads(str(held_out.data))
    assert (row["window"], row["by"], row["loss"]) == (str(first - 1), "uid 1", f"{score.loss:.4f}")
    assert held_out.description == "The newest 1 of 1 measured checkpoints."


def test_a_validator_and_fewer_windows_can_be_asked_for(network, published, prefect_api):
    uid, evidences = published
    last = network.first_window + 3
    state = run(windows=1, validator=uid)
    assert state.message is not None
    assert state.message.startswith(f"evidence of uid {uid}: 1 of 1 windows, {last}: loss ")
    rows = json.loads(str(prefect_api.artifacts(state)[f"leaderboard-{NAME}"].data))
    assert rows == Leaderboard(evidences[-1:]).cells()
    unknown = run(validator=200)
    assert unknown.is_failed()
    assert "[not_registered] validator: uid 200 is no validator" in str(unknown.message)
    assert run(windows=0).is_failed()
