"""The audit as an operator sees it: a final state that says what is wrong, and a table on the server."""

import json

import pytest

from flows.evidence import audit_window
from tests.support.audited import VALIDATOR, evidence_of, publish, run_alone
from tests.support.flow_network import run_flow
from tests.support.prepared import PreparedNetwork

NAME = "auditor"
NUM_WINDOWS = 2


@pytest.fixture(scope="module")
def network(tmp_path_factory, prefect_server):
    """A network with a validator's evidence, and a miner of it that looks at it later."""
    network = PreparedNetwork(tmp_path_factory.mktemp("audited"), deciding="validator")
    run_alone(network, NUM_WINDOWS)
    with prefect_server.configured():
        network.at("lazy", network.first_window + NUM_WINDOWS + 1).save(NAME)
    return network


def run(**parameters):
    return run_flow(audit_window, NAME, **parameters)


def rows(server, state):
    return json.loads(str(server.artifacts(state)[f"audit-{NAME}"].data))


def test_what_is_true_is_verified(network, prefect_api):
    """By default it is the newest final window that there is evidence of."""
    last = network.first_window + NUM_WINDOWS - 1
    state = run()
    assert (state.is_completed(), state.name) == (True, "Verified")
    said = f"window {last}: roster of the null window verified; evidence of uid {VALIDATOR} verified"
    assert state.message == said
    shown = prefect_api.artifacts(state)[f"audit-{NAME}"]
    assert shown.description == said
    assert {row["what"] for row in rows(prefect_api, state)} == {"verified"}


def test_a_lie_fails_the_run_and_is_named(network, prefect_api):
    window = network.first_window
    true = evidence_of(network, window)
    publish(network, true.model_copy(update={"weights": (), "seed_block": 0}))
    try:
        state = run(window=window)
        other = run(window=window, validator=VALIDATOR + 1)
    finally:
        publish(network, true)
    assert (state.is_failed(), state.name) == (True, "Differs")
    assert str(state.message).startswith(
        f"window {window}: evidence of uid {VALIDATOR} differs [evidence_differs] seed_block: published 0, recomputed "
    )
    differences = [row for row in rows(prefect_api, state) if row["what"] == "difference"]
    assert [(row["field"], row["at fault"]) for row in differences] == [
        ("seed_block", f"uid {VALIDATOR}"),
        ("weights[uid 0]", f"uid {VALIDATOR}"),
    ]
    assert other.is_failed()
    assert "[not_registered]" in str(other.message)
