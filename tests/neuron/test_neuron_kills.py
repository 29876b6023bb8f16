from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.killing import reports_of
from tests.support.miner_kills import NUM_WINDOWS
from tests.support.servers import random_key, start_rclone

KILLS = 100


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
        calm, killed = pool.map(lived, [tmp_path / "calm", tmp_path / "killed"], [0, KILLS])
    assert sum(window["kills"] for window in killed) == KILLS
    assert sum(window["kills"] for window in calm) == 0
    assert len(calm) == NUM_WINDOWS
    for quiet, window in zip(calm, killed, strict=False):
        for field in ("manifest", "applied", "roots", "private"):
            assert window[field] == quiet[field], f"{field} of window {window['window']}"
    for window in killed:
        assert window["applied"] == [3]
        assert window["roots"][0] == window["roots"][1]
