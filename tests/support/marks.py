"""Which of many like cases the default run has."""

import pytest


def some_quick(cases, quick):
    """Parameters for all cases, of which those that are not quick are `slow`.

    Raises:
        ValueError: A quick one is not among them.
    """
    cases = list(cases)
    if unknown := set(quick) - set(cases):
        raise ValueError(f"no such cases: {sorted(unknown)}")
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
