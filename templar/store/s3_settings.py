"""How a store talks to an S3 server, and where Cloudflare R2 is."""

from dataclasses import dataclass

from templar.store.address import is_account_id


@dataclass(frozen=True)
class S3Settings:
    """Timeouts, retries and sizes of one S3 store.

    Attributes:
        region: Region in the signature; `auto` is R2's only one.
        connect_timeout_seconds: For a connection to be made.
        read_timeout_seconds: For the server to send anything at all, at any moment.
        max_attempts: Tries of one request, the first included; the waits between them grow and carry jitter.
        slowest_bytes_per_second: A body that comes slower than this, `read_timeout_seconds` aside, is given up.
        pool_size: Connections kept open; calls beyond it pay for a new connection each.
        multipart_threshold_bytes: Files from this size on are moved in parts.
        part_bytes: Size of a part; S3 wants 5 MiB at least.
        concurrency: Parts moved at the same time; a transfer holds `concurrency * part_bytes` in memory at most.

    Raises:
        ValueError: A value is not positive.
    """

    region: str = "auto"
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 20.0
    max_attempts: int = 4
    slowest_bytes_per_second: float = 32_768.0
    pool_size: int = 32
    multipart_threshold_bytes: int = 32 << 20
    part_bytes: int = 16 << 20
    concurrency: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "region" and not value > 0:
                raise ValueError(f"S3Settings.{name} is {value}: it must be positive")


def r2_endpoint(account_id: str) -> str:
    """The endpoint of a Cloudflare R2 account.

    Raises:
        ValueError: The id has characters that could bend the URL.
    """
    if not is_account_id(account_id):
        raise ValueError(f"account id {account_id[:40]!r} is not made of lower-case letters, digits and inner hyphens")
    return f"https://{account_id}.r2.cloudflarestorage.com"
