"""The gauntlet sees an answer of `templar why` that differs from the evidence, or explains nothing."""

from dataclasses import replace

import pytest

from deployments.why import Answer, Point, explain
from lab.gauntlet import asking
from templar.errors import Reason
from templar.hparams import load_hparams
from templar.scoring.conclude import conclude
from tests.support.facts import AUTHOR, absent, revealed, standing_of, veteran, window_of


@pytest.fixture
def evidence():
    window = window_of(revealed(3, 0.2), absent(4, Reason.WRONG_HASH))
    return conclude(window, standing_of([veteran(3)]), load_hparams("local"), AUTHOR)


def test_what_an_answer_says_otherwise_is_a_difference(evidence):
    answers = {uid: Answer(2, evidence.digest, explain(evidence, uid)) for uid in (3, 4)}
    assert [list(asking.differences(answers[uid], evidence, uid)) for uid in (3, 4)] == [[], []]
    assert list(asking.differences(replace(answers[3], evidence="ab" * 32), evidence, 3)) == [
        "the hash of the evidence"
    ]
    for one, kept in ((answers[3], None), (replace(answers[3], evidence=None), evidence)):
        assert list(asking.differences(one, kept, 3)) == ["whether there is evidence"]
    for uid, what, changed, difference in (
        (3, "weight", Point("weight", "0.9999"), "the weight"),
        (3, "roster", Point("roster", "not applied"), "whether the payload was applied"),
        (3, "score", Point("score", "0.2", Reason.INDEX_OVERLAP), "the discount"),
        (4, "payload", Point("payload", "none counts", Reason.WRONG_SIZE), "why no payload counts"),
        (4, "penalty", Point("penalty", "invalid", Reason.DESYNC), "the penalties"),
    ):
        points = tuple(changed if point.what == what else point for point in answers[uid].points)
        assert list(asking.differences(replace(answers[uid], points=points), evidence, uid)) == [difference]


def test_an_answer_without_a_reason_for_nothing_is_none(evidence):
    whole = Answer(2, evidence.digest, explain(evidence, 4))
    assert asking.is_answered(whole)
    assert asking.is_answered(Answer(2, None, (Point("evidence", "none", Reason.EVIDENCE_MISSING),)))
    unexplained = tuple(replace(point, reason=None) for point in whole.points if point.what != "penalty")
    assert not asking.is_answered(replace(whole, points=unexplained))
    assert not asking.is_answered(Answer(2, None, ()))


def test_what_is_wrong_with_an_answer_is_told_of_its_miner_alone():
    right = asking.Asked(3, 1, 0.2, True, ())
    silent, wrong = (
        replace(right, uid=4, answered=False),
        replace(right, uid=5, differences=("the weight",), seconds=7.0),
    )
    questions = asking.Questions((right, silent, wrong))
    assert questions.summary == "why: 1 of 3 answers agree with the evidence, the slowest took 7.0 s"
    assert questions.problems([3]) == ()
    assert questions.problems([3, 4, 5]) == (
        "why uid 4 got what it got in window 1: no answer",
        "why uid 5 got what it got in window 1: says otherwise than the evidence: the weight",
    )
