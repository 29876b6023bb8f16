"""The gauntlet sees an answer of `templar why` that differs from the evidence, or explains nothing."""

from dataclasses import replace

from deployments.why import Answer, Point, explain
from lab.gauntlet import asking
from templar.errors import Reason
from tests.support.facts import absent, concluded, revealed, standing_of, veteran


def test_what_an_answer_says_otherwise_is_a_difference():
    evidence = concluded(revealed(3, 0.2), absent(4, Reason.WRONG_HASH), standing=standing_of([veteran(3)]))
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
