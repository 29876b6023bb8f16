"""Miners and validators that are killed at every step of a window leave what they would have left."""

import json

import pytest

from templar.scoring.evidence import Evidence
from tests.support import kill_points
from tests.support.facts import record_of

AWAY_UID = 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", kill_points.NODES)
def test_a_node_that_is_killed_leaves_what_it_would_have_left(folder, role):
    """The same payload or scores, each once and whole, the same weights and private state, and the same root."""
    left = kill_points.run(folder, role)
    assert left["died"] > 50
    assert {entered for entered, _ in left["found"]} == {applied for _, applied in left["found"]} == {False, True}
    for name, calm in left["calm"].items():
        assert left["killed"][name] == calm, name
    if role == "miner":
        assert 4 in left["killed"]["applied"]
    else:
        evidence = Evidence.model_validate_json(json.dumps(left["killed"]["evidence"]))
        assert record_of(evidence, AWAY_UID).slashes
