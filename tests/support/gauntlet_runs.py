"""Runs of the flow `gauntlet`, and what a server has of them."""

import asyncio
import json
from pathlib import Path
from typing import Any

from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact, State

from lab.gauntlet.flow import TABLE, gauntlet
from tests.support.prefect_server import RunningPrefectServer

COLUMNS = ["scenario", "rows", "uid", "what happens", "expected", "observed", "verdict"]


def run(**parameters: Any) -> State[Any]:
    told: Any = gauntlet(**parameters, return_state=True)
    return asyncio.run(told)


def artifacts(server: RunningPrefectServer, state: State[Any]) -> dict[str, Artifact]:
    """The artifacts of the run, by key."""
    run_id = state.state_details.flow_run_id
    assert run_id is not None
    with server.client() as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
        )
    return {str(artifact.key): artifact for artifact in found}


def verdicts(server: RunningPrefectServer, state: State[Any]) -> dict[str, dict[str, str]]:
    """The rows of the table artifact, by scenario."""
    rows = json.loads(str(artifacts(server, state)[TABLE].data))
    assert all(list(row) == COLUMNS for row in rows)
    return {row["scenario"]: row for row in rows}


def leftovers(folder: Path) -> list[str]:
    """What lies in the folder for temporary files that a gauntlet made."""
    return sorted(path.name for path in folder.glob("templar-gauntlet-*"))
