"""Every task makes its one call into the domain, hands back what that gives, and shows its rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect import Task

from tasks import clean_bucket as clean_module
from tasks import fetch_pages as fetch_module
from tasks import open_window as open_module
from tasks import publish_checkpoint as checkpoint_module
from tasks import rotate_shards as rotate_module
from tasks.apply import apply
from tasks.clean_bucket import clean_bucket
from tasks.commit import commit
from tasks.compress import compress
from tasks.decide import decide
from tasks.evaluate import evaluate
from tasks.fetch_pages import fetch_pages
from tasks.gather import gather
from tasks.host import hosting
from tasks.open_window import open_window
from tasks.publish_checkpoint import publish_checkpoint
from tasks.publish_evidence import publish_evidence
from tasks.publish_proof import publish_proof
from tasks.rate import rate, score_rows, score_summary
from tasks.rotate_shards import rotate_shards
from tasks.settle import settle, settle_and_publish
from tasks.states import not_run
from tasks.train import train
from tasks.update_peers import update_peers
from tasks.upload import upload
from templar.agreement.slots import Settlement
from templar.chain.base import NeuronInfo
from templar.data.replicas import EndpointReport
from templar.data.shards.rotation import RotationReport
from templar.errors import PermanentError, Reason
from templar.exchange.buckets import Buckets
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.exchange.objects import Manifest
from templar.exchange.peers import Selection
from templar.exchange.reveal import Submission
from templar.housekeeping.bucket_cleanup import CleanupReport, CleanupRow
from templar.hparams import load_hparams
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner, PageReport
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.scoring.conclude import conclude
from templar.window import Action, Opening
from tests.support.facts import AUTHOR, absent, revealed, standing_of, window_of
from tests.support.prefect_server import RunningPrefectServer
from tests.support.recording import recording_node

NAME = "recorded"
WINDOW = 7
SETTLEMENT = Settlement(WINDOW, None)
ANSWER = object()
HOTKEY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"


def submission(uid: int) -> Submission:
    manifest = Manifest(
        netuid=1,
        genesis="ab" * 32,
        uid=uid,
        hotkey=HOTKEY,
        window=WINDOW,
        payload_sha256="cd" * 32,
        payload_bytes=1234,
        assignment="ef" * 32,
        root_before="01" * 32,
    )
    return Submission(manifest, 1, 2, "0a" * 64, "0b" * 64)


REPORT = GatherReport(
    WINDOW,
    (
        PeerOutcome(3, Tier.GATHER, submission(3), None, "", 0.12345, num_bytes=2345),
        PeerOutcome(4, Tier.RESERVE, None, Reason.PAYLOAD_MISSING, "no payload", 1.0, num_bytes=655),
    ),
    seconds=1.5,
)


@pytest.mark.parametrize(
    ("task", "kind", "method", "arguments"),
    [
        (train, Miner, "train", (WINDOW,)),
        (compress, Miner, "compress", (WINDOW,)),
        (commit, Miner, "commit", (WINDOW,)),
        (upload, Miner, "upload", (WINDOW,)),
        (settle, Node, "settle", (WINDOW,)),
        (settle_and_publish, Aggregator, "settle_and_publish", (WINDOW, REPORT)),
        (settle_and_publish, Validator, "settle_and_publish", (WINDOW, REPORT)),
        (decide, Aggregator, "decide", (SETTLEMENT,)),
        (apply, Node, "apply", (SETTLEMENT,)),
        (evaluate, Validator, "evaluate", (REPORT, SETTLEMENT)),
        (publish_evidence, Validator, "publish_evidence", (None,)),
    ],
)
def test_a_task_makes_one_call(task: Task, kind: type[Node], method: str, arguments: tuple[Any, ...]) -> None:
    node, calls = recording_node(kind, **{method: ANSWER})
    with hosting(NAME, node):
        result = task.fn(NAME, *arguments)
    assert calls == [(method, *arguments)]
    assert result is (None if task is publish_evidence else ANSWER)


def page_report(*names: str) -> PageReport:
    """Pages from endpoints of these names; only one that is called `failed` has failed."""
    endpoints = (
        EndpointReport(name, 4, 1234, 0.12345, 2, Reason.ACCESS_DENIED, resting=True)
        if name == "failed"
        else EndpointReport(name, 4, 1234, 0.12345, 0, None, resting=False)
        for name in names
    )
    return PageReport(WINDOW, (1, 2), 8, "ef" * 32, tuple(endpoints))


@pytest.mark.parametrize("names", [(), ("one",)], ids=["unread", "one"])
def test_one_healthy_endpoint_is_not_worth_an_artifact(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    shown: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fetch_module, "table", lambda *arguments: shown.append(arguments))
    node, calls = recording_node(Miner, fetch_pages=page_report(*names))
    with hosting(NAME, node):
        assert fetch_pages.fn(NAME, WINDOW) == page_report(*names)
    assert calls == [("fetch_pages", WINDOW)]
    assert shown == []


@pytest.mark.parametrize(
    ("task", "kind", "arguments"),
    [
        (train, Validator, (WINDOW,)),
        (decide, Miner, (SETTLEMENT,)),
        (settle_and_publish, Miner, (WINDOW, REPORT)),
        (rate, Aggregator, (WINDOW, None)),
    ],
)
def test_a_neuron_of_another_role_is_refused(task: Task, kind: type[Node], arguments: tuple[Any, ...]) -> None:
    node, calls = recording_node(kind)
    with hosting(NAME, node), pytest.raises(PermanentError, match=rf"'{NAME}' is a Recording{kind.__name__}") as caught:
        task.fn(NAME, *arguments)
    assert caught.value.reason is Reason.BAD_ENVIRONMENT
    assert calls == []


def test_a_proof_is_published_and_the_window_stays_open() -> None:
    node, calls = recording_node(Node, publish_sync_proof=None, finish=None)
    with hosting(NAME, node):
        publish_proof.fn(NAME, WINDOW)
    assert calls == [("publish_sync_proof", WINDOW)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Miner, [("selection", WINDOW)]), (Validator, [("publish_peers", WINDOW), ("selection", WINDOW)])],
)
def test_only_a_validator_publishes_peers(kind: type[Node], expected: list[tuple[Any, ...]]) -> None:
    peers = tuple(NeuronInfo(uid, HOTKEY, 0.0, False, 0.0) for uid in (5, 3))
    node, calls = recording_node(kind, selection=Selection(peers, (), None), publish_peers=None)
    node.buckets = Buckets(cast(Any, None), cast(Any, None))  # a reader's: there is nothing to announce
    with hosting(NAME, node):
        assert update_peers.fn(NAME, WINDOW) == [5, 3]
    assert calls == expected


def test_opening_a_window_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    node, _ = recording_node(Node)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(open_module, "claim", lambda *arguments: calls.append(arguments))
    with hosting(NAME, node):
        open_window.fn(NAME, None)
        open_window.fn(NAME, 8)
    assert calls == [(node, None), (node, 8)]


@pytest.mark.parametrize(
    ("action", "name"), [(Action.SKIP, "Skipped"), (Action.CATCHING_UP, "CatchingUp")], ids=["skip", "catching up"]
)
def test_a_window_that_is_not_run_says_why(action: Action, name: str) -> None:
    state = not_run(Opening(WINDOW, action, Reason.WINDOW_PASSED, "the chain is in window 9"))
    assert state.is_completed()
    assert state.name == name
    assert state.message == "window 7 [window_passed] the chain is in window 9"


def rows_of(server: RunningPrefectServer, key: str) -> tuple[list[dict[str, Any]], str]:
    """Rows and description of the newest artifact with a key."""
    with server.client() as client:
        artifact = client.request("GET", f"/artifacts/{key}/latest").json()
    return json.loads(artifact["data"]), artifact["description"]


@pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow")
class TestArtifacts:
    """What the operator sees in the UI."""

    @pytest.mark.parametrize(
        ("kind", "method"), [(Miner, "gather"), (Validator, "gather_everybody")], ids=["miner", "validator"]
    )
    def test_gather_shows_every_peer(self, prefect_api: RunningPrefectServer, kind: type[Node], method: str) -> None:
        node, calls = recording_node(kind, **{method: REPORT})
        with hosting(NAME, node):
            assert gather.fn(NAME, WINDOW) is REPORT
        assert calls == [(method, WINDOW)]
        rows, description = rows_of(prefect_api, f"gather-{NAME}")
        assert description == "Window 7: 1 of 2 accepted, 1 payload_missing; 0.0 MB in 1.5 s."
        assert rows == [
            {"uid": 3, "tier": "gather", "accepted": True, "reason": "", "bytes": 2345, "seconds": 0.123},
            {
                "uid": 4,
                "tier": "reserve",
                "accepted": False,
                "reason": "payload_missing",
                "bytes": 655,
                "seconds": 1.0,
            },
        ]

    @pytest.mark.parametrize("names", [("one", "two"), ("failed",)], ids=["several", "one that failed"])
    def test_fetch_pages_shows_the_endpoints(self, prefect_api: RunningPrefectServer, names: tuple[str, ...]) -> None:
        report = page_report(*names)
        node, calls = recording_node(Miner, fetch_pages=report)
        with hosting(NAME, node):
            assert fetch_pages.fn(NAME, WINDOW) is report
        assert calls == [("fetch_pages", WINDOW)]
        rows, description = rows_of(prefect_api, f"dataset-{NAME}")
        assert description == "Window 7: what the endpoints of the dataset have done since the start."
        assert [row.pop("endpoint") for row in rows] == list(names)
        assert [row.pop("number") for row in rows] == list(range(1, len(names) + 1))
        well = {"reads": 4, "bytes": 1234, "seconds": 0.123, "failures": 0, "last failure": "", "resting": False}
        failed = {**well, "failures": 2, "last failure": "access_denied", "resting": True}
        assert rows == [failed if name == "failed" else well for name in names]

    def test_rate_shows_every_score_card(self, prefect_api: RunningPrefectServer) -> None:
        node, calls = recording_node(Validator, rate=EVIDENCE)
        with hosting(NAME, node):
            assert rate.fn(NAME, WINDOW, None) is EVIDENCE
        assert calls == [("rate", WINDOW, None)]
        rows, description = rows_of(prefect_api, f"scores-{NAME}")
        assert description == score_summary(EVIDENCE)
        assert rows == score_rows(EVIDENCE)

    def test_a_window_that_was_never_measured_shows_nothing(self, prefect_api: RunningPrefectServer) -> None:
        node, _ = recording_node(Validator, rate=None)
        with hosting("unmeasured", node):
            assert rate.fn("unmeasured", WINDOW, None) is None
        with prefect_api.client() as client, pytest.raises(Exception, match="404"):
            client.request("GET", "/artifacts/scores-unmeasured/latest")

    @pytest.mark.parametrize("dry_run", [True, False])
    def test_clean_up_shows_every_kind(
        self, prefect_api: RunningPrefectServer, monkeypatch: pytest.MonkeyPatch, dry_run: bool
    ) -> None:
        report = CleanupReport(
            WINDOW, (CleanupRow("gradient", found=3, num_bytes=900, deleted=2, failed=1),), (("key", "access_denied"),)
        )
        calls = with_block(monkeypatch, clean_module)

        def clean(context: object, *, dry_run: bool) -> CleanupReport:
            calls.append((context, dry_run))
            return report

        monkeypatch.setattr(clean_module.housekeeping, "clean_bucket", clean)
        assert clean_bucket.fn(NAME, dry_run) is report
        assert calls == [NAME, (CONTEXT, dry_run)]
        rows, description = rows_of(prefect_api, f"cleanup-{NAME}")
        counts = {"kind": "gradient", "found": 3, "kept": 0, "num_bytes": 900, "deleted": 2, "failed": 1}
        assert rows == [
            {**counts, "left": "", "answer": ""},
            {**dict.fromkeys(counts, ""), "kind": "not deleted", "left": "key", "answer": "access_denied"},
        ]
        assert (
            description
            == f"Window 7: what {'would be' if dry_run else 'was'} deleted; 1 failed, the first: key (access_denied)."
        )

    def test_an_empty_table_says_so(self, prefect_api: RunningPrefectServer) -> None:
        node, _ = recording_node(Miner, gather=replace(REPORT, outcomes=()))
        with hosting("alone", node):
            gather.fn("alone", WINDOW)
        assert rows_of(prefect_api, "gather-alone")[0] == [{"": "nothing"}]

    def test_rotation_shows_its_progress(
        self, prefect_api: RunningPrefectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        report = RotationReport((1,), 2, on_disk=(1, 2), fetched=(2,), num_bytes=10)
        calls = with_block(monkeypatch, rotate_module, home=str(tmp_path))

        def rotate(context: object, dataset: object, on_progress: Callable[[float], None]) -> RotationReport:
            calls.append((context, dataset))
            on_progress(62.5)
            return report

        monkeypatch.setattr(rotate_module.housekeeping, "rotate_shards", rotate)
        assert rotate_shards.fn(NAME) is report
        assert calls == [NAME, (CONTEXT, ("shards", CONTEXT.hparams, tmp_path))]
        with prefect_api.client() as client:
            artifact = client.request("GET", f"/artifacts/shards-{NAME}/latest").json()
        assert (artifact["type"], artifact["data"]) == ("progress", 62.5)


def test_pages_are_not_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = with_block(monkeypatch, rotate_module)
    monkeypatch.setattr(CONTEXT.hparams.data, "layout", "pages")
    assert rotate_shards.fn(NAME) == RotationReport(skipped=Reason.NO_SHARDS)
    assert calls == [NAME]


CONTEXT = SimpleNamespace(hparams=SimpleNamespace(data=SimpleNamespace(layout="shards")))


def with_block(monkeypatch: pytest.MonkeyPatch, module: Any, **fields: Any) -> list[Any]:
    """Let a task module find a block; the list that it returns has the name that was asked for."""
    calls: list[Any] = []
    dataset = SimpleNamespace(shards=lambda hparams, home: ("shards", hparams, home))
    block = SimpleNamespace(context=lambda name: CONTEXT, dataset=dataset, **fields)

    def load(name: str) -> Any:
        calls.append(name)
        return block

    monkeypatch.setattr(module, "load_block", load)
    return calls


def test_publishing_a_checkpoint_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = with_block(monkeypatch, checkpoint_module)
    monkeypatch.setattr(checkpoint_module, "publish_newest_checkpoint", lambda context: (context, "published"))
    assert publish_checkpoint.fn(NAME) == (CONTEXT, "published")
    assert calls == [NAME]


EVIDENCE = conclude(window_of(revealed(3), absent(4)), standing_of(), load_hparams("local"), AUTHOR)
