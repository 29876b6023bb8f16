"""Uploads that are damaged in transit are detected and sent again."""

import hashlib
import http.client
import math
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import pytest

from templar.errors import PermanentError, Reason, TransientError
from templar.store.s3 import S3Store
from tests.store.conftest import KEY, PART_BYTES, SETTINGS, place_on, s3_store
from tests.support.errors import raising
from tests.support.scripted_server import Reply, ScriptedServer, s3_error, scripted_server, serving

OWN_HEADERS = {"Transfer-Encoding", "Content-Length", "Date", "Server"}  # those that the proxy sets itself
DATA = b"a commitment, a manifest or a small payload"


class FaultyProxy(ScriptedServer):
    """Forwards to `upstream` under one address of its own; some requests it damages on the way, or denies."""

    def __init__(self, upstream):
        super().__init__(self._reply)
        self.upstream = upstream.removeprefix("http://")
        self.damage(0)
        self.num_faults, self.denies = 0, False
        self._lock = threading.Lock()

    def damage(self, count, path=""):
        """Flip a bit of the bodies of the next requests for paths with this in them, or deny them."""
        self._left, self._path = count, path

    def _reply(self, request):
        with self._lock:
            is_faulty = self._left > 0 and self._path in request.path
            self._left -= is_faulty
            self.num_faults += is_faulty
        if is_faulty and self.denies:
            return s3_error(403, "AccessDenied")
        body = bytes([request.body[0] ^ 1]) + request.body[1:] if is_faulty and request.body else request.body
        with closing(http.client.HTTPConnection(self.upstream, timeout=30)) as upstream:
            upstream.request(request.method, request.path, body, dict(request.headers))  # the signed Host among them
            answer = upstream.getresponse()
            data = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name not in OWN_HEADERS}
        return Reply(answer.status, data, headers, int(answer.getheader("Content-Length") or len(data)))


@dataclass(frozen=True)
class Way:
    """A store behind a proxy that damages, and the same bucket without it."""

    proxy: FaultyProxy
    store: S3Store
    behind: S3Store
    survives_a_damaged_part: bool


@pytest.fixture(params=["moto", "rclone"])
def way(request):
    place = place_on(request.param, request)
    with serving(FaultyProxy(place.url)) as proxy:
        store = s3_store(place.bucket, proxy.endpoint_url, place.key, replace(SETTINGS, max_attempts=3))
        yield Way(proxy, store, place.store(), place.kind == "moto")


def test_a_damaged_object_is_sent_again_within_bounds(way, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(DATA)
    puts: list[Callable[[str], object]] = [
        lambda key: way.store.put(key, DATA),
        lambda key: way.store.put_if_absent(key, DATA),
        lambda key: way.store.put_file(key, source),
    ]
    for number, put in enumerate(puts):
        key, before = f"key-{number}", way.proxy.num_faults
        way.proxy.damage(2)
        assert put(key) in (None, True)
        assert way.proxy.num_faults == before + 2
        assert way.behind.get(key, max_bytes=100) == DATA
        way.proxy.damage(math.inf)
        with raising(TransientError, Reason.STORE_BUSY):
            put(f"damaged-{number}")
        assert way.proxy.num_faults == before + 5


def test_a_damaged_part_is_sent_again(way, tmp_path):
    data = hashlib.shake_128(b"a large file").digest(2 * PART_BYTES + 12_345)
    (tmp_path / "source").write_bytes(data)
    way.proxy.damage(2, path="partNumber=2")
    if way.survives_a_damaged_part:
        way.store.put_file("key", tmp_path / "source")
        parts = [request.path.partition("partNumber=")[2][:1] for request in way.proxy.requests]
        assert sorted(filter(None, parts)) == ["1", "2", "2", "2", "3"]
    else:  # rclone may hang up on every later request for that part, and then the next call starts a new upload
        try:
            way.store.put_file("key", tmp_path / "source")
        except TransientError:
            assert way.behind.head("key") is None
            way.store.put_file("key", tmp_path / "source")
    assert way.behind.get("key", max_bytes=len(data)) == data


def test_an_etag_that_is_no_digest_says_nothing():
    etags = iter(['"not-a-digest"', '"0123456789abcdef0123456789abcdef-2"'])
    with scripted_server(lambda _: Reply(200, b"", {"ETag": next(etags)})) as server:
        for number in (1, 2):
            s3_store("bucket", server.endpoint_url, KEY).put("key", DATA)
            assert len(server.requests) == number


def test_a_page_is_stored_as_what_a_browser_shows():
    with scripted_server(lambda _: Reply(200, b"", {"ETag": '"not-a-digest"'})) as server:
        for key in ("index.html", "commit-1"):
            s3_store("bucket", server.endpoint_url, KEY).put(key, DATA)
        page, other = (request.headers for request in server.requests)
    assert (page["Content-Type"], page["Cache-Control"]) == ("text/html; charset=utf-8", "public, max-age=300")
    assert ("html" in str(other.get("Content-Type")), other.get("Cache-Control")) == (False, None)


def test_a_file_that_shrinks_while_it_is_sent_is_not_stored(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(bytes(30))
    settings = replace(SETTINGS, multipart_threshold_bytes=8, part_bytes=4, concurrency=1)
    methods: list[str] = []

    def script(request):
        methods.append(request.method)
        if "partNumber=" in request.path:
            source.write_bytes(bytes(10))
            return Reply(200, b"", {"ETag": f'"{hashlib.md5(request.body, usedforsecurity=False).hexdigest()}"'})
        return Reply(200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")

    with scripted_server(script) as server, raising(TransientError, Reason.LOCAL_FILE):
        s3_store("bucket", server.endpoint_url, KEY, settings).put_file("key", source)
    assert methods[-1] == "DELETE"


def test_a_denied_upload_is_not_repeated(way, tmp_path):
    (tmp_path / "source").write_bytes(bytes(2 * PART_BYTES))
    way.proxy.denies = True
    way.proxy.damage(math.inf, path="partNumber=")
    with raising(PermanentError, Reason.ACCESS_DENIED):
        way.store.put_file("key", tmp_path / "source")
    assert way.proxy.num_faults <= 2  # both parts were under way
