import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from templar.scoring.evidence import Evidence
from tests.support.killing import reports_of
from tests.support.validator_kills import AWAY_UID, AWAY_WINDOW, DECISIVE, NUM_WINDOWS

KILLS = 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_validator_that_is_killed_scores_as_it_would_have_scored(folder: Path) -> None:
    """However often it dies in its windows: each is in the score book once, with the same scores, weights and roots."""
    with ThreadPoolExecutor(2) as pool:
        calm, killed = pool.map(
            lambda kills: reports_of("validator_kills", folder / f"{kills}-kills", kills), [0, KILLS]
        )
    *calm_windows, calm_roots = calm
    *windows, roots = killed
    assert len(calm_windows) == len(windows) == NUM_WINDOWS
    assert not any(window["kills"] for window in calm_windows)
    kills = [kill for window in windows for kill in window["kills"]]
    assert len(kills) == KILLS
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
