"""Every node audits the roster that was decided: bad publishers and miners are named, and honest nodes agree."""

from dataclasses import replace

import pytest

from lab.adversary.actors import PUBLISHERS, SilentPublisher
from lab.adversary.observe import read_report
from templar.agreement.ballot_box import decided_roster
from templar.agreement.voter import Settlement
from templar.audit.findings import Accusation, is_proven, named_by
from templar.audit.roster_audit import audit_window
from templar.errors import Reason
from templar.exchange.gather import GatherReport
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import seal
from templar.neuron.aggregator import Aggregator
from tests.support.network import Network, tiny


@pytest.fixture(scope="module")
def publishing(tmp_path_factory):
    networks = []

    def build(kind=Aggregator, num_miners=3):
        hparams, kinds = tiny(peers={"gather_peer_count": 8}), {"aggregator": kind}
        folder = tmp_path_factory.mktemp("audited")
        networks.append(Network(folder, hparams, actors=["honest"] * num_miners, num_validators=2, kinds=kinds))
        return networks[-1]

    yield build
    for network in networks:
        network.stop()


@pytest.fixture(scope="module")
def network(publishing):
    """An honest network after four windows; audits of the newest by hand, each by another node, are added to it."""
    network = publishing()
    network.run([1, 2, 3, 4])
    return network


@pytest.fixture(scope="module")
def omitting(publishing):
    """A network after one window, whose publisher left two of six miners out: no more than may be."""
    network = publishing(PUBLISHERS["omitting_publisher"], 6)
    network.run([1])
    return network


def reports(network, window):
    """The nodes' reports on a window, as an observer reads them."""
    observer = network.world.observer()
    neurons = observer.exchange.metagraph(window).neurons
    found = [read_report(observer.exchange, neuron, window) for neuron in neurons if neuron.uid != 0]
    observer.stop()
    return [report for report in found if report is not None]


def findings(network, window):
    return [finding for report in reports(network, window) for finding in report.findings]


def accused(network, made):
    known = network.aggregator.exchange.network
    return [
        Accusation(str(report.uid), finding, is_proven(finding, report, known))
        for report in made
        for finding in report.findings
    ]


def uid(node):
    return node.exchange.identity(1).uid


def decided(node, window):
    found = decided_roster(node.exchange, window)
    return Settlement(window, found[0], "00" * 64), found[0]


def test_an_honest_network_reports_nothing(network):
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
def test_a_bad_publisher_is_named_and_the_honest_nodes_agree(publishing, kind, reason, proven):
    network = publishing(PUBLISHERS[kind])
    bad = network.aggregator
    network.run([1, 2])
    others = [node for node in network.nodes.values() if node is not bad]
    assert len({node.state.root for node in others}) == 1
    assert all(len(node.journal.roots(1, 2)) == 2 for node in others)
    made = [report for window in (1, 2) for report in reports(network, window)]
    found = [(finding, report) for report in made for finding in report.findings if finding.window == 1]
    assert {report.uid for _, report in found} >= {uid(node) for node in others}
    assert {finding.reason for finding, _ in found} == {reason}
    accusations = [each for each in accused(network, made) if each.finding.window == 1]
    assert named_by(accusations, len(others)) == (uid(bad),)
    shown = [is_proven(finding, report, bad.exchange.network) for finding, report in found]
    assert all(shown) if proven else not any(shown)
    listed = {entry.uid for entry in decided(others[0], 1)[1].entries}
    assert listed == {uid(miner) for miner in network.miners}, "no honest submission is lost"


def test_a_publisher_that_leaves_miners_out_is_named(omitting):
    """The decision is applied; each node says whose payload it saw, and together they point at the publisher."""
    bad = omitting.aggregator
    assert len({node.state.root for node in omitting.nodes.values()}) == 1
    left_out = sorted(uid(miner) for miner in omitting.miners)[:2]
    found = findings(omitting, 1)
    assert {finding.reason for finding in found} == {Reason.ROSTER_OMITS}
    pairs = {tuple(suspect.uid for suspect in finding.suspects) for finding in found}
    assert pairs == {(uid(bad), each) for each in left_out}
    assert named_by(accused(omitting, reports(omitting, 1)), len(omitting.nodes)) == (uid(bad),)
    report = reports(omitting, 1)[0]
    kinds = [report.exhibits[place].kind for place in report.findings[0].exhibits]
    assert kinds == ["roster", "manifest"], "the roster without it, and its author's manifest"


def test_a_published_report_is_not_changed(omitting):
    """A restart in the audit finds its report, even if it would see less now."""
    miner = omitting.miners[0]
    key = window_key(Kind.REPORT, 1, uid(miner))
    before = omitting.objects(miner)[key]
    settlement, _ = decided(miner, 1)
    gathered = miner.gather(1)
    audit_window(miner, gathered, settlement)
    audit_window(miner, GatherReport(1, gathered.outcomes[:1]), settlement)
    assert omitting.objects(miner)[key] == before


class ReformedPublisher(SilentPublisher):
    """Silent in the first window, honest from then on."""

    def publish(self, window, report, rank, slot):
        if window > 1:
            Aggregator.publish(self, window, report, rank, slot)


def test_a_publisher_that_comes_back_to_honesty_is_not_reported_again(publishing):
    network = publishing(ReformedPublisher)
    network.run([1, 2])
    assert {finding.reason for finding in findings(network, 1)} == {Reason.ROSTER_MISSING}
    assert findings(network, 2) == []


def test_a_miner_that_signs_two_manifests_is_convicted(network):
    """It commits to one and shows it to the aggregator; a later reader sees another one under its commitment."""
    miner, reader = network.miners[0], network.miners[1]
    gathered = reader.gather(4)
    outcome = gathered.outcome(uid(miner))
    other = outcome.submission.manifest.model_copy(update={"root_before": "00" * 32})
    signature = seal(other, network.member(miner).hotkey).signature
    shown = replace(outcome.submission, manifest=other, manifest_signature=signature)
    outcomes = tuple(replace(each, submission=shown) if each is outcome else each for each in gathered.outcomes)
    audit = audit_window(reader, GatherReport(4, outcomes), decided(miner, 4)[0])
    assert [finding.reason for finding in audit.findings] == [Reason.MANIFEST_EQUIVOCATION]
    report = next(report for report in reports(network, 4) if report.uid == uid(reader))
    assert is_proven(report.findings[0], report, reader.exchange.network)
    assert named_by(accused(network, [report]), len(network.nodes)) == (uid(miner),), "one proof is enough"


def test_a_payload_in_the_roster_that_did_not_count_here_has_two_suspects(network):
    reader = network.miners[2]
    settlement, roster = decided(reader, 4)
    late, busy, *others = reader.gather(4).outcomes
    late = replace(late, submission=None, reason=Reason.REVEAL_LATE, detail="too late\n\x1b[31m")
    busy = replace(busy, submission=None, reason=Reason.STORE_BUSY)
    audit = audit_window(reader, GatherReport(4, (late, busy, *others)), settlement)
    assert [finding.reason for finding in audit.findings] == [Reason.ROSTER_INCLUDES], "a busy store says nothing"
    assert [suspect.uid for suspect in audit.findings[0].suspects] == [roster.uid, late.uid]
    assert audit.findings[0].detail.isprintable()
    report = next(report for report in reports(network, 4) if report.uid == uid(reader))
    assert named_by(accused(network, [report]), 1) == ()
    assert audit.summary == " [roster_includes]"


def test_a_window_that_is_settled_long_after_it_was_over_is_not_audited(network):
    """Its miners' objects may have expired: their absence proves nothing."""
    reader = network.miners[0]
    gone = tuple(replace(each, submission=None, reason=Reason.COMMIT_MISSING) for each in reader.gather(1).outcomes)
    assert audit_window(reader, GatherReport(1, gone), decided(reader, 1)[0]).findings == ()
    assert findings(network, 1) == []


def test_a_bucket_that_one_node_cannot_read_blames_nobody(publishing):
    """The decision is applied by all."""
    network = publishing()
    network.blind(network.validator, network.miners[0])
    network.run([1, 2])
    assert len({node.state.root for node in network.nodes.values()}) == 1
    assert findings(network, 1) == findings(network, 2) == [], "a store that fails says nothing about others"


@pytest.mark.parametrize("left", [0, 1])
def test_a_roster_that_leaves_most_out_is_voted_down_and_reported(publishing, monkeypatch, left):
    """The next publisher's holds: no honest payload is lost, and those who voted say why."""
    network = publishing()
    own = type(network.aggregator).chosen
    monkeypatch.setattr(network.aggregator, "chosen", lambda report: own(network.aggregator, report)[:left])
    network.run([1])
    assert {node.state.mark.null for node in network.nodes.values()} == {False}
    listed = {entry.uid for entry in decided(network.validator, 1)[1].entries}
    assert listed == {uid(miner) for miner in network.miners}
    found = [finding for finding in findings(network, 1) if finding.reason == Reason.ROSTER_OMITS]
    assert {tuple(suspect.uid for suspect in finding.suspects) for finding in found} == {(uid(network.aggregator),)}
