"""Everybody audits what was decided: bad publishers and miners are named, and the honest nodes end on one state."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from templar.adversary.actors import PUBLISHERS, SilentPublisher
from templar.agreement.decisions import decided_roster
from templar.agreement.slots import Settlement
from templar.audit.findings import Accusation, Exhibit, Finding, Report, Suspect, is_proven, named_by, read_report
from templar.audit.roster_audit import audit_window
from templar.chain.base import NeuronInfo
from templar.errors import Reason, TransientError
from templar.exchange.gather import GatherReport
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Roster
from templar.exchange.signed import Sealed, seal
from templar.neuron.aggregator import Aggregator
from templar.neuron.node import Node
from templar.store.base import ObjectStore
from tests.support.network import Network, tiny

MINERS = 4
WINDOWS = [1, 2]

Publishing = Callable[[type[Aggregator]], Network]
"""From a kind of aggregator to a network that has it."""


@pytest.fixture
def publishing(tmp_path: Path) -> Iterator[Publishing]:
    networks = []

    def build(kind: type[Aggregator]) -> Network:
        hparams, kinds = tiny(peers={"gather_peer_count": 8}), {"aggregator": kind}
        networks.append(Network(tmp_path, hparams, actors=["honest"] * MINERS, num_validators=2, kinds=kinds))
        return networks[-1]

    yield build
    for network in networks:
        network.stop()


@pytest.fixture
def network(publishing: Publishing) -> Network:
    return publishing(Aggregator)


def honest(network: Network, *bad: Node) -> list[Node]:
    return [node for node in network.nodes.values() if node not in bad]


def reports(network: Network, window: int) -> list[Report]:
    """What the nodes reported on a window, as a stranger reads it."""
    stranger = network.world.observer()
    neurons = stranger.exchange.metagraph(window).neurons
    found = [read_report(stranger.exchange, neuron, window) for neuron in neurons if neuron.uid != 0]
    stranger.stop()
    return [report for report in found if report is not None]


def findings(network: Network, window: int) -> list[Finding]:
    return [finding for report in reports(network, window) for finding in report.findings]


def accused(network: Network, made: list[Report]) -> list[Accusation]:
    """What reports say, as a stranger reads them."""
    known = network.aggregator.exchange.network
    return [
        Accusation(str(report.uid), finding, is_proven(finding, report, known))
        for report in made
        for finding in report.findings
    ]


def uid(node: Node) -> int:
    return node.exchange.identity(1).uid


def test_an_honest_network_reports_nothing(network: Network) -> None:
    network.run(WINDOWS)
    assert findings(network, 1) == findings(network, 2) == []


@pytest.mark.parametrize(
    ("kind", "reason", "proven"),
    [
        ("silent_publisher", Reason.ROSTER_MISSING, False),
        ("late_publisher", Reason.ROSTER_LATE, False),
        ("forging_publisher", Reason.BAD_SIGNATURE, True),
        ("two_faced_publisher", Reason.ROSTER_EQUIVOCATION, True),
    ],
)
def test_a_bad_publisher_is_named_and_the_honest_nodes_agree(
    publishing: Publishing, kind: str, reason: Reason, proven: bool
) -> None:
    network = publishing(PUBLISHERS[kind])
    bad = network.aggregator
    network.run([*WINDOWS, 3])
    others = honest(network, bad)
    assert len({node.state.root for node in others}) == 1
    assert all(len(node.journal.roots(1, 3)) == 3 for node in others)
    made = [report for window in (*WINDOWS, 3) for report in reports(network, window)]
    for window in WINDOWS:
        found = [(finding, report) for report in made for finding in report.findings if finding.window == window]
        assert {report.uid for _, report in found} >= {uid(node) for node in others}
        assert {finding.reason for finding, _ in found} == {reason}
        accusations = accused(network, [report for report in made if report.window in (window, window + 1)])
        assert named_by([each for each in accusations if each.finding.window == window], len(others)) == (uid(bad),)
        shown = [is_proven(finding, report, bad.exchange.network) for finding, report in found]
        assert all(shown) if proven else not any(shown)
        decided = decided_roster(others[0].exchange, window)
        assert decided is not None
        listed = {entry.uid for entry in decided[0].entries}
        assert listed == {uid(miner) for miner in network.miners}, "no honest submission is lost"


def test_a_publisher_that_leaves_miners_out_is_named(publishing: Publishing) -> None:
    """What was decided is applied; each node says whose payload it saw, and together they point at the publisher."""
    network = publishing(PUBLISHERS["omitting_publisher"])
    bad = network.aggregator
    network.run(WINDOWS)
    assert len({node.state.root for node in network.nodes.values()}) == 1
    left_out = sorted(uid(miner) for miner in network.miners)[:2]
    for window in WINDOWS:
        found = findings(network, window)
        assert {finding.reason for finding in found} == {Reason.ROSTER_OMITS}
        pairs = {tuple(suspect.uid for suspect in finding.suspects) for finding in found}
        assert pairs == {(uid(bad), each) for each in left_out}
        assert named_by(accused(network, reports(network, window)), len(network.nodes)) == (uid(bad),)
        report = reports(network, window)[0]
        kinds = [report.exhibits[place].kind for place in report.findings[0].exhibits]
        assert kinds == ["roster", "manifest"], "the roster without it, and what its author signed"


class ReformedPublisher(SilentPublisher):
    """Silent in the first window, honest from then on."""

    def publish(self, window: int, report: GatherReport, rank: int) -> None:
        if window > WINDOWS[0]:
            Aggregator.publish(self, window, report, rank)


def test_a_publisher_that_comes_back_to_honesty_is_not_reported_again(publishing: Publishing) -> None:
    network = publishing(ReformedPublisher)
    network.run(WINDOWS)
    assert {finding.reason for finding in findings(network, 1)} == {Reason.ROSTER_MISSING}
    assert findings(network, 2) == []


def test_a_report_that_stands_is_not_changed(publishing: Publishing) -> None:
    """A restart in the audit finds its report, even if there is something else to see now."""
    network = publishing(PUBLISHERS["omitting_publisher"])
    bad = network.aggregator
    network.run([1])
    miner = network.miners[0]
    name = network.name(miner)
    key = window_key(Kind.REPORT, 1, uid(miner))
    before = network.objects(name)[key]
    found = decided_roster(miner.exchange, 1)
    assert found is not None
    gathered = miner.gather(1)
    audit_window(miner, gathered, Settlement(1, found[0], "00" * 64))
    audit_window(miner, GatherReport(1, gathered.outcomes[:1]), Settlement(1, found[0], "00" * 64))
    assert network.objects(name)[key] == before
    assert named_by(accused(network, reports(network, 1)), len(network.nodes)) == (uid(bad),)


def test_a_miner_that_signs_two_manifests_is_convicted(network: Network) -> None:
    """It commits to one and shows it to the aggregator; whoever looks later sees another one under its commitment."""
    network.run(WINDOWS)
    miner = network.miners[0]
    found = decided_roster(miner.exchange, 2)
    assert found is not None
    reader = network.miners[1]
    gathered = reader.gather(2)
    outcome = gathered.outcome(uid(miner))
    assert outcome is not None
    assert outcome.submission is not None
    other = outcome.submission.manifest.model_copy(update={"root_before": "00" * 32})
    signature = seal(other, network.member(network.name(miner)).hotkey).signature
    shown = replace(outcome.submission, manifest=other, manifest_signature=signature)
    outcomes = tuple(replace(each, submission=shown) if each is outcome else each for each in gathered.outcomes)
    audit = audit_window(reader, GatherReport(2, outcomes), Settlement(2, found[0], "00" * 64))
    assert [finding.reason for finding in audit.findings] == [Reason.MANIFEST_EQUIVOCATION]
    report = next(report for report in reports(network, 2) if report.uid == uid(reader))
    assert is_proven(report.findings[0], report, reader.exchange.network)
    assert named_by(accused(network, [report]), len(network.nodes)) == (uid(miner),), "one proof is enough"


def test_what_did_not_count_here_and_is_in_the_roster_has_two_suspects(network: Network) -> None:
    network.run(WINDOWS)
    found = decided_roster(network.miners[0].exchange, 2)
    assert found is not None
    reader = network.miners[1]
    gathered = reader.gather(2)
    late, busy, *others = gathered.outcomes
    late = replace(late, submission=None, reason=Reason.REVEAL_LATE, detail="too late\n\x1b[31m")
    busy = replace(busy, submission=None, reason=Reason.STORE_BUSY)
    audit = audit_window(reader, GatherReport(2, (late, busy, *others)), Settlement(2, found[0], "00" * 64))
    assert [finding.reason for finding in audit.findings] == [Reason.ROSTER_INCLUDES], "a busy store says nothing"
    assert [suspect.uid for suspect in audit.findings[0].suspects] == [found[1].uid, late.uid]
    assert audit.findings[0].detail.isprintable()
    assert named_by(accused(network, reports(network, 2)), 1) == ()
    assert audit.summary == " [roster_includes]"


def test_two_validators_that_saw_different_objects_end_on_one_root(network: Network) -> None:
    """One miner's bucket answers only some: what was decided is applied by all, and nobody is blamed for sure."""
    shy = network.name(network.miners[0])
    blind = network.validator
    account = network.member(shy).account_id
    _refuse(network, blind, account)
    network.run(WINDOWS)
    assert len({node.state.root for node in network.nodes.values()}) == 1
    assert findings(network, 1) == findings(network, 2) == [], "a store that fails says nothing about others"


def _refuse(network: Network, reader: Node, account: str) -> None:
    """Let one node fail to read one bucket."""
    real = reader.buckets.reader

    def reader_of(neuron: NeuronInfo) -> ObjectStore:
        store = real(neuron)
        if store.name == account:
            raise TransientError(Reason.STORE_UNREACHABLE, f"{account}: no route")
        return store

    reader.buckets.reader = reader_of  # type: ignore[method-assign]


def test_an_empty_roster_is_audited_like_any_other(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = network.aggregator
    monkeypatch.setattr(bad, "chosen", lambda report: [])
    network.run([1])
    assert {node.state.mark.null for node in network.nodes.values()} == {True}
    found = findings(network, 1)
    assert {finding.reason for finding in found} == {Reason.ROSTER_OMITS}
    assert {finding.suspects[0].uid for finding in found} == {uid(bad)}


def test_a_window_that_is_closed_long_after_it_was_over_is_not_audited(network: Network) -> None:
    """What its miners showed has expired: their absence proves nothing."""
    network.run([*WINDOWS, 3, 4])
    reader = network.miners[1]
    gathered = reader.gather(1)
    gone = tuple(replace(each, submission=None, reason=Reason.COMMIT_MISSING) for each in gathered.outcomes)
    found = decided_roster(reader.exchange, 1)
    assert found is not None
    audit = audit_window(reader, GatherReport(1, gone), Settlement(1, found[0], "00" * 64))
    assert audit.findings == ()
    assert findings(network, 1) == []


# What a stranger can check.


def convict(network: Network) -> Callable[[Finding, Report], bool]:
    return lambda finding, report: is_proven(finding, report, network.aggregator.exchange.network)


@pytest.fixture
def convicted(publishing: Publishing) -> tuple[Network, Report, Finding]:
    """A report with a proof of two rosters."""
    network = publishing(PUBLISHERS["two_faced_publisher"])
    network.run(WINDOWS)
    report = reports(network, 2)[0]
    return network, report, report.findings[0]


def test_a_proof_needs_every_part_of_it(convicted: tuple[Network, Report, Finding]) -> None:
    network, report, finding = convicted
    check = convict(network)
    assert check(finding, report)
    first = finding.exhibits[0]
    innocent = network.member(network.name(network.validator))
    framed = Suspect(uid=innocent.uid, hotkey=innocent.hotkey.address)
    for changes in (
        {"exhibits": (first,)},
        {"exhibits": (first, first)},
        {"exhibits": (first, 400)},
        {"exhibits": ()},
        {"suspects": (framed,)},
        {"suspects": (*finding.suspects, framed)},
        {"reason": Reason.MANIFEST_EQUIVOCATION.value},
        {"reason": Reason.ROSTER_OMITS.value},
    ):
        assert not check(finding.model_copy(update=changes), report), changes
    assert not check(finding.model_copy(update={"window": 2}), report)
    assert not check(finding, report.model_copy(update={"exhibits": (report.exhibits[first],) * 2}))


def test_exhibits_that_somebody_else_made_up_prove_nothing(convicted: tuple[Network, Report, Finding]) -> None:
    network, report, finding = convicted
    roster = Roster.model_validate(json.loads(report.exhibits[finding.exhibits[0]].text)["body"], strict=False)
    forged = Sealed(roster.model_copy(update={"previous": "ab" * 32}), "00" * 64)
    made_up = (report.exhibits[finding.exhibits[0]], Exhibit.of(forged), Exhibit(kind="roster", text="{}"))
    for places in ((0, 1), (0, 2)):
        changed = finding.model_copy(update={"exhibits": places})
        assert not convict(network)(changed, report.model_copy(update={"exhibits": made_up}))


def finding_of(*uids: int) -> Finding:
    suspects = tuple(Suspect(uid=each, hotkey="5" * 48) for each in uids)
    return Finding(window=1, reason="roster_omits", suspects=suspects, detail="", exhibits=())


@pytest.mark.parametrize(
    ("suspects", "named"),
    [
        ([], ()),
        ([(1,)], (1,)),
        ([(1, 5)], ()),
        ([(1, 5), (1, 5)], ()),
        ([(1, 5), (1, 6)], (1,)),
        ([(1, 5), (1, 6), (5,)], (5,)),
        ([(1, 5), (1, 6), (2, 5), (3,)], (3,)),
        ([(1, 5), (2, 5), (3, 5)], (5,)),
        ([(1, 5), (1, 6), (1, 7), (2, 7), (2, 8), (2, 9)], (1, 2)),
    ],
)
def test_who_explains_most_is_named(suspects: list[tuple[int, ...]], named: tuple[int, ...]) -> None:
    made = [Accusation(reporter, finding_of(*uids), is_proven=False) for uids in suspects for reporter in "abc"]
    assert named_by(made, 5) == named
    assert named_by(made, 6) == (), "half of the nodes are not enough"


def test_few_liars_name_nobody_and_hide_nobody() -> None:
    honest = [Accusation(reporter, finding_of(1, other), is_proven=False) for reporter in "abc" for other in (5, 6)]
    lies = [Accusation("d", finding_of(*uids), is_proven=False) for uids in ((2,), (5,), (5, 6), (6, 5), (1, 7))]
    assert named_by([*honest, *lies], 4) == (1,)
    assert named_by([*lies, Accusation("d", finding_of(3), is_proven=True)], 4) == (3,)


def test_nobody_is_suspected_twice_in_a_finding() -> None:
    with pytest.raises(ValidationError, match="named twice"):
        finding_of(4, 4)
