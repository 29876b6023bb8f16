"""Decisions: each validator's signed decision on a window, and the majority of stake (docs/protocol.md 11).

Late readers, catch-up and audits rely on the decisions and on the times that rosters record, never on a LastModified
that a bucket shows later. If no validator decided on a window, its roster slots still settle it (`nobody_decided`):
otherwise a network that stood still for one window could never continue. A late node concludes the same as an early
one: a roster that was stored in its slot is still there with its time, and a missing one was never published. As soon
as one validator decided, only decisions count.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from templar.agreement.retention import survey
from templar.agreement.roster import fetch_roster
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Decision, Roster
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.signed import read_signed
from templar.timeline import closing_block, window_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Majority:
    """The decision with the most stake behind it."""

    roster: str | None  # digest; None for a null window
    stake: float  # of the validators that decided so
    total: float  # stake of all decisions that were read
    unheard: float  # stake of validators that may have decided otherwise, or still may
    uids: tuple[int, ...]  # of the validators that decided so

    @property
    def is_clear(self) -> bool:
        """Whether it has more than half of the stake, even if all unheard validators decide otherwise."""
        return 2 * self.stake > self.total + self.unheard


def publish_decision(exchange: Exchange, window: int, roster: str | None, *, deadline: float) -> PublishReceipt:
    """Publish the roster's digest as the own decision. On failure a later call continues; never after the deadline.

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
    """Whether validators may still sign decisions on a window: until the next window closes."""
    return exchange.chain.block() < closing_block(window + 1, exchange.hparams.windows)


def majority(exchange: Exchange, window: int) -> Majority:
    """The decision of the majority of stake on a window.

    A validator does not count if it has not decided by the close of the next window, if its decision is not legal, or
    if its bucket refuses to be read. One that may still decide, whose decision may have expired, or whose store fails
    counts as unheard: an error is never absence.

    Raises:
        TransientError: `decision_missing`; no validator decided yet, the stake is split evenly, or too much is unheard.
    """
    # 1. Read every validator's decision. The time is read first: a decision may be signed while we read.
    may_be_unsigned = may_be_decided(exchange, window)
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
            elif may_be_unsigned or _may_have_expired_or_unknown(exchange, validator, window):
                unheard.append(validator)
    # 2. Count the stake.
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


def _may_have_expired_or_unknown(exchange: Exchange, validator: NeuronInfo, window: int) -> bool:
    try:
        return may_have_expired(exchange, validator, window)
    except TemplarError as error:
        log.warning("window %d: the bucket of uid %d cannot be listed now: %s", window, validator.uid, error)
        return True


def decided_roster(exchange: Exchange, window: int) -> tuple[Roster, NeuronInfo] | None:
    """The roster that the majority decided on, and its publisher; None for a null window.

    It is read from its publisher's bucket, or else from a validator that decided on it: each keeps a copy, so a
    publisher that deletes or replaces its roster stops no late node.

    Raises:
        TransientError: `decision_missing`, or `roster_missing` (no bucket shows the decided roster now).
    """
    decided = majority(exchange, window)
    if decided.roster is None:
        return None
    publishers = exchange.publishers(window)
    keepers = [neuron for neuron in exchange.metagraph(window).validators() if neuron.uid in decided.uids]
    places = [(publisher, publisher) for publisher in publishers]
    places += [(publisher, keeper) for keeper in keepers for publisher in publishers if keeper != publisher]
    for publisher, keeper in places:
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
        Reason.ROSTER_MISSING, f"window {window}: no bucket shows the decided roster {decided.roster[:12]}"
    )


def _count(votes: Mapping[str | None, Sequence[NeuronInfo]], unheard: Iterable[NeuronInfo]) -> Majority:
    stakes = {roster: _stake(voters) for roster, voters in votes.items()}
    # Ties are broken by digest for the message only: a tie is never clear.
    best = max(stakes, key=lambda roster: (stakes[roster], roster or ""))
    uids = tuple(voter.uid for voter in votes[best])
    return Majority(best, stakes[best], math.fsum(stakes.values()), _stake(unheard), uids)


def _stake(validators: Iterable[NeuronInfo]) -> float:
    return math.fsum(validator.stake for validator in validators)


def is_undecided_for_good(exchange: Exchange, window: int) -> bool:
    """Whether no validator decided on a window, and none can any more."""
    return not may_be_decided(exchange, window) and nobody_decided(exchange, window)


def nobody_decided(exchange: Exchange, window: int) -> bool:
    """Whether it is certain that no validator decided on a window.

    Every bucket must answer, because an error is never absence, and no object of the window may have expired.
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


def may_have_expired(exchange: Exchange, neuron: NeuronInfo, window: int) -> bool:
    """Whether a clean-up may have deleted a neuron's objects of a window: their absence proves nothing then.

    A clean-up counts ages from the newest window in the bucket.

    Raises:
        RejectedError: The neuron committed no readable bucket.
        TransientError: Chain or store failed.
    """
    current = window_of(exchange.chain.block(), exchange.hparams.windows)
    retention = exchange.hparams.storage.retention_windows
    if window >= current - retention:
        return False
    newest = survey(exchange.buckets.reader(neuron).list(), current).newest_window
    return newest is not None and window < newest - retention
