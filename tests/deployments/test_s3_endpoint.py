import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from deployments.s3_endpoint import EndpointAdmin, create_bucket_with_keys
from templar.errors import PermanentError, Reason
from tests.support.errors import raising
from tests.support.servers import REPOSITORY, moto_endpoint, store_at


def denied(store):
    with pytest.raises(PermanentError) as caught:
        store.get("key", max_bytes=10)
    return caught.value.reason is Reason.ACCESS_DENIED


def test_a_key_opens_its_own_bucket_only(moto):
    first = create_bucket_with_keys(moto.admin, "first-bucket")
    second = create_bucket_with_keys(moto.admin, "second-bucket")
    store_at(moto.admin.endpoint_url, "first-bucket", first.write).put("key", b"1")
    assert store_at(moto.admin.endpoint_url, "first-bucket", first.read).get("key", max_bytes=1) == b"1"
    assert denied(store_at(moto.admin.endpoint_url, "first-bucket", second.write))
    assert denied(store_at(moto.admin.endpoint_url, "first-bucket", replace(first.read, secret_access_key="wrong")))
    assert denied(store_at(moto.admin.endpoint_url, "first-bucket", replace(first.read, access_key_id="AKIAWRONG")))


@pytest.mark.parametrize(
    ("method", "path", "authorization"),
    [
        ("PUT", "/new-bucket", None),
        ("GET", "/first-bucket/key", None),
        ("POST", "/moto-api/reset-auth", None),
        ("POST", "//moto-api/reset-auth", "AWS4-HMAC-SHA256 Credential="),
        ("GET", "/moto-api/data.json", "Basic YTpi"),
    ],
)
def test_without_a_key_nothing_is_answered(moto, method, path, authorization):
    request = urllib.request.Request(moto.admin.endpoint_url + path, data=b"inf", method=method)
    request.add_header("Content-Type", "text/plain")
    if authorization is not None:
        request.add_header("Authorization", authorization)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 403
    caught.value.close()


def test_only_the_administrator_makes_buckets(moto):
    keys = create_bucket_with_keys(moto.admin, "mere-owner")
    with raising(PermanentError, Reason.ACCESS_DENIED):
        create_bucket_with_keys(EndpointAdmin(moto.admin.endpoint_url, keys.write), "another")


def test_the_administrators_key_is_new_at_every_start_and_private(moto, tmp_path):
    with moto_endpoint(tmp_path) as other:
        admin_file = tmp_path / "admin.json"
        assert admin_file.stat().st_mode & 0o777 == 0o600
        assert json.loads(admin_file.read_text())["endpoint_url"] == other.admin.endpoint_url
        assert other.admin.key.secret_access_key != moto.admin.key.secret_access_key
        assert other.admin.key.secret_access_key not in repr(other.admin)
        with pytest.raises(PermanentError):
            create_bucket_with_keys(EndpointAdmin(other.admin.endpoint_url, moto.admin.key), "bucket")
        assert other.server.child.stop() == 0
        assert other.admin.key.secret_access_key not in other.server.child.log.read_text()


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "deployments.s3_endpoint", "--port", port]
        command += ["--admin-file", str(tmp_path / "admin.json")]
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "port_taken" in ended.stderr
    assert port in ended.stderr
    assert not (tmp_path / "admin.json").exists()
