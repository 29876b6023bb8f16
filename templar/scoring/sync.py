"""How far behind the network a miner's state is, and what that leaves of its score."""

from collections.abc import Mapping

MAX_BEHIND = 5
"""At this many windows behind, or without any proof, nothing is left."""
EXPONENT = 2.5


def sync_score(windows_behind: float) -> float:
    """The documented curve: 1 in sync, 0 from `MAX_BEHIND` windows on, (1 - x/5)^2.5 between."""
    return (1 - min(max(windows_behind, 0.0), MAX_BEHIND) / MAX_BEHIND) ** EXPONENT


def windows_behind(root: str, roots: Mapping[int, str], window: int) -> int:
    """How many windows ago the network's root was this one.

    Args:
        root: The root that a miner names.
        roots: Window -> the network's root after it, for the recent past.
        window: The window whose root would be in sync.

    Returns:
        0 in sync; `MAX_BEHIND` for a root that the network never had lately.
    """
    for behind in range(MAX_BEHIND):
        if roots.get(window - behind) == root:
            return behind
    return MAX_BEHIND
