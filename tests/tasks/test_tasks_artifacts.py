"""What a window shows in the UI is worth less than the window."""

import logging

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.artifacts import progress, table


@pytest.mark.filterwarnings("ignore:Artifact creation outside")
def test_without_a_server_the_step_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    nobody = {PREFECT_API_URL: "http://127.0.0.1:1/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(nobody), caplog.at_level(logging.WARNING, "templar"):
        table("gather-default", [], "nothing")
        progress("shards-default", "nothing")(50.0)
    assert [record.message.partition(" is not shown")[0] for record in caplog.records] == [
        "the artifact gather-default",
        "the artifact shards-default",
    ]
