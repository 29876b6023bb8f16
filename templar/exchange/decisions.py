"""Decisions: every validator's signed word on a window, and what the majority of stake says (PROTOCOL 15).

Late readers, catch-up and audits follow the decisions and the times that rosters record, never today's LastModified.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass

from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.context import Exchange
from templar.exchange.keys import Kind, window_key
from templar.exchange.objects import Decision, Roster
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.roster import fetch_roster
from templar.exchange.sealing import check_author, check_window, unseal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Majority:
    """What the decisions on a window say.

    Attributes:
        roster: Digest of the roster with the most stake behind it; None for a null window.
        stake: The stake behind it.
        total: The stake of all decisions that were read.
        uids: Who decided so.
    """

    roster: str | None
    stake: float
    total: float
    uids: tuple[int, ...]

    @property
    def is_clear(self) -> bool:
        """Whether more than half of the stake that decided says the same."""
        return 2 * self.stake > self.total


def publish_decision(exchange: Exchange, window: int, roster: str | None, *, deadline: float) -> PublishReceipt:
    """Sign what this validator applied. On failure a later call goes on; never after the deadline.

    Raises:
        PermanentError: `object_differs` (it decided otherwise before), `no_time_left`.
        TransientError: The store failed.
    """
    decision = Decision(**exchange.author(window), window=window, roster=roster)
    key = window_key(Kind.DECISION, window, decision.uid)
    clock = exchange.chain.clock
    return publish_body(exchange.buckets.own, key, decision, exchange.own_signer, clock=clock, deadline=deadline)


def read_decision(exchange: Exchange, validator: NeuronInfo, window: int) -> Decision | None:
    """A validator's decision; None if there is none.

    Raises:
        RejectedError: It is not legal.
        TransientError: The store failed.
    """
    store = exchange.buckets.reader(validator)
    key = window_key(Kind.DECISION, window, validator.uid)
    if store.head(key) is None:
        return None
    decision = unseal(store.get(key, max_bytes=Decision.max_bytes), Decision).body
    check_author(decision, network=exchange.network, uid=validator.uid, hotkey=validator.hotkey)
    check_window(decision, window)
    return decision


def majority(exchange: Exchange, window: int) -> Majority:
    """What the majority of stake decided on a window.

    A validator whose bucket cannot be read, or whose decision is not legal, does not count.

    Raises:
        TransientError: `decision_missing`; nobody decided yet, or the stake is split evenly.
    """
    stakes: dict[str | None, float] = defaultdict(float)
    voters: dict[str | None, list[int]] = defaultdict(list)
    for validator in exchange.metagraph(window).validators():
        try:
            decision = read_decision(exchange, validator, window)
        except (PermanentError, TransientError) as error:
            log.warning("window %d: decision of uid %d is left out: %s", window, validator.uid, error)
            continue
        if decision is not None:
            stakes[decision.roster] += validator.stake
            voters[decision.roster].append(validator.uid)
    if not stakes:
        raise TransientError(Reason.DECISION_MISSING, f"window {window}: no validator has decided yet")
    # The tie-break by digest only serves the message: a tie is never clear.
    roster = max(stakes, key=lambda digest: (stakes[digest], digest or ""))
    found = Majority(roster, stakes[roster], sum(stakes.values()), tuple(voters[roster]))
    if not found.is_clear:
        raise TransientError(
            Reason.DECISION_MISSING, f"window {window}: the validators' stake is split evenly; ask again later"
        )
    return found


def decided_roster(exchange: Exchange, window: int) -> tuple[Roster, NeuronInfo] | None:
    """The roster that the majority decided on, and whose bucket has it; None for a null window.

    Raises:
        TransientError: `decision_missing`, or `roster_missing` (no publisher shows the decided roster now).
    """
    wanted = majority(exchange, window).roster
    if wanted is None:
        return None
    for publisher in exchange.publishers(window):
        try:
            roster = fetch_roster(exchange, publisher, window)
        except (PermanentError, TransientError) as error:
            log.warning("window %d: roster of uid %d is left out: %s", window, publisher.uid, error)
            continue
        if roster is not None and roster.digest == wanted:
            return roster, publisher
    raise TransientError(
        Reason.ROSTER_MISSING, f"window {window}: no publisher shows the roster {wanted[:12]} that was decided"
    )
