"""Numbers on command lines."""

import argparse
from collections.abc import Callable


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
