"""Which of many like cases the default run has."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_quick(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters for all names, of which those that are not quick are `slow`.

    Raises:
        ValueError: A quick name is not among them.
    """
    names = list(names)
    if unknown := set(quick) - set(names):
        raise ValueError(f"no such cases: {sorted(unknown)}")
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
