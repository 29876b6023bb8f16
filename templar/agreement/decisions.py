"""Decisions: every validator's signed word on a window, and what the majority of stake says (PROTOCOL 15).

Late readers, catch-up and audits follow the decisions and the times that rosters record, never today's LastModified.

What the absence of an object proves: nothing, where a clean-up may have deleted it.

Windows that nobody decided on, because every validator was away: the slots still say what they were (PROTOCOL 6).

Without this rule a network that stood still for one window could never go on. What a late node concludes is what an
early one would have: a roster that was stored in its slot still lies there with its time, and one that is not there was
never published. As soon as one validator decided, decisions alone count (PROTOCOL 15).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from templar.agreement.retention import newest_window
from templar.agreement.roster import fetch_roster
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Decision, Roster
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.signed import read_signed
from templar.timeline import closing_block, window_of


def may_have_expired(exchange: Exchange, neuron: NeuronInfo, window: int) -> bool:
    """Whether a clean-up, which counts from the bucket's newest window, may have deleted a neuron's old objects.

    Then their absence proves nothing: what was deleted was there once.

    Raises:
        RejectedError: The neuron committed no bucket that can be read.
        TransientError: Chain or store failed.
    """
    current = window_of(exchange.chain.block(), exchange.hparams.windows)
    retention = exchange.hparams.storage.retention_windows
    if window >= current - retention:
        return False
    newest = newest_window(exchange.buckets.reader(neuron).list(), current)
    return newest is not None and window < newest - retention


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Majority:
    """What the decisions on a window say.

    Attributes:
        roster: Digest of the roster with the most stake behind it; None for a null window.
        stake: The stake behind it.
        total: The stake of all decisions that were read.
        unheard: The stake of validators that may have decided, or may still decide, otherwise.
        uids: Who decided so.
    """

    roster: str | None
    stake: float
    total: float
    unheard: float
    uids: tuple[int, ...]

    @property
    def is_clear(self) -> bool:
        """Whether more than half of the stake says the same, whatever the unheard say."""
        return 2 * self.stake > self.total + self.unheard


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
    found = read_signed(store, key, Decision, network=exchange.network, author=validator, window=window)
    return None if found is None else found.body


def may_be_decided(exchange: Exchange, window: int) -> bool:
    """Whether validators may still sign decisions on a window: until the next one closes (PROTOCOL 15)."""
    return exchange.chain.block() < closing_block(window + 1, exchange.hparams.windows)


def majority(exchange: Exchange, window: int) -> Majority:
    """What the majority of stake decided on a window.

    A validator does not count if it has not decided by the close of the next window, if its decision is not legal, or
    if its bucket refuses to be read. One that may still decide, whose decision may have expired, or whose store just
    fails, is waited for, unless its stake cannot turn the majority: an error is never absence (PROTOCOL 11).

    Raises:
        TransientError: `decision_missing`; nobody decided yet, the stake is split evenly, or too much of it is unheard.
    """
    may_be_unsigned = may_be_decided(exchange, window)  # asked first: what comes later is no absence
    votes: dict[str | None, list[NeuronInfo]] = defaultdict(list)
    unheard: list[NeuronInfo] = []
    for validator in exchange.metagraph(window).validators():
        try:
            decision = read_decision(exchange, validator, window)
        except TransientError as error:
            log.warning("window %d: decision of uid %d cannot be read now: %s", window, validator.uid, error)
            unheard.append(validator)
        except PermanentError as error:
            log.warning("window %d: decision of uid %d is left out: %s", window, validator.uid, error)
        else:
            if decision is not None:
                votes[decision.roster].append(validator)
            elif may_be_unsigned or _may_have_expired(exchange, validator, window):
                unheard.append(validator)
    if not votes:
        raise TransientError(Reason.DECISION_MISSING, f"window {window}: no validator has decided yet")
    found = _count(votes, unheard)
    if not found.is_clear:
        raise TransientError(
            Reason.DECISION_MISSING,
            f"window {window}: no decision has the majority: the best has the stake {found.stake:g} of {found.total:g} "
            f"behind it, and {found.unheard:g} is unheard; ask again later",
        )
    return found


def _may_have_expired(exchange: Exchange, validator: NeuronInfo, window: int) -> bool:
    try:
        return may_have_expired(exchange, validator, window)
    except TemplarError as error:
        log.warning("window %d: the bucket of uid %d cannot be listed now: %s", window, validator.uid, error)
        return True


def decided_roster(exchange: Exchange, window: int) -> tuple[Roster, NeuronInfo] | None:
    """The roster that the majority decided on, and who published it; None for a null window.

    It is looked for in its publisher's bucket, and then in those of the validators that decided on it: each keeps a
    copy, so a publisher that takes its roster away, or puts another in its place, strands nobody.

    Raises:
        TransientError: `decision_missing`, or `roster_missing` (nobody shows the decided roster now).
    """
    decided = majority(exchange, window)
    if decided.roster is None:
        return None
    publishers = exchange.publishers(window)
    keepers = [neuron for neuron in exchange.metagraph(window).validators() if neuron.uid in decided.uids]
    wheres = [(publisher, publisher) for publisher in publishers]
    wheres += [(publisher, keeper) for keeper in keepers for publisher in publishers if keeper != publisher]
    for publisher, keeper in wheres:
        try:
            found = fetch_roster(exchange, publisher, window, keeper=keeper)
        except (PermanentError, TransientError) as error:
            log.warning(
                "window %d: roster of uid %d with uid %d is left out: %s", window, publisher.uid, keeper.uid, error
            )
            continue
        if found is not None and found.body.digest == decided.roster:
            return found.body, publisher
    raise TransientError(
        Reason.ROSTER_MISSING, f"window {window}: nobody shows the roster {decided.roster[:12]} that was decided"
    )


def _count(votes: Mapping[str | None, Sequence[NeuronInfo]], unheard: Iterable[NeuronInfo]) -> Majority:
    stakes = {roster: _stake(voters) for roster, voters in votes.items()}
    # The tie-break by digest only serves the message: a tie is never clear.
    best = max(stakes, key=lambda roster: (stakes[roster], roster or ""))
    uids = tuple(voter.uid for voter in votes[best])
    return Majority(best, stakes[best], math.fsum(stakes.values()), _stake(unheard), uids)


def _stake(validators: Iterable[NeuronInfo]) -> float:
    return math.fsum(validator.stake for validator in validators)


def is_undecided_for_good(exchange: Exchange, window: int) -> bool:
    """Whether nobody decided on a window, and nobody can any more."""
    return not may_be_decided(exchange, window) and nobody_decided(exchange, window)


def nobody_decided(exchange: Exchange, window: int) -> bool:
    """Whether it is certain that no validator decided on a window.

    Every bucket has to answer: an error is never absence (PROTOCOL 11). And nothing of the window may have expired:
    what was deleted was there once.
    """
    for validator in exchange.metagraph(window).validators():
        try:
            if read_decision(exchange, validator, window) is not None or may_have_expired(exchange, validator, window):
                return False
        except TransientError as error:
            log.warning("window %d: decision of uid %d cannot be read now: %s", window, validator.uid, error)
            return False
        except PermanentError as error:
            log.warning("window %d: decision of uid %d is left out: %s", window, validator.uid, error)
    return True
