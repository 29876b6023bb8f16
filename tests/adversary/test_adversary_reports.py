"""Findings: which exhibits are a proof, and whom the reports of a window point to."""

import json

import pytest
from pydantic import ValidationError

from lab.adversary.actors import PUBLISHERS
from lab.adversary.reports import Accusation, is_proven, named_by, read_report
from templar.agreement.findings import Exhibit, Finding, Suspect
from templar.errors import Reason
from templar.exchange.objects import Roster
from templar.exchange.signed import Sealed
from tests.support.network import tiny


@pytest.fixture(scope="module")
def proof(build_shared):
    """A finding with a proof of two rosters, its report, the network's identity, and an innocent suspect."""
    kinds, windows = {"aggregator": PUBLISHERS["two_faced_publisher"]}, range(1, 5)
    network = build_shared(tiny(peers={"gather_peer_count": 8}), kinds=kinds, windows=windows)
    exchange, innocent = network.validator.exchange, network.member("validator-2")
    neuron = network.miners[0].exchange.identity(windows[-1])
    report = next(found for window in windows if (found := read_report(exchange, neuron, window)) is not None)
    return report.findings[0], report, exchange.network, Suspect(uid=innocent.uid, hotkey=innocent.hotkey.address)


def test_a_proof_needs_every_part_of_it(proof):
    finding, report, network, innocent = proof
    assert is_proven(finding, report, network)
    first = finding.exhibits[0]
    for changes in (
        {"exhibits": (first,)},
        {"exhibits": (first, first)},
        {"exhibits": (first, 400)},
        {"exhibits": ()},
        {"suspects": (innocent,)},
        {"suspects": (*finding.suspects, innocent)},
        {"reason": Reason.MANIFEST_EQUIVOCATION.value},
        {"reason": Reason.ROSTER_OMITS.value},
        {"window": finding.window + 1},
    ):
        assert not is_proven(finding.model_copy(update=changes), report, network), changes


def test_forged_exhibits_prove_nothing(proof):
    finding, report, network, _ = proof
    true = report.exhibits[finding.exhibits[0]]
    roster = Roster.model_validate(json.loads(true.text)["body"], strict=False)
    forged = Exhibit.of(Sealed(roster.model_copy(update={"previous": "ab" * 32}), "00" * 64))
    between = finding.model_copy(update={"exhibits": (0, 1)})
    for other in (true, forged, Exhibit(kind="roster", text="{}")):
        assert not is_proven(between, report.model_copy(update={"exhibits": (true, other)}), network)


def finding_of(*uids):
    suspects = tuple(Suspect(uid=each, hotkey="5" * 48) for each in uids)
    return Finding(window=1, reason="roster_omits", suspects=suspects, detail="", exhibits=())


def accusations(reporters, *suspects, is_proven=False):
    return [Accusation(reporter, finding_of(*uids), is_proven=is_proven) for uids in suspects for reporter in reporters]


@pytest.mark.parametrize(
    ("suspects", "named"),
    [
        ([], ()),
        ([(1,)], (1,)),
        ([(1, 5), (1, 5)], ()),
        ([(1, 5), (1, 6)], (1,)),
        ([(1, 5), (1, 6), (5,)], (5,)),
        ([(1, 5), (1, 6), (2, 5), (3,)], (3,)),
        ([(1, 5), (2, 5), (3, 5)], (5,)),
        ([(1, 5), (1, 6), (1, 7), (2, 7), (2, 8), (2, 9)], (1, 2)),
    ],
)
def test_reports_of_more_than_half_name_the_suspect_they_have_in_common(suspects, named):
    made = accusations("abc", *suspects)
    assert named_by(made, 5) == named
    assert named_by(made, 6) == (), "half of the nodes are not enough"


def test_few_liars_name_nobody_and_hide_nobody():
    lies = accusations("d", (2,), (5,), (5, 6), (6, 5), (1, 7))
    assert named_by([*accusations("abc", (1, 5), (1, 6)), *lies], 4) == (1,)
    assert named_by([*lies, *accusations("d", (3,), is_proven=True)], 4) == (3,)


def test_a_finding_names_a_suspect_once():
    with pytest.raises(ValidationError, match="named twice"):
        finding_of(4, 4)
