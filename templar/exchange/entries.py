"""Entries of a roster: what its publisher says of a payload, and what the payload's author signed of it.

An entry carries both of the author's signatures, so anybody can rebuild the commitment and the manifest from it: a
publisher cannot put a payload of its own making under a miner's name, and a miner that signed two manifests for one
window is convicted by them.
"""

from collections.abc import Sequence

from templar.chain.base import NeuronInfo
from templar.errors import Reason, RejectedError
from templar.exchange.objects import Commit, Manifest, Roster, RosterEntry
from templar.exchange.reveal import Contribution, RevealRules
from templar.exchange.sealing import Sealed, check_signature
from templar.windows import Interval, Timing


def entry_of(contribution: Contribution) -> RosterEntry:
    """The entry of a payload that counts."""
    manifest = contribution.manifest
    return RosterEntry(
        uid=contribution.uid,
        hotkey=contribution.hotkey,
        payload_sha256=manifest.payload_sha256,
        payload_bytes=manifest.payload_bytes,
        assignment=manifest.assignment,
        root_before=manifest.root_before,
        committed_at=contribution.committed_at,
        revealed_at=contribution.revealed_at,
        commit_signature=contribution.commit_signature,
        manifest_signature=contribution.manifest_signature,
    )


def manifest_in(roster: Roster, entry: RosterEntry) -> Sealed[Manifest]:
    """The manifest that an entry speaks of, as its author signed it if the entry is true."""
    manifest = Manifest(
        protocol=roster.protocol,
        netuid=roster.netuid,
        genesis=roster.genesis,
        window=roster.window,
        uid=entry.uid,
        hotkey=entry.hotkey,
        payload_sha256=entry.payload_sha256,
        payload_bytes=entry.payload_bytes,
        assignment=entry.assignment,
        root_before=entry.root_before,
    )
    return Sealed(manifest, entry.manifest_signature)


def commit_in(roster: Roster, entry: RosterEntry) -> Sealed[Commit]:
    """The commitment that an entry speaks of, as its author signed it if the entry is true."""
    return Sealed(manifest_in(roster, entry).body.commit, entry.commit_signature)


def check_entries(roster: Roster, rules: RevealRules, miners: Sequence[NeuronInfo], *, places: int) -> None:
    """Hold a roster's entries against everything that does not change any more: chain, assignment, signatures.

    Everybody comes to the same answer, whenever they look.

    Args:
        roster: The roster.
        rules: The window's rules.
        miners: Who may train in the window.
        places: Payloads of a window, at most.

    Raises:
        RejectedError: `malformed` (too many entries), `wrong_identity`, `commit_early`, `commit_late`, `reveal_early`,
            `reveal_late`, `wrong_assignment`, `bad_signature`: the roster does not count.
    """
    if len(roster.entries) > places:
        raise RejectedError(Reason.MALFORMED, f"roster: {len(roster.entries)} entries, there are {places} places")
    hotkeys = {neuron.uid: neuron.hotkey for neuron in miners}
    for entry in roster.entries:
        who = f"roster: uid {entry.uid}"
        if hotkeys.get(entry.uid) != entry.hotkey:
            raise RejectedError(Reason.WRONG_IDENTITY, f"{who} is no miner with the hotkey {entry.hotkey}")
        _check_time(entry.committed_at, rules.times.commit_interval, f"{who} committed", _COMMITTED)
        _check_time(entry.revealed_at, rules.times.reveal_interval, f"{who} revealed", _REVEALED)
        if entry.assignment != rules.assignment(entry.uid):
            raise RejectedError(Reason.WRONG_ASSIGNMENT, f"{who} trained on data that it was not assigned")
    check_signatures(roster)


def check_signatures(roster: Roster) -> None:
    """Check that the author of every entry signed its commitment and its manifest.

    Raises:
        RejectedError: `bad_signature`.
    """
    for entry in roster.entries:
        check_signature(commit_in(roster, entry))
        check_signature(manifest_in(roster, entry))


_COMMITTED = {Timing.EARLY: Reason.COMMIT_EARLY, Timing.LATE: Reason.COMMIT_LATE}
_REVEALED = {Timing.EARLY: Reason.REVEAL_EARLY, Timing.LATE: Reason.REVEAL_LATE}


def _check_time(seconds: int, interval: Interval, what: str, reasons: dict[Timing, Reason]) -> None:
    timing = interval.timing(seconds)
    if timing is not Timing.IN_TIME:
        raise RejectedError(reasons[timing], f"{what} too {timing.value}, its publisher says")
