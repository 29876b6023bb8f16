"""What a window shows in the UI is worth less than the window."""

import base64
import logging
import re

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.artifacts import picture, progress, table
from tests.support.prefect_server import RunningPrefectServer


@pytest.mark.filterwarnings("ignore:Artifact creation outside")
def test_without_a_server_the_step_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    nobody = {PREFECT_API_URL: "http://127.0.0.1:1/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(nobody), caplog.at_level(logging.WARNING, "templar"):
        table("gather-default", [], "nothing")
        progress("shards-default", "nothing")(50.0)
        picture("leaderboard-plot-default", b"<svg/>", "nothing")
    assert [record.message.partition(" is not shown")[0] for record in caplog.records] == [
        "the artifact gather-default",
        "the artifact shards-default",
        "the artifact leaderboard-plot-default",
    ]


@pytest.mark.filterwarnings("ignore:Artifact creation outside")
def test_a_picture_is_markdown_that_holds_it(prefect_api: RunningPrefectServer) -> None:
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg"><text>\xe2\x96\x88)</text></svg>'
    picture("drawn", drawing, "windows [1 to 3]")
    with prefect_api.client() as client:
        artifact = client.request("GET", "/artifacts/drawn/latest").json()
    assert (artifact["type"], artifact["description"]) == ("markdown", "windows [1 to 3]")
    found = re.fullmatch(r"!\[drawn\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", artifact["data"])
    assert found is not None
    assert base64.b64decode(found[1]) == drawing
