"""From a tensor to the bytes that a miner publishes, and from all miners' bytes to one outer step."""

from typing import Literal

Recipe = Literal["sparseloco", "demo"]
"""`sparseloco`: clipped mean of pseudo-gradients. `demo`: sign of the normalised mean of averaged gradients."""
