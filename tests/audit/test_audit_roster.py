"""Every node audits the roster that was decided: bad publishers and miners are named, and honest nodes agree."""

from dataclasses import replace

import pytest

from lab.adversary.actors import PUBLISHERS
from lab.adversary.reports import Accusation, is_proven, named_by, read_report
from templar.agreement.ballot_box import decided_roster
from templar.agreement.voter import Settlement
from templar.errors import Reason
from templar.exchange.gather import GatherReport
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import Sealed, seal
from templar.neuron.aggregator import Aggregator
from tests.support.network import tiny


@pytest.fixture(scope="module")
def publishing(build_shared):
    """Builds networks with a kind of aggregator, which run some windows."""

    def start(kind=Aggregator, windows=(), num_miners=3):
        hparams, kinds = tiny(peers={"gather_peer_count": 8}), {"aggregator": kind}
        return build_shared(hparams, actors=["honest"] * num_miners, num_validators=2, kinds=kinds, windows=windows)

    return start


@pytest.fixture(scope="module")
def network(publishing):
    """An honest network after four windows; audits of the newest by hand, each by another node, are added to it."""
    return publishing(windows=[1, 2, 3, 4])


@pytest.fixture(scope="module")
def omitting(publishing):
    """A network after one window, whose publisher left two of six miners out: no more than may be."""
    return publishing(PUBLISHERS["omitting_publisher"], [1], 6)


def reports(network, *windows):
    """The nodes' reports on windows."""
    exchange = network.miners[-1].exchange
    neurons = [neuron for neuron in exchange.metagraph(windows[-1]).neurons if neuron.uid != 0]
    found = [read_report(exchange, neuron, window) for window in windows for neuron in neurons]
    return [report for report in found if report is not None]


def accusations(network, *windows):
    known = network.aggregator.exchange.network
    return [
        Accusation(str(report.uid), finding, is_proven(finding, report, known))
        for report in reports(network, *windows)
        for finding in report.findings
    ]


def uids(network, nodes):
    return {network.uid(node) for node in nodes}


def decided(node, window):
    found = decided_roster(node.exchange, window)
    return Settlement(window, Sealed(found[0], "00" * 64)), found[0]


def listed(node, window):
    return {entry.uid for entry in decided(node, window)[1].entries}


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
    network = publishing(PUBLISHERS[kind], [1, 2])
    bad = network.aggregator
    others = [node for node in network.nodes.values() if node is not bad]
    assert len({node.state.root for node in others}) == 1
    assert all(len(node.journal.roots(1, 2)) == 2 for node in others)
    made = [each for each in accusations(network, 1, 2) if each.finding.window == 1]
    assert {int(each.reporter) for each in made} >= uids(network, others)
    assert {(each.finding.reason, each.is_proven) for each in made} == {(reason, proven)}
    assert named_by(made, len(others)) == (network.uid(bad),)
    assert listed(others[0], 1) == uids(network, network.miners), "no honest submission is lost"


def test_a_publisher_that_leaves_miners_out_is_named(omitting):
    """The decision is applied; each node says whose payload it saw, and together they point at the publisher."""
    bad, made = omitting.uid(omitting.aggregator), accusations(omitting, 1)
    assert len({node.state.root for node in omitting.nodes.values()}) == 1
    left_out = sorted(uids(omitting, omitting.miners))[:2]
    assert {each.finding.reason for each in made} == {Reason.ROSTER_OMITS}
    pairs = {tuple(suspect.uid for suspect in each.finding.suspects) for each in made}
    assert pairs == {(bad, each) for each in left_out}
    assert named_by(made, len(omitting.nodes)) == (bad,)
    report = reports(omitting, 1)[0]
    kinds = [report.exhibits[place].kind for place in report.findings[0].exhibits]
    assert kinds == ["roster", "manifest"], "the roster without it, and its author's manifest"


def test_a_published_report_is_not_changed(omitting):
    """A restart in the audit finds its report, even if it would see less now."""
    miner = omitting.miners[0]
    key = window_key(Kind.REPORT, 1, omitting.uid(miner))
    before = omitting.objects(miner)[key]
    gathered = miner.gather(1)
    for outcomes in (gathered.outcomes, gathered.outcomes[:1]):
        miner.close_window(GatherReport(1, outcomes), decided(miner, 1)[0])
    assert omitting.objects(miner)[key] == before


def audited_by(reader, outcomes, window=4):
    """What a node concludes that gathered this."""
    return reader.close_window(GatherReport(window, tuple(outcomes)), decided(reader, window)[0])


def test_a_miner_that_signs_two_manifests_is_convicted(network):
    """It commits to one and shows it to the aggregator; a later reader sees another one under its commitment."""
    miner, reader = network.miners[0], network.miners[1]
    gathered = reader.gather(4)
    outcome = gathered.outcome(network.uid(miner))
    other = outcome.submission.manifest.model_copy(update={"root_before": "00" * 32})
    signature = seal(other, network.member(miner).hotkey).signature
    shown = replace(outcome.submission, manifest=other, manifest_signature=signature)
    outcomes = [replace(each, submission=shown) if each is outcome else each for each in gathered.outcomes]
    assert [finding.reason for finding in audited_by(reader, outcomes).findings] == [Reason.MANIFEST_EQUIVOCATION]
    (found,) = [each for each in accusations(network, 4) if each.reporter == str(network.uid(reader))]
    assert found.is_proven
    assert named_by([found], len(network.nodes)) == (network.uid(miner),), "one proof is enough"


def test_a_payload_in_the_roster_that_did_not_count_here_has_two_suspects(network):
    reader = network.miners[2]
    late, busy, *others = reader.gather(4).outcomes
    late = replace(late, submission=None, reason=Reason.REVEAL_LATE, detail="too late\n\x1b[31m")
    busy = replace(busy, submission=None, reason=Reason.STORE_BUSY)
    audit = audited_by(reader, [late, busy, *others])
    assert [finding.reason for finding in audit.findings] == [Reason.ROSTER_INCLUDES], "a busy store says nothing"
    assert [suspect.uid for suspect in audit.findings[0].suspects] == [decided(reader, 4)[1].uid, late.uid]
    assert audit.findings[0].detail.isprintable()
    assert audit.summary == " [roster_includes]"


def test_an_honest_network_reports_nothing_nor_what_is_settled_long_after_a_window(network):
    """Then its miners' objects may have expired: their absence proves nothing."""
    reader = network.miners[0]
    gone = [replace(each, submission=None, reason=Reason.COMMIT_MISSING) for each in reader.gather(1).outcomes]
    assert audited_by(reader, gone, 1).findings == ()
    assert accusations(network, 1, 2) == []


@pytest.mark.parametrize("left", [0, 1])
def test_a_roster_that_leaves_most_out_is_voted_down_and_reported(publishing, monkeypatch, left):
    """The next publisher's holds: no honest payload is lost, and those who voted say why."""
    network = publishing()
    own = type(network.aggregator).chosen
    monkeypatch.setattr(network.aggregator, "chosen", lambda report: own(network.aggregator, report)[:left])
    network.run([1])
    assert {node.state.mark.null for node in network.nodes.values()} == {False}
    assert listed(network.validator, 1) == uids(network, network.miners)
    found = [each.finding for each in accusations(network, 1) if each.finding.reason == Reason.ROSTER_OMITS]
    assert {suspect.uid for finding in found for suspect in finding.suspects} == uids(network, [network.aggregator])
