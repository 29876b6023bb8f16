"""Read the reports of a network as a stranger does: which findings are proofs, and whom the rest points to.

docs/protocol.md 8 has the rules of proofs; no node acts on the report of another.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from templar.agreement.ballot_rules import Said, convicting
from templar.agreement.findings import Exhibit, Finding, Report
from templar.agreement.roster import check_signatures
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest, Roster, Word
from templar.exchange.signed import Network, WindowBody, check_author, check_window, read_signed, unseal
from templar.neuron.node import Node

log = logging.getLogger(__name__)

T = TypeVar("T", bound=WindowBody)


@dataclass(frozen=True)
class Accusation:
    """A finding of a public report, its reporter's hotkey, and whether its exhibits alone convict the suspect."""

    reporter: str
    finding: Finding
    is_proven: bool


def read_accusations(stranger: Node, windows: Sequence[int], names: Mapping[str, str]) -> list[Accusation]:
    """The findings of the windows' public reports. A report that is not legal, or cannot be read, accuses nobody.

    `stranger` is a node without a hotkey that took no part; it is stopped. `names` are the nodes' names by hotkey.
    """
    try:
        return [
            Accusation(names[neuron.hotkey], finding, is_proven(finding, report, stranger.exchange.network))
            for window in windows
            for neuron in stranger.exchange.metagraph(window).neurons
            if (report := _report(stranger.exchange, neuron, window)) is not None
            for finding in report.findings
        ]
    finally:
        stranger.stop()


def read_report(exchange: NetworkView, neuron: NeuronInfo, window: int) -> Report | None:
    """Return the report of a node on a window; None without one.

    Raises:
        RejectedError: The report is not legal.
        PermanentError: The node's bucket refuses to be read.
        TransientError: The store failed.
    """
    store = exchange.buckets.reader(neuron)
    key = window_key(Kind.REPORT, window, neuron.uid)
    found = read_signed(store, key, Report, network=exchange.network, author=neuron, window=window)
    return None if found is None else found.body


def _report(exchange: NetworkView, neuron: NeuronInfo, window: int) -> Report | None:
    try:
        return read_report(exchange, neuron, window)
    except (PermanentError, TransientError) as error:
        log.info("window %d: the report of uid %d: %s", window, neuron.uid, error)
        return None


def is_proven(finding: Finding, report: Report, network: Network) -> bool:
    """Return whether a finding's exhibits alone convict its suspect.

    Proofs are two different rosters, or two different manifests, that one hotkey signed for one window, two words of it
    that no honest validator signs both of, and a roster that names a payload which its author never signed.
    """
    check = _PROOFS.get(finding.reason)
    if check is None or len(finding.suspects) != 1 or max(finding.exhibits, default=0) >= len(report.exhibits):
        return False
    try:
        return check(_Trial(finding, network), [report.exhibits[place] for place in finding.exhibits])
    except RejectedError:
        return False


def named_by(accusations: Iterable[Accusation], num_nodes: int) -> tuple[int, ...]:
    """Return the uids that the reports on a window point to.

    This points, and is no verdict: miners that together show one object to a publisher and another to everybody else
    look like a publisher that leaves them out. The reports of `num_nodes` nodes were looked for.
    """
    reporters: dict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    named: set[int] = set()
    for each in accusations:
        uids = tuple(suspect.uid for suspect in each.finding.suspects)
        reporters[each.finding.reason, uids].add(each.reporter)
        if each.is_proven:
            named.update(uids)
    # Proofs name their suspect. Of findings that more than half of the nodes report, those with one suspect name it...
    suspects = {uids for (_, uids), who in reporters.items() if 2 * len(who) > num_nodes}
    named.update(uids[0] for uids in suspects if len(uids) == 1)
    # ...and of two suspects the one that more such findings have in common; nobody, where they point to both alike.
    while unexplained := [uids for uids in suspects if named.isdisjoint(uids)]:
        counts = Counter(uid for uids in unexplained for uid in uids)
        most = max(counts.values())
        leading = {uid for uid, count in counts.items() if count == most}
        if any(leading.issuperset(uids) for uids in unexplained):
            break
        named |= leading
    return tuple(sorted(named))


@dataclass(frozen=True)
class _Trial:
    """Opens the exhibits of a finding."""

    finding: Finding
    network: Network

    def open(self, exhibit: Exhibit, body_type: type[T]) -> T:
        """Return an exhibit that the suspect signed for the finding's window.

        Raises:
            RejectedError: It is not such an object.
        """
        body, suspect = unseal(exhibit.text.encode(), body_type).body, self.finding.suspects[0]
        check_author(body, network=self.network, uid=suspect.uid, hotkey=suspect.hotkey)
        check_window(body, self.finding.window)
        return body

    def are_two(self, exhibits: list[Exhibit], body_type: type[T]) -> bool:
        """Return whether the exhibits are two different objects."""
        return len({self.open(exhibit, body_type).digest for exhibit in exhibits}) == 2


def _unsigned_entry(trial: _Trial, exhibits: list[Exhibit]) -> bool:
    for exhibit in exhibits:
        roster = trial.open(exhibit, Roster)
        try:
            check_signatures(roster)
        except RejectedError:
            return True
    return False


def _double_words(trial: _Trial, exhibits: list[Exhibit]) -> bool:
    words = [Said.of(trial.open(exhibit, Word)) for exhibit in exhibits]
    return bool(convicting(words))


_PROOFS: dict[str, Callable[[_Trial, list[Exhibit]], bool]] = {
    Reason.ROSTER_EQUIVOCATION: lambda trial, exhibits: trial.are_two(exhibits, Roster),
    Reason.MANIFEST_EQUIVOCATION: lambda trial, exhibits: trial.are_two(exhibits, Manifest),
    Reason.WORD_EQUIVOCATION: _double_words,
    Reason.BAD_SIGNATURE: _unsigned_entry,
}
