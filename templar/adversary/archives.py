"""Bytes that would do harm in a reader that unpickles or unpacks: nothing here does either.

Each leaves a visible trace where it succeeds: a file or folder called `TRAP`.
"""

import io
import zipfile
from pathlib import Path

TRAP = "somebody-ran-what-a-peer-published"
"""The name of the trace."""


def pickle_bytes(folder: Path) -> bytes:
    """A pickle, in the oldest protocol, whose loading makes the folder `TRAP` below another."""
    path = str(folder / TRAP).encode("ascii", "backslashreplace")
    return b"cos\nmkdir\n(V" + path + b"\ntR."


def zip_bomb(num_bytes: int) -> bytes:
    """An archive hundreds of times smaller than what it unpacks to, that wants out of its folder as well."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in (f"../../{TRAP}", f"/tmp/{TRAP}", "archive/data.pkl"):  # noqa: S108 - never unpacked
            archive.writestr(zipfile.ZipInfo(name), bytes(num_bytes), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def padded(data: bytes, num_bytes: int) -> bytes:
    """Bytes of a length that a payload may have, so that nobody refuses them for their length alone."""
    return data[:num_bytes].ljust(num_bytes, b"\0")
