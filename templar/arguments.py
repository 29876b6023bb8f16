"""Types of command-line arguments for `argparse`."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from templar.store.address import is_account_id

MAX_PORT = 65535


def whole_number(least: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least `least`, which is 0 or more."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def port(text: str) -> int:
    """Parse the number of a TCP port."""
    number = whole_number(1)(text)
    if number > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: they go up to {MAX_PORT}")
    return number


def folder_path(text: str) -> Path:
    """Parse the path of a folder, which need not exist."""
    return Path(text).expanduser().resolve()


def account_id(text: str) -> str:
    """Parse the id of a storage account."""
    if not is_account_id(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 3 to 32 lower-case letters, digits and inner hyphens")
    return text
