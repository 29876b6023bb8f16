"""Checks of keys on servers that enforce them, with right and with wrong policies."""

from uuid import uuid4

import pytest

from deployments import s3_endpoint
from deployments.s3_endpoint import AccessKey
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import parse_key
from templar.housekeeping.access import Credential, Right, check_access
from templar.housekeeping.bucket_cleanup import PROBE_PREFIX
from templar.store.base import DeleteReport
from templar.store.directory import DirectoryStore
from templar.store.s3 import S3Store
from templar.store.s3_protocol import S3Settings
from tests.store.conftest import s3_store

READ = ("s3:GetObject", "s3:ListBucket")
WRITE = (*READ, "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads")
SETTINGS = S3Settings(read_timeout_seconds=10.0, max_attempts=1)


def credential(name, url, bucket, key, *, writes):
    return Credential(name, s3_store(bucket, url, key, SETTINGS), writes)


class Policies:
    """A bucket of the embedded endpoint, and keys with any rights."""

    def __init__(self, endpoint):
        self.admin = endpoint.admin
        self.bucket = uuid4().hex
        s3_endpoint._client(self.admin, "s3").create_bucket(Bucket=self.bucket)
        self.store = credential("admin", self.admin.endpoint_url, self.bucket, self.admin.key, writes=True).store

    def key(self, *actions):
        return s3_endpoint._create_key(self.admin, uuid4().hex, self.bucket, actions)

    def credential(self, *actions, writes):
        name = "write key" if writes else "read key"
        return credential(name, self.admin.endpoint_url, self.bucket, self.key(*actions), writes=writes)

    def check(self, read, write):
        url = self.admin.endpoint_url
        pairs = (("read key", read, False), ("write key", write, True))
        keys = [credential(name, url, self.bucket, key, writes=writes) for name, key, writes in pairs if key]
        return check_access([keys])

    def objects(self):
        return [info.key for info in self.store.list()]


@pytest.fixture
def policies(moto):
    return Policies(moto)


def reasons(report):
    return {str(reason) for reason, _ in report.problems}


def test_the_right_keys_are_right_and_nothing_stays(policies):
    policies.store.put("gradient", b"1")
    report = policies.check(policies.key(*READ), policies.key(*WRITE))
    assert report.problems == ()
    assert report.unknown == ()
    assert report.summary == "2 keys are as they should be"
    has = {(row.key, row.right): row.has for row in report.rows}
    assert {right: has["read key", right] for right in Right} == {
        Right.LIST: True,
        Right.HEAD: True,
        Right.GET: True,
        Right.PUT: False,
        Right.PARTS: False,
        Right.STAMPS: True,
        Right.DELETE: False,
    }
    assert all(has["write key", right] for right in Right)
    assert policies.objects() == ["gradient"]


def test_a_bucket_that_keeps_versions_is_found_out(policies):
    s3_endpoint._client(policies.admin, "s3").put_bucket_versioning(
        Bucket=policies.bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    report = policies.check(policies.key(*READ), policies.key(*WRITE))
    assert reasons(report) == {"time_unproven"}
    assert {(row.key, row.right) for row in report.rows if row.problem} == {
        ("read key", Right.STAMPS),
        ("write key", Right.STAMPS),
    }


def without(action):
    return tuple(each for each in WRITE if each != action)


@pytest.mark.parametrize(
    ("read", "write", "reason", "rights"),
    [
        ((*READ, "s3:PutObject"), WRITE, Reason.READ_KEY_WRITES, {Right.PUT, Right.PARTS}),
        ((*READ, "s3:DeleteObject"), WRITE, Reason.READ_KEY_WRITES, {Right.DELETE}),
        (("s3:GetObject",), WRITE, Reason.BUCKET_UNREADABLE, {Right.LIST}),
        (("s3:ListBucket",), WRITE, Reason.BUCKET_UNREADABLE, {Right.GET}),
        (READ, without("s3:GetObject"), Reason.WRITE_KEY_REFUSED, {Right.GET}),
        (READ, without("s3:ListBucket"), Reason.WRITE_KEY_REFUSED, {Right.LIST}),
        (READ, without("s3:PutObject"), Reason.WRITE_KEY_REFUSED, {Right.PUT, Right.PARTS}),
    ],
)
def test_a_key_with_a_right_too_much_or_too_few_is_found_out(policies, read, write, reason, rights):
    report = policies.check(policies.key(*read), policies.key(*write))
    assert reasons(report) == {reason}
    assert rights <= {row.right for row in report.rows if row.problem}
    assert f"[{reason}] " in report.summary
    assert policies.objects() == [], "what a read key wrote is removed by the write key"


def test_a_write_key_that_may_not_delete_leaves_what_it_wrote_and_says_so(policies):
    report = policies.check(policies.key(*READ), policies.key(*READ, "s3:PutObject"))
    assert reasons(report) == {"write_key_refused", "objects_left"}
    left = policies.objects()
    assert sorted(report.left) == [f"{policies.bucket}/{key}" for key in left]
    assert left
    assert all(key.startswith(PROBE_PREFIX) and parse_key(key) is None for key in left)


def test_a_wrong_secret_opens_nothing_and_is_shown_nowhere(policies):
    wrong = AccessKey(policies.key(*WRITE).access_key_id, "not-the-secret-of-this-key-at-all")
    report = policies.check(wrong, wrong)
    assert reasons(report) == {"bucket_unreadable", "write_key_refused"}
    assert "not-the-secret" not in report.summary + repr(report)


def test_a_bucket_that_is_not_there(moto):
    url, key = moto.admin.endpoint_url, moto.admin.key
    report = check_access([[credential("read key", url, "missing", key, writes=False)]])
    assert "bucket_unreadable" in reasons(report)
    assert "bucket_missing" in report.summary
    untold = {row.right for row in report.rows if row.has is None}
    assert untold == {Right.PUT, Right.PARTS, Right.DELETE}, "a bucket that is missing refuses nobody"


def test_only_a_refusal_proves_that_a_right_is_not_there(policies, monkeypatch):
    read = policies.credential(*READ, writes=False)
    write = policies.credential(*WRITE, writes=True)

    def answers_something_else(*_):
        raise PermanentError(Reason.STORE_REFUSED, "501 NotImplemented")

    for right in ("put", "put_in_parts", "delete"):
        monkeypatch.setattr(read.store, right, answers_something_else)
    report = check_access([[read, write]])
    assert report.problems == ()
    names = ("put", "multipart", "delete")
    assert report.unknown == tuple(f"read key: {name} (store_refused, which is not a refusal)" for name in names)


def test_a_delete_that_fails_for_another_reason_proves_nothing(policies, monkeypatch):
    read = policies.credential(*READ, writes=False)
    write = policies.credential(*WRITE, writes=True)

    def fails(keys):
        return DeleteReport((), tuple((key, "InternalError") for key in keys))

    monkeypatch.setattr(read.store, "delete", fails)
    assert [row.has for row in check_access([[read, write]]).rows if row.key == "read key"][-1] is None
    monkeypatch.setattr(read.store, "delete", lambda keys: DeleteReport(tuple(keys), ()))
    assert check_access([[read, write]]).unknown == ("read key: delete (the object is still there)",)


@pytest.mark.parametrize("answer", [False, PermanentError(Reason.STORE_REFUSED, "501")])
def test_what_publications_send_is_tried(policies, monkeypatch, answer):
    def refusing(*_):
        if isinstance(answer, PermanentError):
            raise answer
        return answer

    monkeypatch.setattr(S3Store, "put_if_absent", refusing)
    assert Reason.WRITE_KEY_REFUSED in reasons(policies.check(policies.key(*READ), policies.key(*WRITE)))


def test_without_a_write_key_an_existing_object_is_read(policies):
    report = policies.check(policies.key(*READ), None)
    assert report.problems == ()
    assert [row.right for row in report.rows if row.has is None] == [Right.GET, Right.STAMPS]
    policies.store.put("data", b"12")
    report = policies.check(policies.key(*READ), None)
    assert (report.problems, report.unknown) == ((), ())


def test_a_store_that_goes_away_is_no_verdict_and_what_was_written_is_removed(policies, monkeypatch):
    write = policies.credential(*WRITE, writes=True)

    def away(key, start, length):
        raise TransientError(Reason.STORE_UNREACHABLE, "away")

    monkeypatch.setattr(write.store, "get_range", away)
    with pytest.raises(TransientError):
        check_access([[write]])
    assert policies.objects() == []


def test_inconclusive_rights_are_reported(rclone):
    """A server whose read-only process answers a forbidden write with 500: that is no refusal, and it is said."""
    bucket = uuid4().hex
    (rclone.root / bucket).mkdir()
    keys = [
        credential("read key", rclone.read_only.endpoint_url, bucket, rclone.read_key, writes=False),
        credential("write key", rclone.writable.endpoint_url, bucket, rclone.write_key, writes=True),
    ]
    report = check_access([keys])
    assert report.problems == ()
    assert {row.right for row in report.rows if row.has is None} <= {*Right} - {Right.LIST, Right.HEAD, Right.GET}
    assert "read key: put (store_busy, which is not a refusal)" in report.unknown
    assert list(keys[1].store.list()) == []


def test_a_listing_that_breaks_off_removes_what_was_written(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)

    def fails(key):
        raise PermanentError(Reason.STOPPED, "stopped")

    monkeypatch.setattr(store, "head", fails)
    report = check_access([[Credential("write key", store, writes=True)]])
    assert reasons(report) == {"write_key_refused", "objects_left"}, "nobody can see that they are gone"
    assert list(store.list()) == []
