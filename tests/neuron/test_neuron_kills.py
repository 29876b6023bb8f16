"""Miners and validators that are killed at random points publish what they would have published."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from templar.scoring.evidence import Evidence
from tests.support import miner_kills
from tests.support.killing import reports_of
from tests.support.servers import random_key, start_rclone
from tests.support.validator_kills import AWAY_UID, AWAY_WINDOW, DECISIVE, NUM_WINDOWS

MINER_KILLS, VALIDATOR_KILLS = 100, 50


def lived(folder: Path, kills: int) -> list[dict[str, Any]]:
    """The windows of a network whose miner is killed so many times, on an endpoint of its own."""
    buckets, key = folder / "buckets", random_key()
    buckets.mkdir(parents=True)
    server = start_rclone(buckets, key)
    try:
        environment = {
            "ENDPOINT": server.endpoint_url,
            "KEY_ID": key.access_key_id,
            "SECRET": key.secret_access_key,
            "BUCKETS": str(buckets),
        }
        return reports_of("miner_kills", folder / "network", kills, environment)
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_miner_that_is_killed_publishes_what_it_would_have_published(tmp_path: Path) -> None:
    """However often it dies between compression and reveal: one payload per window, whole, and the network goes on."""
    with ThreadPoolExecutor(2) as pool:
        calm, killed = pool.map(lived, [tmp_path / "calm", tmp_path / "killed"], [0, MINER_KILLS])
    assert sum(window["kills"] for window in killed) == MINER_KILLS
    assert sum(window["kills"] for window in calm) == 0
    assert len(calm) == miner_kills.NUM_WINDOWS
    for quiet, window in zip(calm, killed, strict=False):
        for field in ("manifest", "applied", "roots", "private"):
            assert window[field] == quiet[field], f"{field} of window {window['window']}"
    for window in killed:
        assert window["applied"] == [3]
        assert window["roots"][0] == window["roots"][1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_validator_that_is_killed_scores_as_it_would_have_scored(folder: Path) -> None:
    """However often it dies in its windows: each is in the score book once, with the same scores, weights and roots."""
    with ThreadPoolExecutor(2) as pool:
        calm, killed = pool.map(
            lambda kills: reports_of("validator_kills", folder / f"{kills}-kills", kills), [0, VALIDATOR_KILLS]
        )
    *calm_windows, calm_roots = calm
    *windows, roots = killed
    assert len(calm_windows) == len(windows) == NUM_WINDOWS
    assert not any(window["kills"] for window in calm_windows)
    kills = [kill for window in windows for kill in window["kills"]]
    assert len(kills) == VALIDATOR_KILLS
    assert {kill["step"] for kill in kills} >= {*DECISIVE}
    assert {kill["rated"] for kill in kills} == {kill["applied"] for kill in kills} == {False, True}
    for calm_window, window in zip(calm_windows, windows, strict=True):
        for field in calm_window.keys() - {"kills"}:
            assert window[field] == calm_window[field], f"{field} of window {window['window']}"
    assert roots == calm_roots
    for window in windows:
        assert {each[window["window"] - 1] for each in roots.values()} == {window["root"]}
    evidence = Evidence.model_validate_json(json.dumps(windows[AWAY_WINDOW - 1]["evidence"]))
    assert any(record.slashes for record in evidence.miners if record.uid == AWAY_UID)
