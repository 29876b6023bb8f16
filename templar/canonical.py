"""One byte string per value: canonical JSON, hashes, and keyed pseudo-random bits.

Every hashed or signed value is encoded here, so that all nodes have the same bytes for it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Encode a JSON value in its only canonical form: sorted keys, no spaces, ASCII, finite numbers.

    Floats use the shortest decimal that reads back to the same double. ValueError if a number is NaN or infinite, or a
    value is not JSON.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"not a JSON value: {error}") from None
    return text.encode("ascii")


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keyed_seed(domain: str, *parts: str | int) -> int:
    """A 128-bit seed that is different for every domain and every list of parts.

    Each part is hashed after its length, so different lists never give the same bytes.
    """
    digest = hashlib.sha256(domain.encode())
    for part in parts:
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest()[:16], "little")
