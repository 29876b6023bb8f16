"""Failures of a store behind a network."""

import logging
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest
from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES, DEFAULT_S3_CONFIG_VARS

import templar.store.s3_client
from lab.gauntlet.endpoints import random_key
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.store.s3_client import Renewable, our_errors
from templar.store.s3_protocol import (
    ListingLimit,
    S3Settings,
    object_info,
    object_size,
    page,
    r2_endpoint,
    refusal,
    undeleted,
)
from tests.store.conftest import HEADERS, KEY, QUICK, calls_of, place_on, s3_store
from tests.support.errors import error_of, reason_of
from tests.support.scripted_server import Reply, s3_error, scripted_server
from tests.support.servers import paused

LISTING = "<ListBucketResult><IsTruncated>false</IsTruncated>{}</ListBucketResult>"

VARIABLES = [*BOTOCORE_DEFAUT_SESSION_VARIABLES.values(), *DEFAULT_S3_CONFIG_VARS.values()]
"""All that botocore reads of the machine."""

UNREACHABLE = (TransientError, Reason.STORE_UNREACHABLE)


def outcome_of(call):
    """The family and the reason of the error that a call raises."""
    error = error_of(call)
    return type(error), error.reason


def store_at(server, settings=QUICK):
    return s3_store("the-bucket", server.endpoint_url, KEY, settings)


class TestTrouble:
    """Errors of the server, seen from every method."""

    @pytest.mark.parametrize(
        ("status", "code", "num_requests", "family", "reason"),
        [
            (403, "AccessDenied", 11, PermanentError, Reason.ACCESS_DENIED),
            (503, "SlowDown", 22, TransientError, Reason.STORE_BUSY),
            (404, "NoSuchBucket", 14, PermanentError, Reason.BUCKET_MISSING),
        ],
    )
    def test_an_answer_has_its_reason(self, *, tmp_path, status, code, num_requests, family, reason):
        with scripted_server(lambda _: s3_error(status, code)) as server:
            calls = calls_of(store_at(server, replace(QUICK, max_attempts=2)), tmp_path)
            assert {outcome_of(call) for call in calls.values()} == {(family, reason)}
            assert len(server.requests) == num_requests  # a GET explains the 404 of a HEAD
        assert not list(tmp_path.glob("*.partial"))

    def test_a_denial_names_bucket_and_key_id_and_keeps_the_rest(self):
        message = f"{KEY.access_key_id} {KEY.secret_access_key}"
        with scripted_server(lambda _: s3_error(403, "SignatureDoesNotMatch", message)) as server:
            denial = error_of(lambda: store_at(server).get("the-key", max_bytes=1))
        for word in ("the-bucket", "the-key", "403", "SignatureDoesNotMatch", "ABCD..."):
            assert word in str(denial)
        assert "ABCDE" not in str(denial)
        assert KEY.secret_access_key not in str(denial)

    def test_nobody_listens(self, tmp_path):
        with scripted_server(lambda _: Reply()) as server:
            store = store_at(server)
        assert {outcome_of(call) for call in calls_of(store, tmp_path).values()} == {UNREACHABLE}

    def test_the_machines_aws_settings_do_not_count(self, monkeypatch, tmp_path):
        (tmp_path / "config").write_text("[default\nregion = eu\n")
        for file in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(file, str(tmp_path / "config"))
        for name in {
            each for _, names, *_ in VARIABLES for each in ([names] if isinstance(names, str) else names or ())
        }:
            if not name.endswith("_FILE"):
                monkeypatch.setenv(name, "nonsense")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"):
            monkeypatch.setenv(name, "another's")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setattr(templar.store.s3_client, "_session", None)
        with scripted_server(lambda _: Reply(headers=HEADERS)) as server:
            store_at(server).put("key", b"1")
            (request,) = server.requests
        assert f"Credential={KEY.access_key_id}/" in request.headers["Authorization"]
        assert "/auto/s3/" in request.headers["Authorization"]
        assert "another's" not in str(request.headers)

    def test_a_store_on_loopback_is_behind_no_proxy_and_another_one_behind_a_sound_one(self, monkeypatch):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        with scripted_server(lambda _: Reply(headers=HEADERS)) as server:
            store_at(server).put("key", b"1")
            monkeypatch.setenv("http_proxy", server.endpoint_url)
            s3_store("the-bucket", "http://store.invalid:9000", KEY, QUICK).put("key", b"1")
            elsewhere = replace(QUICK, region="eu-1", addressing="virtual")
            s3_store("the-bucket", "http://store.invalid:9000", KEY, elsewhere).put("key", b"1")
            assert "/eu-1/s3/" in server.requests[-1].headers["Authorization"]
            assert [request.path for request in server.requests] == [
                "/the-bucket/key",
                "http://store.invalid:9000/the-bucket/key",
                "http://the-bucket.store.invalid:9000/key",
            ]
        monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
        refused = error_of(lambda: s3_store("the-bucket", "http://store.invalid", KEY, QUICK).put("key", b"1"))
        assert (refused.reason, refused.message[:9]) == (Reason.BAD_ENVIRONMENT, "ALL_PROXY")

    @pytest.mark.parametrize(
        ("answers", "family", "reason"),
        [
            ("403 AccessDenied, 401 Unauthorized", PermanentError, Reason.ACCESS_DENIED),
            (
                "429 TooManyRequests, 500 InternalError, 502 BadGateway, 400 RequestTimeout, 400 BadDigest, "
                "409 OperationAborted, 404 NoSuchUpload, 403 RequestTimeTooSkewed",
                TransientError,
                Reason.STORE_BUSY,
            ),
            (
                "400 AuthorizationHeaderMalformed, 301 PermanentRedirect, 400 InvalidRequest, 501 NotImplemented, "
                "499 Other",
                PermanentError,
                Reason.STORE_REFUSED,
            ),
        ],
    )
    def test_a_code_has_its_reason(self, answers, family, reason):
        for status, code in (answer.split() for answer in answers.split(", ")):
            error = refusal(int(status), code, operation="PutObject", where="here", access_key_id="ABCDE")
            assert (type(error), error.reason) == (family, reason)


class TestAbsence:
    @pytest.mark.parametrize(
        ("head", "get", "reason"),
        [
            (Reply(404), s3_error(404, "NoSuchBucket"), Reason.BUCKET_MISSING),
            (Reply(404), s3_error(403, "AccessDenied"), Reason.ACCESS_DENIED),
            (Reply(404), Reply(404, b""), Reason.OBJECT_MISSING),
            (Reply(200, b"12345"), Reply(), Reason.STORE_BUSY),  # a HEAD without a time is no answer
        ],
        ids=["bucket", "denied", "unexplained", "no time"],
    )
    def test_a_head_that_settles_nothing_is_an_error(self, head, get, reason):
        with scripted_server(lambda request: head if request.method == "HEAD" else get) as server:
            assert reason_of(lambda: store_at(server).head("key")) is reason

    def test_an_object_that_appears_meanwhile_is_there(self):
        heads = iter([Reply(404), Reply(200, b"", HEADERS, declared_length=5)])

        def script(request):
            return next(heads) if request.method == "HEAD" else Reply(200, b"12345", HEADERS)

        with scripted_server(script) as server:
            info = store_at(server).head("key")
        assert info.size == 5


class Bucket:
    """A server with objects; `refusal` is its answer to a condition, however the key is."""

    def __init__(self, refusal):
        self.objects: dict[str, bytes] = {}
        self._refusal = refusal

    def __call__(self, request):
        if "If-None-Match" in request.headers:
            return self._refusal
        if request.method == "PUT":
            self.objects[request.path] = request.body
            return Reply(headers=HEADERS)
        if request.path in self.objects:
            return Reply(200, self.objects[request.path], HEADERS)
        return s3_error(404, "NoSuchKey")


class TestConditions:
    """A server that cannot take `If-None-Match`: docs/storage.md says that it is never relied upon."""

    @pytest.mark.parametrize(
        "refused",
        [
            s3_error(501, "NotImplemented"),
            s3_error(400, "InvalidArgument"),
            Reply(405, b"<html>Method Not Allowed</html>"),
            Reply(412, b"\xff not XML"),
            Reply(412),
            Reply(304),
            s3_error(417, "ExpectationFailed"),
        ],
    )
    def test_the_key_is_read_and_then_the_object_stored(self, refused):
        bucket = Bucket(refused)
        with scripted_server(bucket) as server:
            store = store_at(server)
            assert store.put_if_absent("key", b"one")
            assert not store.put_if_absent("key", b"two")
            assert bucket.objects == {"/the-bucket/key": b"one"}
            assert len(server.requests) <= 7

    def test_other_refusals_are_what_they_are(self):
        with scripted_server(Bucket(s3_error(503, "SlowDown"))) as server:
            busy = outcome_of(lambda: store_at(server).put_if_absent("key", b"1"))
            assert (busy, len(server.requests)) == ((TransientError, Reason.STORE_BUSY), 1)


class TestBodies:
    def test_a_body_over_the_limit_is_not_read(self):
        # The server has a terabyte to send and sends nothing: a reader that waited for it would time out.
        with scripted_server(lambda _: Reply(200, b"", HEADERS, declared_length=1 << 40)) as server:
            assert reason_of(lambda: store_at(server).get("key", max_bytes=1 << 30)) is Reason.OBJECT_TOO_LARGE

    def test_a_broken_body_is_asked_for_again_within_bounds(self):
        broken, whole = Reply(200, b"123", HEADERS, declared_length=5), Reply(200, b"12345", HEADERS)
        replies = iter([broken, whole, broken, broken])
        with scripted_server(lambda _: next(replies)) as server:
            store = store_at(server, replace(QUICK, max_attempts=2))
            assert store.get("key", max_bytes=5) == b"12345"
            assert len(server.requests) == 2
            error = error_of(lambda: store.get("key", max_bytes=5))
            assert len(server.requests) == 4
        assert (isinstance(error, TransientError), error.reason) == (True, Reason.STORE_UNREACHABLE)
        assert "3 of 5 bytes" in str(error)

    def test_a_connection_is_used_again_and_gzip_is_not_unpacked(self):
        ports = set()
        with scripted_server(lambda _: Reply(200, b"no gzip", {**HEADERS, "Content-Encoding": "gzip"})) as server:
            accept = server.get_request

            def get_request():
                connection, address = accept()
                ports.add(address)
                return connection, address

            server.get_request = get_request
            store = store_at(server)
            for _ in range(3):
                assert store.get("key", max_bytes=100) == b"no gzip"
        assert len(ports) == 1

    def test_a_body_that_drips_is_given_up(self):
        # Each byte comes long before the read timeout; all of them would take minutes.
        with scripted_server(lambda _: Reply(200, b"x" * 100_000, HEADERS, drips=True)) as server:
            store = store_at(server, replace(QUICK, read_timeout_seconds=1.0, slowest_bytes_per_second=1e6))
            slow = error_of(lambda: store.get("key", max_bytes=100_000))
        assert (isinstance(slow, TransientError), slow.reason) == (True, Reason.STORE_UNREACHABLE)
        assert "slower than" in str(slow)

    def test_a_server_that_ignores_ranges_is_refused(self):
        with scripted_server(lambda _: Reply(200, b"0123456789", HEADERS)) as server:
            store = store_at(server)
            assert reason_of(lambda: store.get_range("key", 0, 4)) is Reason.STORE_REFUSED
            assert reason_of(lambda: store.get_range("key", 5, 10)) is Reason.STORE_REFUSED
            assert store.get_range("key", 0, 10) == b"0123456789"


def ranged(data, etag):
    """A script that serves one object, with ranges."""

    def script(request):
        headers = {**HEADERS, "ETag": etag()}
        if "Range" not in request.headers:
            return Reply(200, data, headers)
        first, last = (int(number) for number in request.headers["Range"].removeprefix("bytes=").split("-"))
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return Reply(206, data[first : last + 1], headers)

    return script


class TestFiles:
    DATA = bytes(range(30))

    def test_a_small_file_is_one_request_and_a_large_one_is_read_in_parts_of_one_version(self, tmp_path):
        for data, methods in ((b"1234567", ["HEAD", "GET"]), (self.DATA, ["HEAD", *["GET"] * 8])):
            with scripted_server(ranged(data, lambda: '"one"')) as server:
                store_at(server).get_file("key", tmp_path / "copy", max_bytes=len(data))
                assert [request.method for request in server.requests] == methods
                assert all(request.headers["If-Match"] == '"one"' for request in server.requests[1:])
            assert (tmp_path / "copy").read_bytes() == data

    @pytest.mark.parametrize("honours_if_match", [False, True])
    def test_two_versions_are_never_mixed(self, tmp_path, honours_if_match):
        versions = iter(['"one"', '"one"', *['"two"'] * 20])
        serve = ranged(self.DATA, lambda: next(versions))

        def script(request):
            reply = serve(request)
            is_other = request.method == "GET" and reply.headers["ETag"] != request.headers["If-Match"]
            return s3_error(412, "PreconditionFailed") if is_other and honours_if_match else reply

        (tmp_path / "copy").write_bytes(b"what was there")
        with scripted_server(script) as server:
            mixed = outcome_of(lambda: store_at(server).get_file("key", tmp_path / "copy", max_bytes=30))
        assert mixed == (TransientError, Reason.OBJECT_DIFFERS)
        assert [path.name for path in tmp_path.iterdir()] == ["copy"]
        assert (tmp_path / "copy").read_bytes() == b"what was there"

    @pytest.mark.parametrize(("etag", "num_parts"), [('"one"', 3), ('"two"', 8)])
    def test_a_download_that_broke_off_goes_on_if_the_object_is_the_same(self, tmp_path, etag, num_parts):
        serve, copy = ranged(self.DATA, lambda: '"one"'), tmp_path / "copy"

        def broken(request):
            is_lost = request.headers.get("Range", "").startswith("bytes=20-")
            return replace(serve(request), body=b"", declared_length=4) if is_lost else serve(request)

        with scripted_server(broken) as server:
            fetch = partial(store_at(server, replace(QUICK, concurrency=1)).get_file, "key", copy, max_bytes=30)
            assert reason_of(partial(fetch, resume=True)) is Reason.STORE_UNREACHABLE
            assert not copy.exists()
            server.script, before = ranged(self.DATA, lambda: etag), len(server.requests)
            fetch(resume=True)
            assert len(server.requests) - before == 1 + num_parts
        assert copy.read_bytes() == self.DATA


class TestLists:
    def test_a_key_without_the_prefix_is_not_taken(self):
        entry = "<Contents><Key>{}</Key><Size>1</Size><LastModified>2026-11-20T12:00:00.999Z</LastModified></Contents>"
        body = LISTING.format(entry.format("commit-1") + entry.format("checkpoint-1"))
        with scripted_server(lambda _: Reply(200, body.encode())) as server:
            infos = list(store_at(server).list("commit-"))
        assert [(info.key, info.last_modified) for info in infos] == [("commit-1", 1795176000)]

    @pytest.mark.parametrize("per_page", [0, 3])
    def test_a_listing_without_end_is_given_up(self, per_page):
        entry = "<Contents><Key>{}</Key><Size>1</Size><LastModified>2026-11-20T12:00:00Z</LastModified></Contents>"
        page = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{}</NextContinuationToken>{}"

        def endless(request):
            number = len(server.requests)
            entries = "".join(entry.format(f"{number:06}-{each}") for each in range(per_page))
            return Reply(200, (page.format(number, entries) + "</ListBucketResult>").encode())

        with scripted_server(endless) as server:
            refused = error_of(lambda: list(store_at(server).list()))
            assert len(server.requests) < 200
        assert (type(refused), refused.reason) == (PermanentError, Reason.STORE_REFUSED)
        assert "bucket the-bucket: *: the listing has no end" in refused.message

    def test_a_listing_may_be_long_and_not_slow(self):
        for pages, entries, seconds, is_fine in ((99, 0, 3, True), (2000, 1000, 20, True), (40, 9, 20, False)):
            limit = ListingLimit("here")
            add = [lambda: limit.add(entries, seconds)] * pages  # noqa: B023 - called here
            if is_fine:
                [each() for each in add]
            else:
                assert reason_of(lambda: [each() for each in add]) is Reason.STORE_REFUSED  # noqa: B023

    def test_each_undeleted_key_is_reported_and_a_key_that_may_delete_nothing_is_denied(self):
        left = "<Error><Key>{}</Key><Code>{}</Code></Error>"
        body = left.format("a", "AccessDenied") + left.format("b", "InternalError") + left.format("c", "NoSuchKey")
        bodies = iter([body, left.format("a", "AccessDenied")])
        with scripted_server(lambda _: Reply(200, f"<DeleteResult>{next(bodies)}</DeleteResult>".encode())) as server:
            report = store_at(server).delete(["a", "b", "c", "d"])
            assert reason_of(lambda: store_at(server).delete(["a"])) is Reason.ACCESS_DENIED
        assert report.deleted == ("c", "d")
        assert report.failed == (("a", "AccessDenied"), ("b", "InternalError"))

    def test_keys_are_deleted_a_thousand_at_a_time(self):
        with scripted_server(lambda _: Reply(200, b"<DeleteResult></DeleteResult>")) as server:
            report = store_at(server).delete(f"key-{number}" for number in range(2001))
            assert [request.body.count(b"<Key>") for request in server.requests] == [1000, 1000, 1]
        assert len(report.deleted) == 2001


def test_a_server_that_hangs_is_given_up_and_taken_up_again(moto, request, tmp_path):
    place = place_on("moto", request)
    hasty = place.store(replace(QUICK, read_timeout_seconds=0.15))
    insistent = place.store(replace(QUICK, read_timeout_seconds=1.0, max_attempts=2))
    insistent.put("kept", b"1")
    with paused(moto.server):
        calls = calls_of(hasty, tmp_path)
        del calls["put"], calls["put_if_absent"]  # one way to put is enough: each waits for "100 Continue"
        assert {outcome_of(call) for call in calls.values()} == {UNREACHABLE}
        assert outcome_of(lambda: insistent.get("kept", max_bytes=1)) == UNREACHABLE
    assert place.store().head("kept") is not None  # it has woken up
    assert insistent.get("kept", max_bytes=1) == b"1"


def test_a_secret_is_nowhere_to_be_read(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    replies = [
        Reply(200, b"1", HEADERS),
        s3_error(403, "AccessDenied"),
        s3_error(503, "SlowDown"),
        Reply(200, b"<broken"),
    ]
    seen = []
    for reply in replies:
        with scripted_server(lambda _, reply=reply: reply) as server:
            store = store_at(server)
            seen.append(repr(store))
            for call in calls_of(store, tmp_path).values():
                try:
                    call()
                except TemplarError as error:
                    seen += [repr(error), str(error), repr(error.__cause__)]
    assert "the-bucket" in caplog.text
    assert all(KEY.secret_access_key not in text for text in [caplog.text, *seen])


@pytest.mark.parametrize(
    ("shown", "endpoint", "proven"),
    [
        ({"ETag": f'"{"a" * 32}"'}, "https://s3.test", True),
        ({"ETag": f'"{"a" * 32}-2"'}, "https://s3.test", False),
        ({"ETag": f"{'a' * 32}-1"}, r2_endpoint("0a" * 16), False),
        ({"VersionId": "null"}, "https://s3.test", True),
        ({"VersionId": "3/L4kqtJlcpXroDTDmJ"}, "https://s3.test", False),
        ({"VersionId": "7e4f9cabb0a1"}, r2_endpoint("0a" * 16), True),  # R2 shows ids and keeps no versions
        ({"VersionId": "7e4f9cabb0a1"}, "https://r2.cloudflarestorage.com.test", False),
    ],
)
def test_an_object_says_whether_its_time_may_be_older_than_its_bytes(shown, endpoint, *, proven):
    answer = {"LastModified": datetime(2026, 1, 1, tzinfo=UTC), **shown}
    assert object_info("key", 1, answer, endpoint_url=endpoint).is_time_unproven is not proven


def test_endpoints_and_settings_are_checked():
    assert r2_endpoint("0a" * 16) == f"https://{'0a' * 16}.r2.cloudflarestorage.com"
    for account in ("", "evil.example/", "a@b", "UPPER", "a" * 33, "two\nlines"):
        with pytest.raises(ValueError, match="account id"):
            r2_endpoint(account)
    for endpoint in ("", "127.0.0.1:9000", "ftp://host", "http://", "http://host/bucket", "http://host//"):
        with pytest.raises(ValueError, match="endpoint_url"):
            s3_store("bucket", endpoint, KEY)
    for name, value in (("max_attempts", 0), ("read_timeout_seconds", -1), ("slowest_bytes_per_second", float("nan"))):
        with pytest.raises(ValueError, match=name):
            S3Settings(**{name: value})


class Client:
    closed = 0

    def close(self):
        self.closed += 1


def test_only_the_thread_that_complains_first_renews_a_client():
    renewable = Renewable(Client)
    renewable.renew()
    old = renewable.get()
    assert renewable.get() is old
    renewable.renew(old)
    new = renewable.get()
    renewable.renew(old)
    assert renewable.get() is new is not old
    assert (old.closed, new.closed) == (1, 0)
    renewable.renew()
    renewable.renew()
    assert new.closed == 1
    assert renewable.get() is not new


def test_an_answer_that_makes_no_sense_is_asked_for_again():
    listing = {"Prefix": ""}
    lost = {"IsTruncated": True, "NextContinuationToken": "here"}

    def fail(error):
        with our_errors("bucket", access_key_id="abcdef"):
            raise error

    def delete():
        with our_errors("bucket", access_key_id="abcdef"):
            undeleted({"Errors": [{"Code": "InternalError"}]}, ["key"], where="bucket", access_key_id="abcdef")

    for call in (
        lambda: object_size({}, "bucket"),
        lambda: object_size({"ContentLength": -5}, "bucket"),
        lambda: page({"ResponseMetadata": {}}, "bucket", listing),  # would read as an empty bucket
        lambda: page({"IsTruncated": True}, "bucket", listing),
        lambda: page(lost, "bucket", {**listing, "ContinuationToken": "here"}),
        lambda: fail(ValueError("not a date")),
        lambda: fail(KeyError("Key")),
        delete,
    ):
        assert outcome_of(call) == (TransientError, Reason.STORE_BUSY)
    assert page({"IsTruncated": False}, "bucket", listing) == ((), None)
    assert page(lost, "bucket", listing) == ((), {"ContinuationToken": "here"})


def test_an_address_that_is_none_will_not_pass_by_itself():
    for url in ("http://host:notaport", "http://ho st", "https://-"):
        head = s3_store("bucket", url, random_key()).head
        assert outcome_of(partial(head, "key")) == (PermanentError, Reason.STORE_REFUSED)
