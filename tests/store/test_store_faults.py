"""For every answer of a server, a store returns or raises one of the project's errors, in bounded memory."""

import gc
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.store.base import Upload
from tests.store.conftest import KEY, QUICK, calls_of, s3_store
from tests.support.errors import error_of
from tests.support.scripted_server import Reply, scripted_server

HASTY = replace(QUICK, read_timeout_seconds=0.05, part_bytes=8, concurrency=1)
PATIENT = replace(HASTY, read_timeout_seconds=60.0)
LIMIT = 16 << 20
"""Memory that reading any answer may take; the long ones below have four times as many bytes."""


@pytest.fixture(scope="module")
def server():
    with scripted_server(lambda _: Reply()) as server:
        yield server


def calls_at(url, folder, limits=HASTY):
    """Every operation of a store, those on unfinished uploads too."""
    store = s3_store("bucket", url, KEY, limits)
    large = folder / "large"
    large.write_bytes(b"1" * 20)
    return calls_of(store, folder) | {
        "put_file in parts": lambda: store.put_file("key", large),
        "uploads": store.uploads,
        "abort": lambda: store.abort(Upload("key", "upload", 0.0, 0)),
        "put_in_parts": lambda: store.put_in_parts("key", b"1"),
    }


def xml(tag, content):
    return f"<{tag}>{content}</{tag}>".encode()


BOMB = b'<!DOCTYPE a [<!ENTITY b "%b">]><Error><Code>%b</Code></Error>' % (b"x" * 900, b"&b;" * 900)
BODIES = [
    b"",
    b"no xml",
    b"<html><body>Sorry</body></html>",
    BOMB,
    b'<?xml version="1.0" encoding="utf-7"?><Error/>',
    xml("Error", "<Code>Odd\nuid 7 was accepted\r\u202e\u009b31m</Code><Message>\n</Message>"),
    xml("Error", "<Code><Inner/></Code>"),
    xml("Error", "<Code>Twice</Code><Code>Twice</Code>"),
    xml("Other", "<Error>text</Error>"),
    b"<Error>" + b"<a>" * 3000 + b"</a>" * 3000 + b"</Error>",
    b"<a " + b" ".join(b'b%d=""' % number for number in range(2000)) + b"/>",
    xml("Error", "<Code>NoSuchKey</Code>"),
    xml("Error", "<Code>PermanentRedirect</Code><Endpoint>other.example</Endpoint><Bucket>b</Bucket>"),
    xml("ListBucketResult", "<IsTruncated>maybe</IsTruncated>"),
    xml("ListBucketResult", "<IsTruncated>true</IsTruncated><Contents/>"),
    xml(
        "ListBucketResult",
        "<IsTruncated>false</IsTruncated><Contents><Key>a\nb</Key><Size>x</Size><LastModified>never</LastModified>"
        "</Contents>",
    ),
    xml("InitiateMultipartUploadResult", "<UploadId></UploadId>"),
    xml("ListMultipartUploadsResult", "<IsTruncated>true</IsTruncated><Upload><Key>k</Key></Upload>"),
    xml("DeleteResult", "<Error><Code>a\nb</Code></Error>"),
]
HEADERS = [
    b"",
    b"Content-Length: 40\r\n",
    b"Content-Length: -5\r\n",
    b"Content-Length: 99999999999999999999999\r\n",
    b"Content-Length: many\r\n",
    b"Content-Length: 4\r\nLast-Modified: Fri, 20 Nov 2026 12:00:00 GMT\r\nContent-Range: bytes x-y/z\r\n",
    b"Content-Length: 4\r\nLast-Modified: Fri, 99 Nov 99999 12:00:00 GMT\r\nETag: \xff\xfe\r\n",
    b"Content-Length: 4\r\nLast-Modified: 99999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Location: /bucket/key\r\nx-amz-bucket-region: \xe2\x80\xae\r\n",
    b"Content-Type: text/\xff\r\nDate: never\r\n",
    b"x-amz-checksum-crc32: AAAA\r\nx-amz-checksum-sha256: x\r\n",
    b"".join(b"X-%d: 1\r\n" % number for number in range(150)),
    b"X-Long: " + b"a" * 70_000 + b"\r\n",
    b": \r\n\x00: x\r\n no name\r\n",
]
STATUSES = [200, 206, 204, 301, 307, 400, 403, 404, 412, 416, 429, 500, 503, 999]
STALLED = (500, b"Content-Length: 40\r\n", b"<Error>", True)
"""An error whose body does not arrive."""


def answer(status, headers, body):
    return b"HTTP/1.1 %d Odd\r\n%b\r\n%b" % (status, headers, body)


WHOLE = [answer(200, HEADERS[5], b"1234"), answer(503, b"Transfer-Encoding: chunked\r\n", b"7\r\n<Error>")]


def check(server, folder, reply, *, is_refusal):
    """Make every call and hold its outcome against the contract of `ObjectStore`."""
    server.script = lambda _: reply
    for name, call in calls_at(server.endpoint_url, folder).items():
        error = None
        try:
            call()
        except TemplarError as caught:
            error = caught
        assert str(error).isprintable(), (name, str(error))
        assert len(str(error)) < 1000
        assert error is None or isinstance(error, TransientError) or is_refusal, (name, error)
        assert not list(folder.glob("*.partial")), name


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(*map(st.sampled_from, (STATUSES, HEADERS, BODIES, (False, True)))))
@example(STALLED)
@example((403, b"", BODIES[5], False))
@example((500, b"", BODIES[6], False))
@example((400, b"", BODIES[8], False))
@example((500, b"", BODIES[9], False))
def test_no_exception_of_a_library_crosses_the_border(server, tmp_path, fault):
    status, headers, body, stalls = fault
    # Below 500 the server may say something final: a refusal, an object that is too long, a range that it ignores.
    is_refusal = status < 500 or status == 999
    check(server, tmp_path, Reply(raw=answer(status, headers, body), stalls=stalls), is_refusal=is_refusal)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(WHOLE), st.tuples(st.integers(0, 120), st.binary(max_size=3)), st.booleans())
@example(b"", (0, b""), False)
@example(b"HTTP/1.1 100 Continue\r\n\r\n" * 3, (80, b""), False)
@example(answer(200, b"Transfer-Encoding: chunked\r\n", b"-5\r\nabc\r\nzz\r\n"), (999, b""), True)
def test_damage_to_an_answer_is_one_of_the_projects_errors(server, tmp_path, raw, damage, stalls):
    place, put = damage
    damaged = raw[:place] + put + raw[place + len(put) :]
    check(server, tmp_path, Reply(raw=damaged, stalls=stalls), is_refusal=True)


def peak_of(call):
    """The error of a call, and how much memory it took."""
    gc.collect()
    tracemalloc.start()
    try:
        return error_of(call), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


LONG = 64 << 20
PADDED = b"<Error><Code>AccessDenied</Code><Message>" + b" " * LONG


@pytest.mark.parametrize(
    ("call", "status", "body", "reason"),
    [
        ("get", 403, PADDED, Reason.ACCESS_DENIED),
        ("get", 500, PADDED, Reason.STORE_BUSY),
        ("put", 403, PADDED, Reason.ACCESS_DENIED),
        ("put", 200, PADDED, Reason.STORE_BUSY),
        ("list", 403, PADDED, Reason.ACCESS_DENIED),
        ("list", 200, b"<ListBucketResult>" + b" " * LONG, Reason.STORE_BUSY),
        ("list", 200, b"<ListBucketResult>" + b"<a/>" * 900_000, Reason.STORE_BUSY),
        ("list", 200, BOMB, Reason.STORE_BUSY),
        ("delete", 200, b"<DeleteResult>" + b" " * LONG, Reason.STORE_BUSY),
    ],
)
def test_answers_and_errors_are_read_within_bounds(tmp_path, call, status, body, reason):
    reply = Reply(raw=answer(status, b"Content-Length: %d\r\n" % len(body), body))
    with scripted_server(lambda _: reply) as server:
        made = calls_at(server.endpoint_url, tmp_path, PATIENT)[call]
        with pytest.raises(TemplarError):  # boto3 is loaded, and the connection made
            made()
        error, peak = peak_of(made)
        if error.reason is Reason.STORE_UNREACHABLE:  # the connection of the first call closed as this one began
            error, peak = peak_of(made)
    assert error.reason is reason
    assert isinstance(error, PermanentError) == (reason is Reason.ACCESS_DENIED)
    assert peak < LIMIT


def test_a_page_of_the_longest_keys_is_listed(tmp_path):
    keys = [f"{number:04d}" + "k&" * 510 for number in range(1000)]
    entry = (
        "<Contents><Key>{}</Key><LastModified>2026-11-20T12:00:00.000Z</LastModified><ETag>&quot;{}&quot;</ETag>"
        "<Size>1</Size><StorageClass>STANDARD</StorageClass><Owner><ID>{}</ID><DisplayName>o</DisplayName></Owner>"
        "</Contents>"
    )
    entries = "".join(entry.format(key.replace("&", "&amp;"), "0" * 32, "1" * 64) for key in keys)
    page = xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{entries}")
    with scripted_server(lambda _: Reply(200, page)) as server:
        found = calls_at(server.endpoint_url, tmp_path, PATIENT)["list"]()
    assert isinstance(found, list)
    assert [info.key for info in found] == keys
