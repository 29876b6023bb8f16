"""The gauntlet on an endpoint: gates, endpoints, casting, judging, and the command."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.processes import ProcessIdentity
from deployments.s3_endpoint import AccessKey
from lab.adversary.judge import Expect, Verdict
from lab.gauntlet.casting import PRESET, Order, lineup_of
from lab.gauntlet.endpoints import endpoint
from lab.gauntlet.gate import Ask, Drip, Gates, Refusal
from lab.gauntlet.judging import Judging, measure_storm, with_silence
from lab.gauntlet.second import SecondProcess, Start, try_to_start
from lab.gauntlet.subset import AVAILABLE, BUCKET_RULES, LATE_OR_ABSENT, SUBSET, chosen, telling_reasons
from templar.errors import PermanentError, Reason, TransientError
from templar.hparams import load_hparams
from templar.store.s3_protocol import S3Settings
from templar.timeline import WindowTimes
from tests.support.errors import raising
from tests.support.operator import wait_until
from tests.support.servers import REPOSITORY, store_at

TELLING = {
    "pickle": "malformed",
    "index_twice": "bad_payload",
    "huge": "contribution",
    "copying": "commit_mismatch",
    "late": "reveal_late",
    "old_client": "wrong_network",
    "replaying": "wrong_window",
    "withheld": "bucket_unreadable",
    "retry_storm": "requests_per_second_failing",
    "one_hotkey": "already_running",
}
"""What the readers said of each attack, or what was measured."""
store = partial(store_at, settings=S3Settings(read_timeout_seconds=1.0, max_attempts=1))
PAYLOAD = b"payload " * 1000


@pytest.fixture(scope="module", params=["moto", "rclone"])
def serving(request, tmp_path_factory):
    with endpoint(request.param, tmp_path_factory.mktemp(request.param), num_buckets=10) as found:
        yield found


class TestEndpoints:
    def test_the_reading_key_reads_and_cannot_write(self, serving):
        keys, other = serving.make("keys"), serving.make("other")
        assert len({keys.read, keys.write, other.read, other.write}) == 4
        store(serving.writing, "keys", keys.write).put("object", PAYLOAD)
        reader = store(serving.reading, "keys", keys.read)
        assert reader.get("object", max_bytes=1 << 20) == PAYLOAD
        with pytest.raises((PermanentError, TransientError)):
            reader.put("object", b"other")
        assert reader.get("object", max_bytes=1 << 20) == PAYLOAD

    def test_a_foreign_key_is_refused(self, serving):
        serving.make("closed")
        with raising(PermanentError, Reason.ACCESS_DENIED):
            store(serving.reading, "closed", AccessKey("0" * 32, "1" * 64)).get("object", max_bytes=10)


class TestGates:
    """One real endpoint; each test makes its own bucket and its own gates."""

    def gates(self, serving, rule):
        """Doors at which some readers of any bucket meet something."""
        log: list[Ask] = []
        return Gates(serving.reading, serving.writing, lambda ask: rule.get(ask.who), log), log

    def test_a_request_passes_unchanged_and_is_logged(self, serving):
        keys, before = serving.make("passes"), time.time()
        gates, log = self.gates(serving, {})
        with closing(gates):
            store(gates.url("owner", writes=True), "passes", keys.write).put("an/object", PAYLOAD)
            reader = store(gates.url("reader", writes=False), "passes", keys.read)
            assert reader.get("an/object", max_bytes=1 << 20) == PAYLOAD
            assert reader.head("an/object") is not None
            assert reader.head("missing") is None
            assert [info.key for info in reader.list()] == ["an/object"]
        asks = [(ask.who, ask.method, ask.bucket, ask.key) for ask in log]
        assert asks[:2] == [("owner", "PUT", "passes", "an/object"), ("reader", "GET", "passes", "an/object")]
        assert asks[2:4] == [("reader", "HEAD", "passes", "an/object"), ("reader", "HEAD", "passes", "missing")]
        assert all(before <= ask.at <= time.time() for ask in log)

    def test_only_the_readers_of_the_rule_are_refused(self, serving):
        keys = serving.make("refuses")
        gates, _ = self.gates(serving, {"a": Refusal(403, "AccessDenied"), "b": Refusal(503, "ServiceUnavailable")})
        with closing(gates):
            store(gates.url("a", writes=True), "refuses", keys.write).put("object", PAYLOAD)  # writers pass
            for who, reason in (("a", Reason.ACCESS_DENIED), ("b", Reason.STORE_BUSY)):
                with pytest.raises((PermanentError, TransientError)) as caught:
                    store(gates.url(who, writes=False), "refuses", keys.read).get("object", max_bytes=1 << 20)
                assert caught.value.reason is reason  # type: ignore[attr-defined]
            other = store(gates.url("c", writes=False), "refuses", keys.read)
            assert other.get("object", max_bytes=1 << 20) == PAYLOAD

    def test_a_slow_body_is_given_up(self, serving):
        keys = serving.make("drips")
        gates, _ = self.gates(serving, {"slow": Drip(1024), "slower-end": Drip(len(PAYLOAD) * 100)})
        with closing(gates):
            store(gates.url("slow", writes=True), "drips", keys.write).put("object", PAYLOAD)
            with raising(TransientError, Reason.STORE_UNREACHABLE):
                store(gates.url("slow", writes=False), "drips", keys.read).get("object", max_bytes=1 << 20)
            whole = store(gates.url("slower-end", writes=False), "drips", keys.read)
            assert whole.get("object", max_bytes=1 << 20) == PAYLOAD  # drops are the body, in order


class TestSubset:
    def test_being_late_is_legal_and_proves_no_attack(self):
        assert AVAILABLE["pickle"].reasons == {Reason.MALFORMED} | LATE_OR_ABSENT
        assert telling_reasons("pickle") == {Reason.MALFORMED}
        assert telling_reasons("late") == {Reason.REVEAL_LATE}
        assert all(telling_reasons(name) for name in AVAILABLE if AVAILABLE[name].expect is Expect.REJECT)

    def test_a_withheld_bucket_answers_the_aggregator(self):
        ask = Ask("who", "bucket", "key", "GET", 0.0)
        readers: list[Any] = [SimpleNamespace(uid=uid) for uid in range(1, 5)]
        refused = Refusal(403, "AccessDenied")
        assert [BUCKET_RULES["withheld"](ask, reader) for reader in readers] == [None, refused, None, refused]


@pytest.mark.parametrize("miners", [1, 2])
def test_without_an_honest_miner_there_is_no_network(miners):
    with raising(PermanentError, Reason.BAD_PARAMETERS, match=f"miners: {miners} are too few for 2 attackers"):
        lineup_of(chosen(["late", "pickle"]), Order(miners=miners))


class TestStorm:
    def measure(self, calm, failing, *, who="node"):
        """Requests of one node, spread over two seconds at the edges of a calm window and of one that is not."""
        hparams = load_hparams(PRESET)
        edges = [WindowTimes(window, 100.0 * window, 100.0 * (window + 1), hparams.windows) for window in (1, 2)]
        asks = [
            Ask(who, bucket, "key", "GET", edges[place].close + 1 + number % 2 + 0.5)
            for place, count in enumerate((calm, failing))
            for number in range(2 * count)
            for bucket in (("bad", "good")[number // 2 % 2],)
        ]
        return measure_storm(asks, edges, num_calm=1, healthy={"node"}, failing={"bad"})

    def test_twice_as_many_are_legal_and_more_are_not(self):
        assert self.measure(10, 20).problems == ()
        assert self.measure(10, 20).measured["requests_per_second_failing"] == 20
        (problem,) = self.measure(10, 21).problems
        assert "21 requests in one second while a bucket fails, 2.1 times the 10" in problem


class TestVerdicts:
    """What this stage adds to the verdicts of `lab.adversary.judge`; each turns red."""

    def verdict(self, name, **observed):
        scenario = AVAILABLE[name]
        return Verdict(name, scenario.expect.value, 1, 2, 1, (), observed, 0, 0, 0, True, {}, ())

    def test_an_attack_that_no_reader_reports_fails(self):
        assert with_silence(AVAILABLE["pickle"], self.verdict("pickle", malformed=1, commit_missing=9)).passed
        silent = with_silence(AVAILABLE["pickle"], self.verdict("pickle", commit_missing=9))
        assert silent.problems == ("nobody ever said malformed",)

    @pytest.mark.parametrize(
        ("second", "words"),
        [
            (Start("already_running", "somebody runs it"), None),
            (Start("", "it started"), "it started"),
            (Start("local_file", "no disk"), "no disk"),
            (None, "it never came to its start"),
        ],
    )
    def test_a_second_process_must_be_refused_for_that_reason(self, second, words):
        judging = Judging(None, None, None, None, second, 1)  # type: ignore[arg-type]
        verdict = judging.with_second(AVAILABLE["one_hotkey"], self.verdict("one_hotkey"))
        assert verdict.problems == (() if words is None else (f"the second process was not refused: {words}",))

    @pytest.mark.parametrize(
        ("loading", "patience", "words"),
        [
            ((signal.pause, ()), 0.5, "no answer within 0.5 s"),
            ((os._exit, (3,)), 60.0, "the second process died with status 3"),
        ],
    )
    def test_a_second_process_that_gives_no_answer_was_not_refused(
        self, monkeypatch, tmp_path, loading, patience, words
    ):
        class Settings:
            def __reduce__(self):
                return loading  # what the second process calls to read them

        monkeypatch.setattr("lab.gauntlet.second.PATIENCE_SECONDS", patience)
        second: Any = SecondProcess(b"", tmp_path, tmp_path, Settings(), "", None, None)  # type: ignore[arg-type]
        assert try_to_start(second) == Start("", words)


class TestCommand:
    def command(self, *options):
        return [sys.executable, "-m", "lab.adversary", "--where", "s3", *options]

    def test_what_cannot_be_run_says_why_and_leaves_nothing(self, tmp_path):
        environment, options = os.environ | {"TMPDIR": str(tmp_path)}, ["--scenario", "clean_up"]
        answer = subprocess.run(
            self.command(*options), cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        assert (answer.returncode, answer.stdout) == (1, "")
        assert "[bad_parameters] scenarios: 'clean_up': it runs on simulated time only" in answer.stderr
        assert leftovers(tmp_path) == []

    @pytest.mark.slow
    def test_a_signal_takes_everything_down(self, tmp_path):
        process = subprocess.Popen(
            self.command("--scenario", "pickle"),
            cwd=REPOSITORY,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "starting moto" in process.stderr.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: children.read_text().split(), "the endpoint has started")
        identities = [ProcessIdentity.of(int(pid)) for pid in children.read_text().split()]
        process.terminate()
        assert process.stderr.read().splitlines()[-1] == "interrupted"
        process.stderr.close()
        assert process.wait(60) == 130
        assert identities
        wait_until(lambda: not any(identity and identity.alive for identity in identities), "the endpoint has ended")
        assert leftovers(tmp_path) == []

    @pytest.mark.long
    @pytest.mark.timeout(600)
    def test_the_named_subset(self, tmp_path):
        answer = subprocess.run(
            self.command(),
            cwd=REPOSITORY,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        report = json.loads(answer.stdout.splitlines()[-1])
        assert (answer.returncode, report["passed"]) == (0, True), (report, answer.stderr[-2000:])
        found = {verdict["scenario"]: verdict for verdict in report["verdicts"]}
        assert tuple(found) == SUBSET
        for scenario, reason in TELLING.items():
            assert reason in found[scenario]["observed"] | found[scenario]["measured"], scenario
        self.check_the_answers(answer.stderr)
        assert leftovers(tmp_path) == []

    def check_the_answers(self, said):
        """`templar why` was asked about each miner in each window, and every answer agrees with the evidence."""
        found = re.search(r"why: (\d+) of (\d+) answers agree with the evidence, the slowest took [\d.]+ s", said)
        assert found, said[-2000:]
        miners = 3 + len(SUBSET) - 1  # honest ones, and one of each scenario but the second process of one hotkey
        assert int(found[1]) == int(found[2]) >= 3 * (miners - 1)


def leftovers(folder):
    """What lies in the folder for temporary files that a gauntlet made."""
    return sorted(path.name for path in folder.glob("templar-gauntlet-*"))
