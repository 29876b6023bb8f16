"""The embedded S3 endpoint: a moto server on this machine that enforces credentials from its first request.

    python -m deployments.s3_endpoint --port 9000 --admin-file .templar/s3-admin.json

It listens on 127.0.0.1 only, keeps objects in memory, stops on SIGTERM, and prints one line once it listens. The
administrator's key is drawn at random at every start and written, for this user alone, to the admin file. Moto's own
control interface (`/moto-api`), which could switch the enforcement off again, is closed.
"""

import argparse
import json
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deployments.processes import write_private
from templar.errors import PermanentError, Reason, TemplarError
from templar.store.s3_client import make_client, our_errors
from templar.store.s3_protocol import S3Settings

HOST = "127.0.0.1"
ADMIN_NAME = "admin"
LISTENING = "listening on "  # beginning of the line that is printed once the endpoint listens; its URL follows
_READ_ACTIONS = ("s3:GetObject", "s3:ListBucket")
_WRITE_ACTIONS = (
    *_READ_ACTIONS,
    "s3:PutObject",
    "s3:DeleteObject",
    "s3:AbortMultipartUpload",
    "s3:ListMultipartUploadParts",
    "s3:ListBucketMultipartUploads",
)
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]  # a WSGI application
_SIGNATURE = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[^/\s]+/\d{8}/[\w-]+/(?:s3|iam)/aws4_request, ?"
    r"SignedHeaders=[\w;-]+, ?Signature=[0-9a-f]{64}"
)
_DENIED = b"<Error><Code>AccessDenied</Code></Error>"


@dataclass(frozen=True)
class AccessKey:
    """A key to the endpoint."""

    access_key_id: str
    secret_access_key: str = field(repr=False)


@dataclass(frozen=True)
class EndpointAdmin:
    """The endpoint and the key that may do everything on it."""

    endpoint_url: str
    key: AccessKey

    @classmethod
    def load(cls, path: Path) -> "EndpointAdmin":
        """Read what the endpoint wrote at its start."""
        data = json.loads(path.read_text())
        return cls(data["endpoint_url"], AccessKey(**data["key"]))

    def save(self, path: Path) -> None:
        """Write it so that only this user can read it, whole or not at all."""
        write_private(path, json.dumps(asdict(self)).encode())


@dataclass(frozen=True)
class BucketKeys:
    """A bucket of the endpoint and its two keys."""

    bucket: str
    read: AccessKey  # may get, head and list; the one to commit on chain
    write: AccessKey  # may put and delete as well; never leaves its owner


def create_bucket_with_keys(admin: EndpointAdmin, bucket: str) -> BucketKeys:
    """Make a bucket and the two keys to it, which open no other bucket; its keys are made once."""
    with our_errors(f"bucket {bucket} of {admin.endpoint_url}", access_key_id=admin.key.access_key_id):
        # S3 accepts the name of an own bucket again, IAM does not accept a user's name again: keys are made once.
        _client(admin, "s3").create_bucket(Bucket=bucket)
        read = _create_key(admin, f"{bucket}-read", bucket, _READ_ACTIONS)
        write = _create_key(admin, f"{bucket}-write", bucket, _WRITE_ACTIONS)
    return BucketKeys(bucket, read=read, write=write)


def bucket_names(admin: EndpointAdmin) -> list[str]:
    """The endpoint's buckets."""
    with our_errors(f"the buckets of {admin.endpoint_url}", access_key_id=admin.key.access_key_id):
        return [each["Name"] for each in _client(admin, "s3").list_buckets()["Buckets"]]


def serve(port: int, admin_file: Path) -> None:
    """Serve in the foreground until SIGTERM or SIGINT; port 0 takes a free one, and a taken one is `port_taken`."""
    # Imported here: making buckets needs neither moto's memory nor the `local` extra.
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app  # noqa: PLC0415
    from werkzeug.serving import make_server  # noqa: PLC0415

    # 1. Open the port, with credentials enforced before the server listens.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line per request
    application, key = _guarded(DomainDispatcherApplication(create_backend_app)), _enforce_credentials()
    try:
        server = make_server(HOST, port, application, threaded=True, request_handler=MotoRequestHandler)
    except (OSError, SystemExit):  # werkzeug turns a taken port into an exit
        raise PermanentError(Reason.PORT_TAKEN, f"port {port} of {HOST} is taken: choose another --port") from None
    admin = EndpointAdmin(f"http://{HOST}:{server.server_port}", key)
    admin.save(admin_file)
    # 2. Serve.
    try:  # a signal may follow on the heels of the message
        for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts what runs in its background deaf to the latter
            signal.signal(number, signal.default_int_handler)
        print(f"{LISTENING}{admin.endpoint_url}", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def _enforce_credentials() -> AccessKey:
    """Create the administrator and deny all other access, for this process and for good; the administrator's key."""
    from moto import settings  # noqa: PLC0415
    from moto.core.models import DEFAULT_ACCOUNT_ID  # noqa: PLC0415
    from moto.iam.models import iam_backends  # noqa: PLC0415

    iam = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
    iam.create_user("us-east-1", ADMIN_NAME)
    iam.put_user_policy(ADMIN_NAME, "all", _policy(["*"], ["*"]))
    key = iam.create_access_key(ADMIN_NAME)
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
    return AccessKey(key.access_key_id, key.secret_access_key)


def _guarded(application: Application) -> Application:
    """The application without its control interface, and closed to unsigned requests."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        is_control = environ.get("PATH_INFO", "").lstrip("/").startswith("moto-api")
        # Moto checks the signature itself, but fails on a header that is not a signature at all.
        if is_control or _SIGNATURE.fullmatch(environ.get("HTTP_AUTHORIZATION", "")) is None:
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(_DENIED)))]
            start_response("403 Forbidden", headers)
            return [_DENIED]
        return application(environ, start_response)

    return guarded


def _create_key(admin: EndpointAdmin, user: str, bucket: str, actions: Sequence[str]) -> AccessKey:
    iam = _client(admin, "iam")
    iam.create_user(UserName=user)
    resources = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    iam.put_user_policy(UserName=user, PolicyName="bucket", PolicyDocument=_policy(actions, resources))
    key = iam.create_access_key(UserName=user)["AccessKey"]
    return AccessKey(key["AccessKeyId"], key["SecretAccessKey"])


def _policy(actions: Sequence[str], resources: Sequence[str]) -> str:
    statement = {"Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _client(admin: EndpointAdmin, service: str) -> Any:
    return make_client(
        service,
        endpoint_url=admin.endpoint_url,
        access_key_id=admin.key.access_key_id,
        secret_access_key=admin.key.secret_access_key,
        settings=S3Settings(region="us-east-1"),
    )


def main() -> None:
    """Run the endpoint from the command line."""
    parser = argparse.ArgumentParser(description="Serve S3 on this machine, with enforced credentials.")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--admin-file", type=Path, required=True, help="where the administrator's key is written")
    options = parser.parse_args()
    try:
        serve(options.port, options.admin_file)
    except TemplarError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
