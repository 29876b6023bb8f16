"""Miners and validators that are killed at random points leave what they would have left."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from templar.scoring.evidence import Evidence
from tests.support.facts import record_of
from tests.support.node_kills import AWAY_UID, AWAY_WINDOW, DECISIVE, NUM_WINDOWS, VICTIMS, reports_of
from tests.support.servers import random_key, start_rclone

KILLS = {"miner": (50, 100), "validator": (30, 50)}
"""How often each dies in CI, and in the long run."""


def runs():
    for role in VICTIMS:
        few, many = KILLS[role]
        yield pytest.param(role, few)
        yield pytest.param(role, many, marks=pytest.mark.long)


@contextmanager
def endpoint(folder):
    """An S3 endpoint of its own; the variables that name it."""
    buckets, key = folder / "buckets", random_key()
    buckets.mkdir(parents=True)
    server = start_rclone(buckets, key)
    try:
        secret = {"KEY_ID": key.access_key_id, "SECRET": key.secret_access_key}
        yield {"ENDPOINT": server.endpoint_url, "BUCKETS": str(buckets), **secret}
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("role", "num_kills"), runs())
def test_a_node_that_is_killed_leaves_what_it_would_have_left(folder, role, num_kills):
    """However often it dies in its windows: the same payloads or scores, each once and whole, weights and roots."""

    def lived(kills):
        with endpoint(folder / f"endpoint-{kills}") as variables:
            return reports_of(role, folder / f"{kills}-kills", kills, variables)

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
