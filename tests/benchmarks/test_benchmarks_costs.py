"""What a role costs: counted requests grow along a line, sizes follow from the preset, and the owner pays."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import costs
from benchmarks.costs import AGGREGATOR, HOSTS, MINER, PRESETS, ROLES, VALIDATOR, Line, Sizes, bill, deviation, uploads
from benchmarks.costs_network import ITSELF, TINY, Amount, Item, Recorder, operation_of
from templar.exchange.object_keys import Kind, window_key
from templar.hparams import load_hparams
from templar.store.s3_protocol import S3Settings

ROOT = Path(costs.__file__).parents[1]
GRADIENT = Item(ITSELF, MINER, "put", "gradient", True)
READ_BACK = Item(ITSELF, MINER, "get", "gradient", True)
PEERS = Item(MINER, MINER, "get", "gradient", True)
PROOF = Item(ITSELF, MINER, "put", "proof", True)
LOOKED = Item(VALIDATOR, MINER, "head", "proof", False)


def counts(miners: int) -> dict[Item, Amount]:
    """Each miner puts a payload and reads it back, and reads those of all others; a validator looks twice at each."""
    pairs = miners * (miners - 1)
    return {
        GRADIENT: Amount(miners, 100.0 * miners, 0),
        READ_BACK: Amount(miners, 0, 100.0 * miners),
        PEERS: Amount(pairs, 0, 100.0 * pairs),
        PROOF: Amount(miners, 7.0 * miners, 0),
        LOOKED: Amount(2 * miners, 0, 0),
    }


@pytest.fixture
def line() -> Line:
    return Line({2: counts(2), 4: counts(4)})


def sizes(preset: str, miners: int) -> Sizes:
    return Sizes(preset, load_hparams(preset), miners)


def test_requests_grow_along_the_line_of_two_networks(line: Line) -> None:
    assert line.amount(PEERS, 30, role=MINER) == Amount(29, 0, 2900)
    assert line.amount(GRADIENT, 30, role=MINER) == Amount(1, 100, 0)
    assert line.total(PEERS, 30) == 30 * 29
    assert deviation(line, counts(6), 6) == 0
    apart = counts(6) | {PROOF: Amount(12, 0, 0)}
    assert deviation(line, apart, 6) == pytest.approx(6 / sum(each.requests for each in apart.values()))


def test_the_owner_of_a_bucket_pays_for_all_who_read_there(line: Line) -> None:
    """By hand: a payload in one request, a proof; it is read by 29 miners and looked at by the validator."""
    hparams = load_hparams("150M")
    found, payload = bill(line, sizes("150M", 30), MINER), sizes("150M", 30).payload
    backup = 4 * sizes("150M", 30).layout.dense_bytes
    housekeeping = 2 * 600 / 3600 + 600 / 600 + (2 + -(-backup // (16 << 20))) / 24
    assert found.class_a == pytest.approx(2 + housekeeping)
    assert found.class_b == 29 + 2  # a payload of this size is not read back
    assert found.stored_bytes == pytest.approx(100 * (payload + 7) + 2 * backup)
    assert found.received_bytes == pytest.approx(29 * payload)
    assert found.sent_bytes == pytest.approx(payload + 7 + backup / 24)
    per_month = 30 * 86_400 / hparams.windows.seconds
    requests = found.class_a * 4.5e-6 + found.class_b * 0.36e-6
    assert found.usd_per_month == pytest.approx(per_month * requests + found.stored_bytes / 1e9 * 0.015)


def test_a_member_fetches_no_more_payloads_than_the_peer_list_has(line: Line) -> None:
    thirty, hundred = (bill(line, sizes("150M", miners), MINER) for miners in (30, 100))
    assert hundred.received_bytes == thirty.received_bytes
    assert hundred.class_b == thirty.class_b + 70  # but each of the others reads this bucket


def test_a_small_payload_is_read_back(line: Line) -> None:
    found = bill(line, sizes("local", 4), MINER)
    assert found.class_b == 3 + 2 + 1


def test_large_objects_go_up_in_parts() -> None:
    limit, part = S3Settings().multipart_threshold_bytes, S3Settings().part_bytes
    assert [uploads(size) for size in (1, limit - 1, limit, limit + 1)] == [1, 1, 2 + limit // part, 3 + limit // part]


def test_the_hours_are_those_of_the_table_of_hosts() -> None:
    """docs/miner.md tells the seconds of a miner's training on its whole host."""
    page = (ROOT / "docs" / "miner.md").read_text(encoding="utf-8")
    for preset, (_, devices) in HOSTS.items():
        row = next(
            line for line in page.splitlines() if re.match(rf"\| `{preset}` \| [\d.]+ [MG] \| (one|eight)", line)
        )
        seconds = float(row.split("|")[5])
        assert sizes(preset, 30).gpu_hours(MINER) * 3600 / devices == pytest.approx(seconds, abs=0.5)


def test_a_validator_measures_every_miner_once_and_some_exactly() -> None:
    one, two = (sizes("150M", miners).gpu_hours(VALIDATOR) for miners in (60, 120))
    exact = 8 * 5 / 3  # miners, segments, and a third of a pass forward and back
    assert one / two == pytest.approx((60 + exact) / (120 + exact))
    assert sizes("150M", 60).gpu_hours(AGGREGATOR) == sizes("local", 60).gpu_hours(MINER) == 0


def test_the_page_tells_what_the_functions_give() -> None:
    """The columns that are derived; those with counted requests come from the command."""
    page = (ROOT / "docs" / "storage.md").read_text(encoding="utf-8").split("## What it costs", 1)[1]
    rows = re.findall(r"^\| `([\w.]+)` \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    assert {(preset, role) for preset, role, _ in rows} == {(preset, role) for preset in PRESETS for role in ROLES}
    for preset, role, cells in rows:
        *_, hours, _ = (cell.strip().replace(" ", "") for cell in cells.split("|"))
        expected = sizes(preset, 30).gpu_hours(role)
        assert hours == (f"{expected:.4f}" if expected else "-"), f"{preset} {role}"


def test_a_request_is_known_by_operation_and_kind() -> None:
    key = window_key(Kind.GRADIENT, 3, 7)
    for method, path, query, found in (
        ("PUT", f"/bucket/{key}", "", ("bucket", "put", "gradient")),
        ("HEAD", "/bucket/text/train/0.parquet", "", ("bucket", "head", "dataset")),
        ("GET", "/bucket", "list-type=2&prefix=lease", ("bucket", "list", "")),
        ("POST", "/bucket", "delete", ("bucket", "delete", "")),
    ):
        assert operation_of({"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}) == found
    parts = {"REQUEST_METHOD": "PUT", "PATH_INFO": f"/bucket/{key}", "QUERY_STRING": "partNumber=1&uploadId=x"}
    with pytest.raises(ValueError, match="came in parts"):
        operation_of(parts)


def test_a_request_is_recorded_with_its_time_and_bytes() -> None:
    recorder = Recorder(now=lambda: 5.0)

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("404 NOT FOUND" if "peers" in environ["PATH_INFO"] else "200 OK", [])
        return [b"four", b"five!"]

    counted = recorder.counting(application)
    for key, length in ((window_key(Kind.PROOF, 3, 7), "7"), ("peers_3_v1.json", "")):
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": f"/b/{key}", "QUERY_STRING": "", "CONTENT_LENGTH": length}
        assert b"".join(counted(environ, lambda *_: None)) == b"fourfive!"
    assert [(row[0], *row[3:]) for row in recorder.requests] == [
        (5.0, "proof", True, 7, 9),
        (5.0, "peers", False, 0, 9),
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_counted_network_keeps_what_requests_follow_from(preset: str) -> None:
    small, whole = load_hparams(preset, overrides=TINY), load_hparams(preset)
    for section in ("windows", "peers", "weights", "storage", "gradient"):
        assert getattr(small, section) == getattr(whole, section)
    assert replace(sizes(preset, 3), hparams=small).payload < 10_000


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_real_networks_are_counted() -> None:
    """In a process of its own: the endpoint's enforcement holds for a whole process, and for good."""
    command = [sys.executable, "-m", "benchmarks.costs", "--quick", "--miners", "5"]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures["holds"] is True
    miner = figures["presets"]["local"]["miner"]
    assert miner["class_a"] > 5  # commitment, manifest, payload, proof and debug values, each put once
    assert miner["class_b"] > miner["class_a"]
    assert (
        figures["presets"]["70B"]["aggregator"]["usd_per_month"]
        > figures["presets"]["1B"]["aggregator"]["usd_per_month"]
    )
