"""Files that are there whole or not at all, also after a power cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from templar.store.files import sync


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


def prune_spool(folder: Path, before_window: int) -> None:
    """Delete what was published, or staged, in windows before this one: files `{what}-{window}.{kind}`."""
    for file in folder.glob("*-*.*"):
        number = file.stem.rsplit("-", 1)[-1]
        if number.isdigit() and int(number) < before_window:
            file.unlink(missing_ok=True)
