"""Reading a response body of known length: exactly that many bytes, and never slower than agreed."""

import io
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from urllib3.exceptions import HTTPError

from templar.errors import Reason, TransientError
from templar.store.deadline import check_deadline
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


def read_body(raw: RawBody, length: int, *, what: str, settings: S3Settings) -> Iterator[bytes]:
    """Read a body of known length, block by block.

    A socket timeout alone does not bound the time: a server that sends a byte now and then never meets it. So the
    whole body has a deadline, too, and ends at that of the thread if it has one (see `templar.store.deadline`).

    Args:
        raw: The response, positioned at the start of its body.
        length: What the header says.
        what: Bucket and key, for the message.
        settings: The deadline is `read_timeout_seconds + length / slowest_bytes_per_second` after the start.

    Raises:
        BrokenBodyError: `store_unreachable`; fewer bytes came, or they came too slowly.
        TransientError: `too_slow`; the thread's deadline has come.
    """
    done = 0
    deadline = time.monotonic() + settings.read_timeout_seconds + length / settings.slowest_bytes_per_second
    while done < length:
        check_deadline(what)
        try:
            # Not decoded: what is stored as gzip must not unfold into more than its length.
            block = raw.read1(min(BLOCK_BYTES, length - done), decode_content=False)
        except (HTTPError, OSError) as error:
            raise BrokenBodyError(
                Reason.STORE_UNREACHABLE, f"{what}: connection lost after {done} of {length} bytes: {error}"
            ) from error
        if not block:
            raise BrokenBodyError(Reason.STORE_UNREACHABLE, f"{what}: body ended after {done} of {length} bytes")
        done += len(block)
        yield block
        if time.monotonic() > deadline and done < length:
            raise BrokenBodyError(
                Reason.STORE_UNREACHABLE,
                f"{what}: {done} of {length} bytes came slower than {settings.slowest_bytes_per_second} bytes/s",
            )


def joined(length: int, blocks: Iterable[bytes]) -> bytes:
    """Blocks of so many bytes in all as one string, which is in memory once and not twice.

    There is room for all of it once a good deal has come: whoever sends next to nothing takes next to no memory.
    """
    file, is_all_there = io.BytesIO(), False
    for block in blocks:
        position = file.tell() + len(block)
        file.write(block)
        if not is_all_there and BLOCK_BYTES <= position < length:
            file.seek(length - 1)
            file.write(b"\0")
            file.seek(position)
            is_all_there = True
    return file.getvalue()


def copy_into(buffer: memoryview, blocks: Iterable[bytes]) -> None:
    """Put blocks that are as long as a buffer in all into that buffer."""
    done = 0
    for block in blocks:
        buffer[done : done + len(block)] = block
        done += len(block)
