"""Downloads that go on where they stopped, after a lost connection as after a kill.

The parts lie in a partial file beside the final name, `.{name}.{version}.partial`, and behind them one byte for each
says whether it is there: it is written after its part. A kill can therefore lose parts, never invent them; a power cut
can, so whoever knows the hash of the file checks it at the end. The name says of which version of the object the parts
are: those of another one are dropped.
"""

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from glob import escape
from pathlib import Path

from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.interrupt import StoppedError
from templar.store.files import local_file, locked
from templar.store.s3_settings import S3Settings

READY = b"\1"


def download(
    path: Path, size: int, *, version: str | None, settings: S3Settings, read: Callable[[int, memoryview], None]
) -> None:
    """Download a file in parallel parts.

    Memory holds `concurrency * part_bytes` at most. The first failure cancels the parts that have not begun.

    Args:
        path: The file; it appears whole, at the end.
        size: Its length, positive.
        version: Names the object and its version: on failure the parts that have come stay for the next call with the
            same one. None to keep nothing.
        settings: Length of a part, and how many are fetched at the same time; another length begins afresh.
        read: Reads the object from an offset on into memory.

    Raises:
        TransientError: `local_file` if somebody else is downloading it to this place; whatever `read` raises.
        PermanentError: Likewise, or `local_file`. Nothing stays of an object that is not there any more, or refused.
    """
    name, token = path.name[:100], f"{version or secrets.token_hex(16)} {size} {settings.part_bytes}"
    partial = path.with_name(f".{name}.{sha256_hex(token.encode())[:16]}.partial")
    with local_file(path), locked(partial, wait=False) as ours:
        if not ours or not partial.exists():  # it may have got its final name in this moment
            raise TransientError(Reason.LOCAL_FILE, f"local file {path}: somebody else is downloading it; try again")
        _drop_others(partial, f".{escape(name)}.*.partial")
        try:
            _fill(partial, size, settings=settings, read=read)
            os.truncate(partial, size)
            partial.replace(path)
        except BaseException as error:
            if version is None or _is_useless(error):
                partial.unlink(missing_ok=True)
            raise


def _is_useless(error: BaseException) -> bool:
    """Whether no later download can go on where this one stopped."""
    if not isinstance(error, TemplarError) or isinstance(error, StoppedError) or error.reason is Reason.LOCAL_FILE:
        return False
    return isinstance(error, PermanentError) or error.reason is Reason.OBJECT_DIFFERS


def _drop_others(partial: Path, pattern: str) -> None:
    """Remove what is left of other versions, unless somebody is downloading them."""
    for other in partial.parent.glob(pattern):
        if other != partial:
            with locked(other, wait=False) as free:
                if free:
                    other.unlink(missing_ok=True)


def _fill(partial: Path, size: int, *, settings: S3Settings, read: Callable[[int, memoryview], None]) -> None:
    """Bring every part that is missing into the partial file."""
    part_bytes = settings.part_bytes
    num_parts = -(-size // part_bytes)
    with partial.open("r+b") as file:
        os.truncate(file.fileno(), size + num_parts)  # zeros where nothing was written yet
        ready = os.pread(file.fileno(), num_parts, size)

        def fetch(part: int) -> None:
            start = part * part_bytes
            data = memoryview(bytearray(min(part_bytes, size - start)))
            read(start, data)
            with local_file(partial):
                _write(file.fileno(), data, start)
                _write(file.fileno(), memoryview(READY), size + part)

        missing = [part for part in range(num_parts) if ready[part : part + 1] != READY]
        with ThreadPoolExecutor(settings.concurrency) as pool:
            for _ in pool.map(fetch, missing):
                pass


def _write(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written
