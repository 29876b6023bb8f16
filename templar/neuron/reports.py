"""What the steps of a miner's window say of themselves; values that tasks hand on and journals keep."""

from dataclasses import dataclass

from templar.data.health import EndpointReport
from templar.errors import Reason


@dataclass(frozen=True)
class PageReport:
    """The data of a window.

    Attributes:
        window: The window.
        units: The pages that were assigned.
        num_sequences: Training sequences in them.
        assignment: Digest of the assignment.
        endpoints: What each endpoint of the dataset has done since this process opened it.
    """

    window: int
    units: tuple[int, ...]
    num_sequences: int
    assignment: str
    endpoints: tuple[EndpointReport, ...] = ()


@dataclass(frozen=True)
class TrainReport:
    """What training came to.

    Attributes:
        window: The window.
        reason: Why there is nothing to publish; None if there is something.
        first_loss: Mean loss of the first step in nats per token.
        last_loss: Mean loss of the last step.
        num_steps: Steps taken.
        num_sequences: Sequences used.
    """

    window: int
    reason: Reason | None
    first_loss: float | None = None
    last_loss: float | None = None
    num_steps: int = 0
    num_sequences: int = 0


@dataclass(frozen=True)
class PayloadReport:
    """A payload that is safely on this node's disk.

    Attributes:
        window: The window.
        sha256: Its hash.
        num_bytes: Its length.
        dense_bytes: Length of the same update in float32.
        root_before: State root that the training started from.
        assignment: Digest of what it was told to train on.
    """

    window: int
    sha256: str
    num_bytes: int
    dense_bytes: int
    root_before: str
    assignment: str
