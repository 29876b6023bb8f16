"""The audit of a closed window's roster by somebody who was not there: by the same rules, from what is shown now."""

from dataclasses import dataclass
from functools import partial

from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.audit import Seen, audit
from templar.exchange.entries import check_entries
from templar.exchange.objects import Roster
from templar.exchange.roster import fetch_roster
from templar.exchange.sealing import Sealed
from templar.exchange.slots import PassedOver
from templar.interrupt import StoppedError
from templar.neuron.hindsight import Hindsight
from templar.neuron.node import Node
from templar.scoring.differences import Difference
from templar.windows import Timing

UNSIGNED = "00" * 64
"""Stands for a signature that nobody asks for: nothing of an audit is published."""

_ABSENT = frozenset({Reason.ROSTER_MISSING, Reason.ROSTER_EARLY, Reason.ROSTER_LATE, Reason.AGGREGATE_MISSING})
"""What failing publishers show: the next one has its turn, and nobody lied."""


@dataclass(frozen=True)
class RosterFindings:
    """What does not fit together.

    Attributes:
        publisher: Uid of the publisher whose roster was decided; None for a null window.
        differences: What its publishers, or miners, must not have done.
        notes: What is no lie.
    """

    publisher: int | None
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def audit_roster(node: Node, seen: Hindsight) -> RosterFindings:
    """Hold the decided roster, and what the publishers before it show, against what the miners show now.

    Args:
        node: A node whose agreed state is that of the window before.
        seen: The window as it looks now.

    Raises:
        TransientError: Chain or a store failed.
    """
    roster, differences, passed_over = seen.settlement.roster, [], []
    publisher: int | None = None
    decided = None if roster is None else Sealed(roster, UNSIGNED)
    for rank, neuron in enumerate(node.exchange.publishers(seen.window)):
        if roster is not None and neuron.hotkey == roster.hotkey:
            publisher = neuron.uid
            if (why := _why_illegal(node, seen, roster)) is not None:
                differences.append(_about(neuron.uid, why.reason, why.message))
            break
        found = _why_passed_over(node, seen, neuron, rank)
        if isinstance(found, Sealed):  # it counted, and had no entries: that is what made the window null
            decided = found
            break
        passed_over.append(found)
    findings, _ = audit(node.exchange, Seen(seen.window, seen.report, decided, tuple(passed_over)))
    notes = list(seen.notes)
    for finding in findings:
        uids = tuple(suspect.uid for suspect in finding.suspects)
        if Reason(finding.reason) in _ABSENT:
            notes.append(f"uid {uids[0]} showed no roster that counts [{finding.reason}] {finding.detail}")
        else:
            differences.append(_about(uids[0], Reason(finding.reason), finding.detail, *uids[1:]))
    return RosterFindings(publisher, tuple(differences), tuple(notes))


def _about(uid: int, reason: Reason, detail: str, *others: int) -> Difference:
    return Difference(f"roster of uid {uid}", f"[{reason}] {detail}", "", (uid, *others))


def _why_illegal(node: Node, seen: Hindsight, roster: Roster) -> RejectedError | None:
    """Why a roster does not count, whoever looks and whenever; None if it does."""
    before, miners = node.journal.applied(seen.window - 1), node.exchange.miners(seen.window)
    if before is not None and before.roster != roster.previous:
        return RejectedError(Reason.MINORITY, "its window before is not the one that was decided")
    try:
        check_entries(roster, seen.rules, miners, places=node.hparams.peers.gather_peer_count)
    except RejectedError as error:
        return error
    return None


def _why_passed_over(node: Node, seen: Hindsight, publisher: NeuronInfo, rank: int) -> PassedOver | Sealed[Roster]:
    """Why a publisher's turn passed; its roster, if that counted and had no entries."""
    passed = partial(PassedOver, publisher.uid, publisher.hotkey)
    try:
        found = fetch_roster(node.exchange, publisher, seen.window)
    except StoppedError:
        raise
    except PermanentError as error:
        return passed(error.reason, error.message)
    if found is None:
        return passed(Reason.ROSTER_MISSING, "nothing is stored")
    roster, timing = found.body, seen.rules.times.roster_slot(rank).timing(found.last_modified)
    if timing is not Timing.IN_TIME:
        reason = Reason.ROSTER_EARLY if timing is Timing.EARLY else Reason.ROSTER_LATE
        return passed(reason, f"it was stored too {timing.value}", roster, found.signature)
    if (why := _why_illegal(node, seen, roster)) is not None:
        return passed(why.reason, why.message, roster, found.signature)
    if not roster.entries:
        return Sealed(roster, found.signature)
    return passed(
        Reason.AGGREGATE_MISSING, "it counts now; its payloads may have come too late", roster, found.signature
    )
