"""Reading a response body of known length: exactly that many bytes, and never slower than agreed."""

import time
from typing import Protocol

from urllib3.exceptions import HTTPError

from templar.errors import Reason, TransientError
from templar.store.s3_settings import S3Settings

BLOCK_BYTES = 1 << 18
"""Most bytes taken from the connection at once; between two blocks the speed is checked."""


class BrokenBodyError(TransientError):
    """The body of a response broke off, stalled or came too slowly: another request can help."""


class RawBody(Protocol):
    """The part of urllib3's response that is needed here; botocore's wrapper of it waits for whole blocks."""

    def read1(self, amt: int, decode_content: bool) -> bytes:
        """At most `amt` bytes, from at most one read of the socket; empty at the end."""
        ...


def read_body(raw: RawBody, buffer: memoryview, *, what: str, settings: S3Settings) -> None:
    """Read a body that is as long as a buffer, into that buffer.

    A socket timeout alone does not bound the time: a server that sends a byte now and then never meets it. So the
    whole body has a deadline, too.

    Args:
        raw: The response, positioned at the start of its body.
        buffer: Where it goes; the header was found to give the same length.
        what: Bucket and key, for the message.
        settings: The deadline is `read_timeout_seconds + length / slowest_bytes_per_second` after the start.

    Raises:
        BrokenBodyError: `store_unreachable`; fewer bytes came, or they came too slowly.
    """
    length, done = len(buffer), 0
    deadline = time.monotonic() + settings.read_timeout_seconds + length / settings.slowest_bytes_per_second
    while done < length:
        try:
            # Not decoded: what is stored as gzip must not unfold into more than its length.
            block = raw.read1(min(BLOCK_BYTES, length - done), decode_content=False)
        except (HTTPError, OSError) as error:
            raise BrokenBodyError(
                Reason.STORE_UNREACHABLE, f"{what}: connection lost after {done} of {length} bytes: {error}"
            ) from error
        if not block:
            raise BrokenBodyError(Reason.STORE_UNREACHABLE, f"{what}: body ended after {done} of {length} bytes")
        buffer[done : done + len(block)] = block
        done += len(block)
        if time.monotonic() > deadline and done < length:
            raise BrokenBodyError(
                Reason.STORE_UNREACHABLE,
                f"{what}: {done} of {length} bytes came slower than {settings.slowest_bytes_per_second} bytes/s",
            )
