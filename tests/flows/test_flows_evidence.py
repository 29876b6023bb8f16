"""What an operator sees of published evidence: final states, tables and a plot, out of a validator's bucket."""

import json

import pytest

from flows.audit_window import audit_window
from flows.leaderboard import leaderboard
from flows.public_page import public_page
from templar.reports.leaderboard import Leaderboard
from templar.reports.public_page import PAGE_KEY
from tests.support.audited import VALIDATOR, evidence_of, publish, run_alone
from tests.support.flow_network import run_flow
from tests.support.prepared import PreparedNetwork
from tests.support.published import MINERS, evaluate_genesis, publish_evidence, with_reader

AUDITOR, LOOKER = "auditor", "looker"
AUDITED, LOOKED_AT = 2, 4
"""Windows of each network."""


@pytest.fixture(scope="module")
def audited(tmp_path_factory, prefect_server):
    """A network with a validator's evidence, and a miner of it that looks at it later."""
    network = PreparedNetwork(tmp_path_factory.mktemp("audited"), deciding="validator")
    run_alone(network, AUDITED)
    with prefect_server.configured():
        network.at("lazy", network.first_window + AUDITED + 1).save(AUDITOR)
    return network


def audit(**parameters):
    return run_flow(audit_window, AUDITOR, **parameters)


def rows(server, state):
    return json.loads(str(server.artifacts(state)[f"audit-{AUDITOR}"].data))


def test_what_is_true_is_verified(audited, prefect_api):
    """By default it is the newest final window that there is evidence of."""
    last = audited.first_window + AUDITED - 1
    state = audit()
    assert (state.is_completed(), state.name) == (True, "Verified")
    said = f"window {last}: roster of the null window verified; evidence of uid {VALIDATOR} verified"
    assert state.message == said
    shown = prefect_api.artifacts(state)[f"audit-{AUDITOR}"]
    assert shown.description == said
    assert {row["what"] for row in rows(prefect_api, state)} == {"verified"}


def test_a_lie_fails_the_run_and_is_named(audited, prefect_api):
    window = audited.first_window
    true = evidence_of(audited, window)
    publish(audited, true.model_copy(update={"weights": (), "seed_block": 0}))
    try:
        state = audit(window=window)
        other = audit(window=window, validator=VALIDATOR + 1)
    finally:
        publish(audited, true)
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


@pytest.fixture(scope="module")
def network(tmp_path_factory, prefect_server):
    """A network, and a miner of it that looks at the fifth window."""
    return with_reader(tmp_path_factory.mktemp("standings"), prefect_server, LOOKER, after=LOOKED_AT)


@pytest.fixture(scope="module")
def published(network):
    """Evidence of the first windows but one, and the validator's uid."""
    first = network.first_window
    return publish_evidence(network, [first, first + 1, first + 3])


def show(**parameters):
    return run_flow(leaderboard, LOOKER, **parameters)


def test_nothing_published_is_no_failure(network, prefect_api):
    state = show()
    assert (state.is_completed(), state.name) == (True, "Skipped")
    last = network.first_window + LOOKED_AT - 1
    assert state.message == (
        f"[evidence_missing] no validator shows evidence of windows {network.first_window} to {last}: "
        f"wait until a window was measured, about {network.hparams.windows.seconds:.0f} s"
    )
    assert prefect_api.artifacts(state) == {}


def test_the_standings_are_a_table_and_a_plot_beside_the_newest_evaluations(network, published, prefect_api):
    uid, evidences = published
    board, first = Leaderboard(evidences), network.first_window
    score = evaluate_genesis(network).score
    state = show()
    read = f"evidence of uid {uid}: 3 of 4 windows, {first} to {first + 3}; nothing of {first + 2}"
    assert (state.name, state.message) == ("Completed", f"{read}: {board.summary}")
    shown = prefect_api.artifacts(state)
    names = ("leaderboard", "leaderboard-plot", "held-out")
    assert set(shown) == {f"{name}-{LOOKER}" for name in names}
    table, plot, held_out = (shown[f"{name}-{LOOKER}"] for name in names)
    assert json.loads(str(table.data)) == board.cells()
    assert {row["uid"] for row in board.cells()} == set(MINERS)
    assert table.description == f"{read}: {board.summary}"
    assert (plot.type, plot.description) == ("markdown", read)
    assert str(plot.data).startswith(f"![leaderboard-plot-{LOOKER}](data:image/svg+xml;base64,")
    (row,) = json.loads(str(held_out.data))
    assert (row["window"], row["by"], row["loss"]) == (str(first - 1), "uid 1", f"{score.loss:.4f}")
    assert held_out.description == "The newest 1 of 1 measured checkpoints."


def test_the_page_is_stored_where_a_browser_finds_it(network, published, prefect_api):
    """Up to the newest window that is measured by now; a page of the same network is the same."""
    state = run_flow(public_page, LOOKER)
    assert (state.name, prefect_api.artifacts(state)) == ("Completed", {})
    (path,) = (network.plan.folder / "buckets").rglob(PAGE_KEY)
    page = path.read_bytes()
    assert f"<td>{network.first_window + LOOKED_AT - 2}</td>" in page.decode()
    assert str(state.message).startswith(f"{len(page):,} bytes as {PAGE_KEY} in bucket ")


def test_the_page_goes_into_the_bucket_that_is_named_for_it(network, published, prefect_api, monkeypatch):
    del published, prefect_api
    (network.plan.folder / "buckets" / "pages").mkdir()
    monkeypatch.setenv("R2_PAGE_BUCKET_NAME", "pages")
    refused = run_flow(public_page, LOOKER)
    assert refused.is_failed()
    assert "[bad_environment] R2_PAGE_ACCOUNT_ID is missing" in str(refused.message)
    for name in ("ACCOUNT_ID", "WRITE_ACCESS_KEY_ID", "WRITE_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"R2_PAGE_{name}", "page")
    state = run_flow(public_page, LOOKER)
    page = network.plan.folder / "buckets" / "pages" / PAGE_KEY
    assert str(state.message) == f"{page.stat().st_size:,} bytes as {PAGE_KEY} in bucket pages"
    page.unlink()


def test_a_validator_and_fewer_windows_can_be_asked_for(network, published, prefect_api):
    uid, evidences = published
    last = network.first_window + 3
    state = show(windows=1, validator=uid)
    assert state.message is not None
    assert state.message.startswith(f"evidence of uid {uid}: 1 of 1 windows, {last}: loss ")
    rows = json.loads(str(prefect_api.artifacts(state)[f"leaderboard-{LOOKER}"].data))
    assert rows == Leaderboard(evidences[-1:]).cells()
    unknown = show(validator=200)
    assert unknown.is_failed()
    assert "[not_registered] validator: uid 200 is no validator" in str(unknown.message)
    assert show(windows=0).is_failed()
