"""What an object key may be, the same for every store: a relative path that cannot lead out of its bucket.

S3 itself takes almost any string; the stricter rule here makes a bucket on S3 and a bucket in a directory hold the
same objects.
"""

import re

from templar.errors import PermanentError, Reason

MAX_KEY_BYTES = 1024
"""Length of a key in UTF-8; S3's own limit."""

_SEGMENT = r"(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f\ud800-\udfff]+"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


def is_key(key: str) -> bool:
    """Whether `key` is a legal key: segments without control characters between single slashes, none `.` or `..`."""
    if len(key) > MAX_KEY_BYTES or _KEY.fullmatch(key) is None:
        return False
    return key.isascii() or len(key.encode()) <= MAX_KEY_BYTES


def check_key(key: str) -> None:
    """Refuse an illegal key.

    Raises:
        PermanentError: `bad_key`; it is empty, absolute, too long, has an empty segment, `.` or `..` as a segment, or
            a control character.
    """
    if not is_key(key):
        raise PermanentError(
            Reason.BAD_KEY,
            f"key {key[:80]!r} is not a relative path of at most {MAX_KEY_BYTES} bytes without empty, '.' or '..' "
            "segments and control characters",
        )
