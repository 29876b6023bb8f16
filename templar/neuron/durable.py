"""Files that are there whole or not at all, also after a power cut."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_file(path: Path, write: Callable[[Path], Any], *, durable: bool = True) -> None:
    """Write a file under a temporary name, bring it to the disk, then give it its name.

    Args:
        path: The file; its folder is made when needed.
        write: Writes the content to the path that it is given.
        durable: Wait for the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    write(part)
    if durable:
        sync(part)
    part.replace(path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
