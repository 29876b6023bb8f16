"""Artifacts: the rows of the tables, and a server that does not take them."""

import base64
import json
import logging
import re
from dataclasses import replace

import pytest
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import artifacts
from templar.data.replicas import EndpointReport
from templar.errors import Reason
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.exchange.objects import Manifest
from templar.exchange.reveal import Submission
from templar.housekeeping.bucket_cleanup import CleanupReport, CleanupRow
from templar.neuron.miner import PageReport, TrainReport
from templar.scoring.evidence import Estimate
from templar.training.device import TrainFigures
from tests.support.facts import (
    LOSS,
    WINDOW,
    absent,
    bucket,
    concluded,
    estimate,
    hotkey,
    measurement,
    revealed,
    standing_of,
    veteran,
)
from tests.support.scripted_server import Reply, scripted_server


def row_of(evidence, uid):
    return next(row for row in artifacts.score_rows(evidence) if row["uid"] == uid)


def test_who_has_most_comes_first_and_every_row_has_every_column():
    evidence = concluded(
        revealed(3, 0.1), revealed(4, 0.2), absent(5), standing=standing_of([veteran(3), veteran(4, final=30.0)])
    )
    rows = artifacts.score_rows(evidence)
    assert [row["uid"] for row in rows] == [4, 3, 5]
    assert all(list(row) == list(rows[0]) for row in rows)
    assert artifacts.score_summary(evidence) == (
        "Window 100: loss 4.0000; 2 of 3 miners measured, 2 earn, 1 punished. "
        f"The baseline is rated 25.00 ± {evidence.baseline_sigma:.2f}, "
        f"the typical advantage is {evidence.typical_advantage:.6f}, "
        f"the typical own excess {evidence.typical_own_excess:.6f}."
    )


def test_training_shows_device_speed_and_where_the_time_went():
    phases = {"forward": 1.0, "backward": 2.0, "step": 0.5, "other": 0.5}
    figures = TrainFigures("NVIDIA H100", "bfloat16", "the first", 8, 4096, 4.5, phases, 3 << 20, True, 0.4, 989e12)
    (row,) = artifacts.training_rows(TrainReport(7, None, 5.0, 4.0, 2, 16, figures))
    assert row == {
        "device": "NVIDIA H100",
        "precision": "bfloat16",
        "chosen": "the first",
        "steps": 2,
        "micro-batch": 8,
        "tokens": 4096,
        "seconds": 4.5,
        "tokens/s": 910.2,
        "MFU": "40.0% of 989 TFLOP/s, at 6 N + 12 * layers * hidden * length operations per token",
        "forward": "25.0%",
        "backward": "50.0%",
        "step": "12.5%",
        "other": "12.5%",
        "peak MiB": 3.0,
    }
    on_a_cpu = replace(figures, mfu=None, assumed_peak=None)
    assert artifacts.training_rows(TrainReport(7, None, figures=on_a_cpu))[0]["MFU"] == ""
    assert artifacts.training_rows(TrainReport(7, Reason.NO_TIME_LEFT)) == [{"reason": "no_time_left"}]


def test_shares_of_a_window():
    seconds = {"waiting": 45.0, "exchanging": 9.0, "training": 36.0, "other": 0.0}
    assert artifacts.time_rows(seconds) == [
        {"seconds": 90.0, "waiting": "50.0%", "exchanging": "10.0%", "training": "40.0%", "other": "0.0%"}
    ]
    assert artifacts.time_rows({}) == [{"seconds": 0}]


def test_a_miner_that_was_measured():
    facts = revealed(3, estimate=estimate(0.1, 0.25), measurement=measurement(0.11, 0.1), windows_behind=2)
    evidence = concluded(facts, revealed(4, 0.05), standing=standing_of([veteran(3)]))
    (record,) = (each for each in evidence.miners if each.uid == 3)
    card, (weight,) = record.after, (each.weight for each in evidence.weights if each.uid == 3)
    assert row_of(evidence, 3) == {
        "uid": 3,
        "weight": round(weight, 4),
        "final": f"{card.final:.4f} ({card.final - 20:+.4f})",
        "rating": f"{card.mu:.2f} ± {card.sigma:.2f}",
        "advantage": f"{card.advantage:+.6f}",
        "own excess": f"{card.own_excess:+.6f}",
        "indicator": f"{card.binary_average:.4f} (+1)",
        "sync": f"{card.sync:.4f} (2 behind)",
        "score": "+0.110000",
        "own loss": "4.0000 -1.000000",
        "random loss": "4.0000 -0.400000",
        "discount": "",
        "measured exactly": "4.0000 -0.440000",
        "slashes": "",
        "no payload": "",
    }


def test_losses_that_are_not_finite_say_so():
    nothing = Estimate(own_before=None, own_gain=None, random_before=LOSS, random_gain=None, expected=0.0)
    row = row_of(concluded(revealed(3, estimate=nothing, measurement=measurement(None, None, None))), 3)
    assert (row["own loss"], row["random loss"]) == ("not finite", "4.0000 not finite")
    assert row["measured exactly"] == "4.0000 not finite"
    assert (row["score"], row["slashes"]) == ("-1.000000", "invalid (non_finite_loss)")


def test_a_loss_that_rises_has_its_sign_and_several_penalties_stand_in_one_cell():
    row = row_of(concluded(revealed(3, -0.1, windows_behind=9, norm_ratio=1e9)), 3)
    assert row["random loss"] == "4.0000 +0.400000"
    assert row["slashes"] == "desync (desync), oversized (oversized)"


def test_a_miner_without_a_payload_says_why():
    without = (absent(3, Reason.PAYLOAD_MISSING), absent(4, Reason.MALFORMED), absent(5, None, assigned=False))
    evidence = concluded(*without, *(revealed(uid, 0.1) for uid in range(6, 16)))
    rows = {row["uid"]: row for row in artifacts.score_rows(evidence)}
    empty = ("score", "own loss", "random loss", "measured exactly")
    assert all(rows[uid][column] == "" for uid in (3, 4, 5) for column in empty)
    assert (rows[3]["slashes"], rows[3]["no payload"]) == ("missing (payload_missing)", "payload_missing")
    assert (rows[4]["slashes"], rows[4]["no payload"]) == ("invalid (malformed)", "malformed")
    assert (rows[5]["slashes"], rows[5]["no payload"]) == ("", "no slot")
    assert all(rows[uid]["weight"] == 0.0 for uid in (3, 4, 5))
    assert all("(" not in str(rows[uid]["indicator"]) + str(rows[uid]["sync"]) for uid in (3, 4, 5))


def test_a_banned_miner_says_until_when():
    banned = standing_of([veteran(3)], bans={hotkey(3): WINDOW + 5, bucket(4): WINDOW + 7})
    evidence = concluded(absent(3, Reason.BANNED), absent(4, Reason.BANNED), standing=banned)
    rows = {row["uid"]: row for row in artifacts.score_rows(evidence)}
    assert rows[3]["no payload"] == f"banned, banned until window {WINDOW + 5}"
    assert rows[4]["no payload"] == f"banned, banned until window {WINDOW + 7}"
    assert rows[3]["slashes"] == "banned (banned)"
    assert rows[3]["weight"] == 0.0


def test_what_is_burned_earns_nobody():
    """The uid that burns has a weight and is no miner."""
    evidence = concluded(absent(3), loss=None)
    assert artifacts.score_summary(evidence) == (
        "Window 100: nothing was measured; 0 of 1 miners measured, 0 earn, 1 punished. "
        "The baseline is rated 25.00 ± 8.33, the typical advantage is 0.000000, the typical own excess 0.000000."
    )
    assert [(record.uid, record.weight) for record in evidence.weights] == [(0, 1.0)]
    assert [row["uid"] for row in artifacts.score_rows(evidence)] == [3]


def test_every_gathered_peer_has_a_row():
    submission = Submission(
        Manifest.model_construct(payload_bytes=1234, steps=30, tokens=61_440), 1, 2, "0a" * 64, "0b" * 64
    )
    outcomes = (
        PeerOutcome(3, Tier.GATHER, submission, None, "", 0.12345, num_bytes=2345),
        PeerOutcome(4, Tier.RESERVE, None, Reason.PAYLOAD_MISSING, "no payload", 1.0, num_bytes=655),
    )
    columns = ("uid", "tier", "accepted", "reason", "bytes", "seconds", "steps", "tokens")
    assert [tuple(row) for row in artifacts.gather_rows(GatherReport(WINDOW, outcomes))] == [columns, columns]
    assert [tuple(row.values()) for row in artifacts.gather_rows(GatherReport(WINDOW, outcomes))] == [
        (3, "gather", True, "", 2345, 0.123, 30, 61_440),
        (4, "reserve", False, "payload_missing", 655, 1.0, "", ""),
    ]


def test_every_endpoint_of_the_dataset_has_a_numbered_row():
    well = EndpointReport("same", 4, 1234, 0.12345, 0, None, resting=False)
    failed = EndpointReport("same", 5, 1234, 0.12345, 2, Reason.ACCESS_DENIED, resting=True)
    rows = artifacts.endpoint_rows(PageReport(WINDOW, (1, 2), 8, "ef" * 32, (well, failed)))
    assert [tuple(row.values()) for row in rows] == [
        (1, "same", 4, 1234, 0.123, 0, "", False),
        (2, "same", 5, 1234, 0.123, 2, "access_denied", True),
    ]


def test_objects_that_could_not_be_deleted_follow_the_counts():
    counts = CleanupRow("gradient", found=3, num_bytes=900, deleted=2, failed=1)
    kind = {"kind": "gradient", "found": 3, "kept": 0, "num_bytes": 900, "deleted": 2, "failed": 1}
    assert artifacts.cleanup_rows(CleanupReport(WINDOW, (counts,), ())) == [kind]
    assert artifacts.cleanup_rows(CleanupReport(WINDOW, (counts,), (("key", "access_denied"),))) == [
        {**kind, "left": "", "answer": ""},
        {**dict.fromkeys(kind, ""), "kind": "not deleted", "left": "key", "answer": "access_denied"},
    ]


@pytest.mark.filterwarnings("ignore:Artifact creation outside")
def test_an_empty_table_says_so_and_a_picture_is_markdown_that_holds_it(prefect_api):
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg"><text>\xe2\x96\x88)</text></svg>'
    artifacts.table("empty", [], "Window 7")
    artifacts.picture("drawn", drawing, "windows [1 to 3]")
    with prefect_api.client() as client:
        table, picture = (client.request("GET", f"/artifacts/{key}/latest").json() for key in ("empty", "drawn"))
    assert (json.loads(table["data"]), table["description"]) == ([{"": "nothing"}], "Window 7")
    assert (picture["type"], picture["description"]) == ("markdown", "windows [1 to 3]")
    found = re.fullmatch(r"!\[drawn\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", picture["data"])
    assert found is not None
    assert base64.b64decode(found[1]) == drawing


@pytest.mark.filterwarnings("ignore:Artifact creation outside")
def test_without_a_server_the_step_goes_on(caplog):
    caplog.set_level(logging.WARNING, "templar")
    with (
        scripted_server(lambda request: Reply(raw=b"")) as server,  # it hangs up
        temporary_settings({PREFECT_API_URL: f"{server.endpoint_url}/api"}),
    ):
        artifacts.table("gather-default", [], "nothing")
        artifacts.progress("shards-default", "nothing")(50.0)
        artifacts.picture("leaderboard-plot-default", b"<svg/>", "nothing")
        assert artifacts.page("glance-default", [b"<svg/>"], "nothing") is None
        assert len(server.requests) == 4, "with retries, a window would wait for minutes"
    assert [record.message.partition(" is not shown")[0] for record in caplog.records] == [
        "gather-default",
        "shards-default",
        "leaderboard-plot-default",
        "glance-default",
    ]


def test_a_page_keeps_its_id_when_its_content_is_replaced(prefect_api):
    first = artifacts.page("paged", [], "nothing yet")
    rows = [{"figure": "loss", "value": "a|b\n![x](https://evil <b>"}, {"figure": "step", "value": 3}]
    assert (
        artifacts.page("paged", [b"<svg/>", b"<svg />"], "window 7", [rows, []])
        == first
        != artifacts.page("paged-too", [], "another")
    )
    assert artifacts.page("paged", [], "nothing yet", replace=False) == first
    with prefect_api.client() as client:
        history = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["paged"])))
        latest = client.request("GET", "/artifacts/paged/latest").json()
    assert [(each.id, each.data) for each in history] == [(first, latest["data"])]
    *drawings, table_part = latest["data"].split("\n\n")
    assert drawings == [f"![paged](data:image/svg+xml;base64,{text})" for text in ("PHN2Zy8+", "PHN2ZyAvPg==")]
    assert latest["description"] == "window 7"
    loss = r"a/b \!\[x\](https\://evil \<b>"
    assert table_part == f"| figure | value |\n| --- | --- |\n| loss | {loss} |\n| step | 3 |"
