"""What stands on command lines."""

import argparse
from collections.abc import Callable
from pathlib import Path

from templar.store.address import is_account_id


def whole_number(least: int) -> Callable[[str], int]:
    """What reads a whole number for `argparse`.

    Args:
        least: The smallest that is taken, at least 0.
    """

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


def folder_path(text: str) -> Path:
    """Read a folder for `argparse`, whether it is there or not."""
    return Path(text).expanduser().resolve()


def account_id(text: str) -> str:
    """Read the id of a storage account for `argparse`."""
    if not is_account_id(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 3 to 32 lower-case letters, digits and inner hyphens")
    return text
