"""Miners and validators that are killed at random points leave what they would have left."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from templar.scoring.evidence import Evidence
from tests.support.facts import record_of
from tests.support.node_kills import AWAY_UID, AWAY_WINDOW, DECISIVE, NUM_WINDOWS, reports_of

KILLS = {"miner": (50, 100), "validator": (30, 50)}
"""How often each dies in CI, and in the long run."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("role", "num_kills"),
    [
        pytest.param(role, kills, marks=[pytest.mark.long] if kills == many else [])
        for role, (few, many) in KILLS.items()
        for kills in (few, many)
    ],
)
def test_a_node_that_is_killed_leaves_what_it_would_have_left(folder, role, num_kills):
    """However often it dies in its windows: the same payloads or scores, each once and whole, weights and roots."""

    def lived(kills):
        return reports_of(role, folder / f"{kills}-kills", kills)

    with ThreadPoolExecutor(2) as pool:
        (calm_windows, calm_roots), (windows, roots) = pool.map(lived, [0, num_kills])
    assert len(calm_windows) == len(windows) == NUM_WINDOWS
    assert not any(window["kills"] for window in calm_windows)
    kills = [kill for window in windows for kill in window["kills"]]
    assert len(kills) == num_kills
    assert {kill["step"] for kill in kills} >= {*DECISIVE[role]}
    assert {kill["entered"] for kill in kills} == {kill["applied"] for kill in kills} == {False, True}
    for calm, window in zip(calm_windows, windows, strict=True):
        for field in calm.keys() - {"kills"}:
            assert window[field] == calm[field], f"{field} of window {window['window']}"
    assert roots == calm_roots
    for window in windows:
        assert {each[window["window"] - 1] for each in roots.values()} == {window["root"]}
    if role == "miner":
        assert all(4 in window["applied"] for window in windows)
    else:
        evidence = Evidence.model_validate_json(json.dumps(windows[AWAY_WINDOW - 1]["evidence"]))
        assert record_of(evidence, AWAY_UID).slashes
