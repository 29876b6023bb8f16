"""The contract of every chain: time, identity, public commitments and weights.

Consensus reads come from finalized blocks (docs/protocol.md 1); `head` is only for deciding when to act.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from cachetools import LRUCache

COMMITMENT_CHARACTERS = 128
"""Length of the string that a hotkey commits on chain (it holds the read access to its bucket)."""

T = TypeVar("T")


class Role(StrEnum):
    """The role that a hotkey announced. Only the hotkey itself can sign this, unlike stake, which anybody may add."""

    MINER = "miner"
    VALIDATOR = "validator"


@dataclass(frozen=True)
class NeuronInfo:
    """One registered neuron as the chain sees it."""

    uid: int  # index in the subnet
    hotkey: str  # ss58 address
    stake: float  # total stake, in the chain's unit
    validator_permit: bool  # whether it may set weights
    incentive: float  # share of the miners' emission, in 0..1
    commitment: str | None  # what the hotkey had committed by the metagraph's block; None for nothing of our length
    role: Role | None  # what it had announced by then
    registered_at: int = 0  # block in which the uid was registered; a swap of the hotkey leaves it as it is


@dataclass(frozen=True)
class Metagraph:
    """All neurons of the subnet at one block, in uid order."""

    block: int
    neurons: tuple[NeuronInfo, ...]
    validator_min_stake: float = 0.0  # a setting of the network, not of the chain

    def by_uid(self, uid: int) -> NeuronInfo | None:
        """The neuron with this uid, if there is one."""
        return next((neuron for neuron in self.neurons if neuron.uid == uid), None)

    def by_hotkey(self, hotkey: str) -> NeuronInfo | None:
        """The neuron with this hotkey, if it is registered."""
        return next((neuron for neuron in self.neurons if neuron.hotkey == hotkey), None)

    def before_swap(self, neuron: NeuronInfo) -> NeuronInfo | None:
        """The neuron in the place of another block's neuron, under that hotkey or another one."""
        place = (neuron.uid, neuron.registered_at)
        return next((each for each in self.neurons if (each.uid, each.registered_at) == place), None)

    def validators(self) -> tuple[NeuronInfo, ...]:
        """Validators with a permit and the least stake, by falling stake, ties by uid (docs/protocol.md 2)."""
        found = (
            neuron
            for neuron in self.neurons
            if neuron.role is Role.VALIDATOR and neuron.validator_permit and neuron.stake >= self.validator_min_stake
        )
        return tuple(sorted(found, key=lambda neuron: (-neuron.stake, neuron.uid)))

    def miners(self) -> tuple[NeuronInfo, ...]:
        """Those that announced that they are miners, in uid order; a permit changes nothing."""
        return tuple(neuron for neuron in self.neurons if neuron.role is Role.MINER)


@dataclass(frozen=True)
class WeightsSchedule:
    """When set weights take effect and are shown, as of one finalized block: the owner may change it at any time."""

    next_epoch: int | None = None  # block in which the weights set by then take effect; None where they do at once
    epoch_blocks: int = 0  # blocks from one epoch to the next, as long as the owner changes nothing
    reveal_epochs: int = 0  # epochs for which the chain hides weights (commit-reveal); 0 where it shows them at once
    hidden: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Hotkey -> blocks in which it set weights that are still hidden, in rising order."""


@dataclass(frozen=True)
class SubnetRules:
    """The settings of the subnet's owner and the chain's root, and the version of the chain's runtime."""

    spec_version: int
    consensus: str  # "Yuma", or another way from weights to pay
    started: bool  # whether the owner has started it: nobody can stake before
    emission: bool  # whether root lets it earn
    commit_reveal: bool  # whether weights are hidden at first
    weights_rate_limit: int  # blocks from a hotkey's weights to its next ones
    serving_rate_limit: int  # blocks from an announcement of a role to the next one
    largest_weight: int  # largest share of one uid, in 65535ths


class Clock(Protocol):
    """Local time in seconds since the epoch: used to decide when to act, never for an agreed decision."""

    def now(self) -> float:
        """The current time."""

    def sleep_until(self, timestamp: float) -> None:
        """Return once `now()` is at least `timestamp`; at once if it is already."""

    def compute(self, work: Callable[[], T]) -> T:
        """Run a heavy, pure computation and return its result; in simulated time other participants run meanwhile."""


class Chain(Protocol):
    """A subnet on a chain, seen by one hotkey (or by none: then it is read-only).

    Raises:
        TransientError: `chain_unreachable`, `chain_rate_limited`, `chain_fate_unknown`, `chain_not_now`.
        PermanentError: `chain_refused` (the extrinsic failed and will fail again; the message quotes the chain),
            `block_unknown` (a block in the future, or pruned).
    """

    @property
    def netuid(self) -> int:
        """The subnet."""

    @property
    def clock(self) -> Clock:
        """The clock of this chain's participants."""

    @property
    def block_seconds(self) -> float:
        """Expected seconds between two blocks."""

    def block(self) -> int:
        """Number of the newest finalized block."""

    def head(self) -> int:
        """Number of the newest block, finalized or not."""

    def block_time(self, number: int, *, finalized: bool = True) -> float:
        """The chain's timestamp of a block, in seconds; of a finalized one, unless only acting depends on it."""

    def block_hash(self, number: int) -> str:
        """The hash of a finalized block: `0x` and 64 hex digits."""

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Return once the block is there (and finalized, unless only acting depends on it)."""

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The subnet's neurons and their commitments at a finalized block, the newest by default."""

    def require_fees(self) -> None:
        """Check that the own extrinsics can be paid for; `cannot_pay_fees` if not."""

    def commitments(self) -> dict[str, str]:
        """Each hotkey's newest commitment; only hotkeys that made one."""

    def set_commitment(self, data: str) -> None:
        """Commit `COMMITMENT_CHARACTERS` ASCII characters under the own hotkey; returns once that is final."""

    def set_role(self, role: Role) -> None:
        """Announce the own hotkey's role; returns once that is final. It holds until another one is announced."""

    def weights(self) -> dict[int, dict[int, float]]:
        """For each validator uid that set weights: miner uid -> weight, summing to 1."""

    def weights_schedule(self) -> WeightsSchedule:
        """When set weights take effect, and which ones are hidden."""

    def check_weights(self, weights: Mapping[int, float], *, sent: int | None = None) -> None:
        """Check the own weights by the rules that the chain has now, but for their rate; raises with the cause.

        A chain that hides weights looks at most rules when it reveals them, and drops what breaks one. `sent` is the
        block before they were sent, if they were.
        """

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Check the own weights and set them, normalised to a sum of 1; returns once that is final.

        Zero weights may be left out. Chains store them in 16 bits, so what is read back is rounded.
        """

    def rules(self) -> SubnetRules | None:
        """The settings of owner and root for the subnet; None for a chain without such settings."""


class NumberCache(Generic[T]):
    """A cache of immutable values by block or change number, of at most `size` entries. Safe under threads."""

    def __init__(self, size: int) -> None:
        self._values: LRUCache[int, T] = LRUCache(size)
        self._lock = threading.Lock()

    def get(self, number: int) -> T | None:
        """The cached value of this number, if there is one."""
        with self._lock:
            return self._values.get(number)

    def nearest(self, number: int) -> tuple[int, T] | None:
        """The largest cached number that is at most this one, and its value."""
        with self._lock:
            known = max((candidate for candidate in self._values if candidate <= number), default=None)
            return None if known is None else (known, self._values[known])

    def put(self, number: int, value: T) -> T:
        """Cache a value, and return it."""
        with self._lock:
            self._values[number] = value
        return value
