"""What a scenario is, and what came of one: values that whoever drives a network and whoever judges it share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from templar.chain.base import Chain, Clock
from templar.errors import Reason
from templar.exchange.findings import Accusation
from templar.gradient.payload import Payload
from templar.neuron.aggregator import Aggregator
from templar.neuron.node import Node
from templar.simulate.stage import Member
from templar.store.base import ObjectStore

COUNTED = "counted"
"""What an observation is called that gave no reason: the payload counts."""


class Expect(StrEnum):
    """What must come of an attack or fault."""

    REJECT = "R"
    """No payload of an attacker is applied; every reader says why with one of the legal reasons."""
    BOUND = "B"
    """The attackers' payloads are applied, and what they can do is bounded."""
    CONTINUE = "C"
    """The network goes on: the payloads of those it happens to may count or not, and they end on the same state."""


BucketFault = Callable[[ObjectStore, Clock, Member | None], ObjectStore]
"""From the bucket of an attacker, the time and the observer (None without a hotkey) to what the observer reads."""
ChainFault = Callable[[Chain], Chain]
"""From the chain of a member to what it sees of it."""


@dataclass(frozen=True)
class Misconduct:
    """How an aggregator misbehaves, and what the public reports must come to.

    Attributes:
        kind: The aggregator that takes the honest one's place.
        is_provable: Whether every finding convicts it, whoever made it.
        omits: Whether it leaves out payloads of honest miners: what it decided is applied, and each loss is reported.
        delay: How many windows later a node can find it.
    """

    kind: type[Aggregator]
    is_provable: bool = False
    omits: bool = False
    delay: int = 0


@dataclass(frozen=True)
class Scenario:
    """An attack or a fault, and what is expected.

    Attributes:
        name: Its name.
        rows: The rows of the catalogue of adversaries that it stands for.
        title: What happens, for people.
        expect: What must come of it.
        reasons: What a reader may say of the attackers' objects; of one that it accepts it says nothing. Of a bad
            aggregator: what the reports must say of it, in each window.
        actor: Which miners the attackers are, a name of `templar.adversary.actors.ACTORS`.
        bucket: What others read in place of the attackers' buckets.
        chain: What the attackers see in place of the chain.
        publisher_chain: Whether the aggregator has this chain as well.
        publisher: What the aggregator does, which is the only attacker then; None for an honest one.
        quiet: Windows at the beginning in which an attacker does nothing yet.
        windows: For how many windows it runs.
        honest: How many honest miners there are, whatever was asked for; None leaves the choice.
        alone: Whether it needs a network of its own.
        cleans: Whether every bucket is cleaned in every window, by wrong clocks.
        training: Whether its numbers matter, so that miners must train.
        overrides: Changes to the hyper-parameters.
    """

    name: str
    rows: tuple[int, ...]
    title: str
    expect: Expect
    reasons: frozenset[Reason] = frozenset()
    actor: str = "honest"
    bucket: BucketFault | None = None
    chain: ChainFault | None = None
    publisher_chain: bool = False
    publisher: Misconduct | None = None
    quiet: int = 0
    windows: int = 2
    honest: int | None = None
    alone: bool = False
    cleans: bool = False
    training: bool = False
    overrides: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_hostile(self) -> bool:
        """Whether the network does not answer for what those do to whom it happens: theirs is not the honest code."""
        return self.actor != "honest" or self.publisher is not None

    @property
    def kinds(self) -> dict[str, type[Node]]:
        """Which nodes take another's place, by role."""
        return {} if self.publisher is None else {"aggregator": self.publisher.kind}


@dataclass(frozen=True)
class Sighting:
    """What one node found of one miner in one window.

    Attributes:
        window: The window.
        observer: The node's name.
        uid: The miner.
        reason: Why nothing counts; None if something does.
        detail: The same for people.
    """

    window: int
    observer: str
    uid: int
    reason: Reason | None
    detail: str = ""


@dataclass(frozen=True)
class History:
    """What can be known of a network that ran, from its public objects, its gather reports and its journals.

    Attributes:
        windows: The windows that were run, as far back as objects are kept.
        rosters: Window -> uids that were applied; nobody in a null window.
        payloads: Window -> uid -> the payload that was applied, from the aggregate.
        sightings: The gather reports.
        roots: Node -> window -> state root.
        crashes: Node -> how it ended, of those that did not reach the end.
        traces: Files that prove that something of a peer's was run.
        unprintable: Lines of logs with characters that are not printable, or without an end.
        moved: Norm of the change of all parameters since genesis.
        deleted: Keys that a clean-up deleted before their time.
        swept: How many it deleted in their time.
        accusations: The findings of the public reports.
    """

    windows: tuple[int, ...]
    rosters: Mapping[int, tuple[int, ...]]
    payloads: Mapping[int, Mapping[int, Payload]]
    sightings: tuple[Sighting, ...]
    roots: Mapping[str, Mapping[int, str]]
    crashes: Mapping[str, str]
    traces: tuple[str, ...] = ()
    unprintable: tuple[str, ...] = ()
    moved: float = 0.0
    deleted: tuple[str, ...] = ()
    swept: int = 0
    accusations: tuple[Accusation, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What came of one scenario.

    Attributes:
        scenario: Its name.
        expect: What was expected: R, B or C.
        attackers: How many there were, a bad aggregator included.
        miners: How many miners there were, those that attack included.
        windows: How many windows were run.
        legal: The reasons that were legal.
        observed: Reason, or `counted`, -> how often a reader said so of an attacker, or a report of a bad aggregator.
        applied: Payloads of attackers that were applied.
        lost: Payloads of honest miners that were not applied.
        null_windows: Windows in which nothing was applied.
        roots_agree: Whether all nodes ended on one state root.
        measured: What was measured, for bounds.
        problems: What is not as expected; nothing if all is well.
    """

    scenario: str
    expect: str
    attackers: int
    miners: int
    windows: int
    legal: tuple[str, ...]
    observed: Mapping[str, int]
    applied: int
    lost: int
    null_windows: int
    roots_agree: bool
    measured: Mapping[str, float]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is as expected."""
        return not self.problems
