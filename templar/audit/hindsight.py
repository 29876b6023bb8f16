"""Reconstruct a closed window from its public objects: the reveals, and the roster that was decided."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from templar.agreement.voter import Settlement
from templar.errors import PermanentError, Reason
from templar.exchange.gather import GatherReport, PeerOutcome
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest, Roster, RosterEntry
from templar.exchange.reveal import RevealRules, Submission
from templar.exchange.signed import read_signed
from templar.neuron.catchup import decided_settlement
from templar.neuron.node import Node

_TIMES = frozenset({Reason.COMMIT_EARLY, Reason.COMMIT_LATE, Reason.REVEAL_EARLY, Reason.REVEAL_LATE})


@dataclass(frozen=True)
class Hindsight:
    """A closed window by its public objects."""

    rules: RevealRules
    report: GatherReport  # of all miners, as a validator gathers
    unasked: Mapping[int, PeerOutcome]  # miners of the reserve that no gather has to ask
    reserve: frozenset[int]  # uids that replace others
    settlement: Settlement  # all payloads that it applies are in the cache
    notes: tuple[str, ...]  # objects that were stored again since, for people

    @property
    def window(self) -> int:
        """The window."""
        return self.rules.window

    def outcome(self, uid: int) -> PeerOutcome | None:
        """Return the outcome of a miner; None if it is not registered."""
        return self.report.outcome(uid) or self.unasked.get(uid)


def look_back(node: Node, window: int) -> Hindsight:
    """Gather a closed window once more, with a node whose agreed state is that of the window before.

    TransientError: Chain or stores failed, or the decision is not known yet: `decision_missing`.
    """
    node.use_settings(window)
    exchange, rules = node.exchange, node.reveal_rules(node.exchange.times(window))
    miners = exchange.miners(window)
    # 1. Gather as in the window; before the decision is read, so that no payload is in the cache already.
    report = node.gather(window, others=miners)
    asked = {outcome.uid for outcome in report.outcomes}
    unasked = node.gatherer.gather(
        (), rules, others=[neuron for neuron in miners if neuron.uid not in asked], retry_until=0.0
    )
    # 2. The decision. Its entries count with the roster's times: a bucket may have moved since (docs/protocol.md 15).
    settlement = decided_settlement(node, window)
    report, notes = _with_roster_times(node, report, settlement)
    return Hindsight(
        rules,
        report,
        {outcome.uid: outcome for outcome in unasked.outcomes},
        frozenset(neuron.uid for neuron in node.selection(window).reserve),
        settlement,
        notes,
    )


def _with_roster_times(
    node: Node, report: GatherReport, settlement: Settlement
) -> tuple[GatherReport, tuple[str, ...]]:
    """Return the report in which an entry of the roster counts if only its time differs, and notes on those entries."""
    roster = settlement.roster
    entries = {} if roster is None else {entry.uid: entry for entry in roster.entries}
    outcomes, notes = list(report.outcomes), []
    for place, outcome in enumerate(outcomes):
        entry = entries.get(outcome.uid)
        if roster is not None and entry is not None and outcome.reason in _TIMES and _shows(node, roster, entry):
            outcomes[place] = replace(outcome, submission=Submission.listed(roster, entry), reason=None, detail="")
            notes.append(f"uid {entry.uid}: stored again since: its time is not the roster's [{outcome.reason}]")
    return replace(report, outcomes=tuple(outcomes)), tuple(notes)


def _shows(node: Node, roster: Roster, entry: RosterEntry) -> bool:
    """Return whether a miner's bucket has the manifest and the payload of its entry, stored at any time."""
    window, author = roster.window, node.exchange.metagraph(roster.window).by_hotkey(entry.hotkey)
    if author is None:
        return False
    try:
        store = node.buckets.reader(author)
        key = window_key(Kind.MANIFEST, window, entry.uid)
        found = read_signed(store, key, Manifest, network=node.exchange.network, author=author, window=window)
        if found is None or found.body != Submission.listed(roster, entry).manifest:
            return False
        data = store.get(window_key(Kind.GRADIENT, window, entry.uid), max_bytes=entry.payload_bytes)
        node.cache.admit(data, entry.payload_sha256, window=window, uid=entry.uid, hotkey=entry.hotkey)
    except PermanentError:
        return False
    return True


def cache_payloads(node: Node, window: int, payloads: Mapping[int, str]) -> frozenset[int]:
    """Bring payloads (uid -> hash) of a window from the miners' buckets to the cache; return the uids without one."""
    missing, neurons = set(), node.exchange.metagraph(window)
    for uid, digest in payloads.items():
        author = neurons.by_uid(uid)
        try:
            if author is None:
                missing.add(uid)
            elif not node.cache.has(digest, window=window, uid=uid, hotkey=author.hotkey):
                key, most = window_key(Kind.GRADIENT, window, uid), node.layout.max_payload_bytes
                data = node.buckets.reader(author).get(key, max_bytes=most)
                node.cache.admit(data, digest, window=window, uid=uid, hotkey=author.hotkey)
        except PermanentError:
            missing.add(uid)
    return frozenset(missing)
