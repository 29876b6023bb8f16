"""The leaderboard has the numbers of the evidence: gaps stay gaps, and hotkeys keep their past."""

import math
from statistics import fmean
from xml.etree import ElementTree

import pytest

from templar.hparams import load_hparams
from templar.reports.leaderboard import LINES, Leaderboard, draw
from templar.scoring.evidence import Evidence
from tests.support.facts import LOSS, absent, bucket, hotkey, measurement, revealed
from tests.support.published import evidences as evidences_of

HPARAMS = load_hparams("local")
SVG = "{http://www.w3.org/2000/svg}"


def evidences(windows):
    return evidences_of(windows, HPARAMS)


def good(uid, window):
    return revealed(uid, 0.1 - uid / 100 + window / 1000)


RUN = evidences(
    {
        window: [good(3, window), good(4, window), absent(5) if window % 2 else good(5, window), absent(6)]
        for window in (10, 11, 13, 14)
    }
)
"""Four windows; nobody measured window 12. Uid 5 misses every other one, uid 6 all."""


def with_finals(evidence, finals):
    miners = [
        record.model_copy(update={"after": record.after.model_copy(update={"final": finals[record.uid]})})
        for record in evidence.miners
    ]
    return evidence.model_copy(update={"miners": tuple(miners)})


def test_the_standings_are_those_of_the_evidence():
    newest, board = RUN[-1], Leaderboard(RUN).standings
    records = {record.uid: record for record in newest.miners}
    weights = {record.uid: record.weight for record in newest.weights}
    assert list(board.index) == [1, 2, 3, 4]
    assert list(board["final"]) == sorted((record.final for record in newest.miners), reverse=True)
    for row in board.to_dict("records"):
        uid, card = row["uid"], records[row["uid"]].after
        assert (row["hotkey"], row["weight"]) == (records[uid].facts.hotkey, weights.get(uid, 0.0))
        assert (row["sync"], row["average"], row["ordinal"]) == (card.sync, card.binary_average, card.rating.ordinal)
        past = [next(each for each in evidence.miners if each.uid == uid) for evidence in RUN]
        scores = [each.gradient_score for each in past if each.gradient_score is not None]
        assert (row["windows"], row["measured"]) == (4, len(scores))
        assert row["applied"] == sum(each.facts.applied for each in past)
        assert row["score"] == pytest.approx(fmean(scores)) if scores else math.isnan(row["score"])


def test_the_history_has_a_row_per_miner_and_leaves_out_what_was_not_measured():
    exact = evidences({10: [revealed(3, 0.1, measurement=measurement(0.05, 0.1)), revealed(4, None), absent(5)]})
    history = Leaderboard(exact).history
    rows = history.set_index("uid")
    assert (rows.loc[3, "curvature"], rows.loc[3, "predicted_gain"]) == pytest.approx((-0.05, 0.1))
    assert math.isnan(rows.loc[4, "curvature"])
    assert history["exact"].tolist() == [True, False, False]
    assert history["random_loss"].isna().tolist() == [False, False, True]
    assert history["reason"].tolist() == ["", "", "commit_missing"]


def test_penalties_are_counted_by_event_and_reason():
    slashes = Leaderboard(RUN).standings.set_index("uid")["slashes"]
    assert slashes[3] == slashes[4] == ""
    assert slashes[5] == "missing (commit_missing) x2"
    assert slashes[6].startswith("missing (commit_missing) x4")


def test_a_window_without_evidence_is_a_gap_and_not_zero():
    board = Leaderboard(RUN[::-1])  # in any order
    assert (board.cells(), board.burned) == (Leaderboard(RUN).cells(), HPARAMS.weights.burn_rate)
    assert board.summary.endswith(" miners earn, 0.5000 of the weight is burned")
    assert list(board.losses.index) == list(board.finals.index) == list(board.weights.index) == [10, 11, 12, 13, 14]
    assert math.isnan(board.losses[12])
    assert board.finals.loc[12].isna().all()
    assert board.weights.loc[12].isna().all()
    assert (board.losses.drop(12) == LOSS).all()
    rising = [with_finals(each, dict.fromkeys((3, 4, 5, 6), 2.0 * each.window)) for each in RUN]
    assert Leaderboard(rising).standings["trend"].tolist() == pytest.approx([2.0] * 4)
    assert 12 not in set(board.history["window"])


def test_a_hotkey_keeps_its_past_on_another_uid_and_a_newcomer_has_none():
    moved = [good(3, 11).model_copy(update={"uid": 4}), good(4, 11).model_copy(update={"uid": 3, "hotkey": hotkey(9)})]
    board = Leaderboard(evidences({10: [good(3, 10), good(4, 10)], 11: moved})).standings.set_index("hotkey")
    assert set(board.index) == {hotkey(3), hotkey(9)}  # uid 4's first owner has left
    assert board.loc[hotkey(3), ["uid", "windows", "measured"]].tolist() == [4, 2, 2]
    assert board.loc[hotkey(9), ["uid", "windows", "measured"]].tolist() == [3, 1, 1]
    assert board.loc[hotkey(9), "trend"] == 0.0


def test_bans_of_hotkey_and_bucket_show_until_when():
    (evidence,) = evidences({10: [good(3, 10), good(4, 10), good(5, 10)]})
    bans = ({"subject": hotkey(3), "last_window": 20}, {"subject": bucket(4), "last_window": 30})
    banned = Evidence.model_validate({**evidence.model_dump(), "bans": bans})
    board = Leaderboard([banned])
    assert board.standings.set_index("uid")["banned_until"].fillna(0).to_dict() == {3: 20, 4: 30, 5: 0}
    cells = {row["uid"]: row["slashes"] for row in board.cells()}
    assert cells == {3: "banned until window 20", 4: "banned until window 30", 5: ""}


def test_an_empty_network_has_an_empty_table():
    board = Leaderboard(evidences({10: []}))
    assert (board.cells(), len(board.standings), len(board.history)) == ([], 0, 0)
    assert board.summary == "loss 4.0000, 0 of 0 miners earn, 1.0000 of the weight is burned"
    assert elements(draw(board), "path")  # the axes of a plot without a line


def test_evidence_that_makes_no_history_is_refused():
    for evidence in ([], [RUN[0], RUN[1], RUN[0]]):
        with pytest.raises(ValueError, match=r"one of each window, and at least one; these are \[(10, 10, 11)?\]"):
            Leaderboard(evidence)


def elements(svg, name):
    return list(ElementTree.fromstring(svg).iter(SVG + name))


def test_the_drawing_names_the_best_ten_and_is_the_same_every_time():
    crowd = Leaderboard(evidences({window: [good(uid, window) for uid in range(3, 43)] for window in (10, 11)}))
    svg = draw(crowd)
    assert svg == draw(crowd)
    texts = ["".join(each.itertext()).strip() for each in elements(svg, "text")]
    named = [text for text in texts if text.startswith("uid ")]
    assert named == [f"uid {uid}" for uid in crowd.standings["uid"][:LINES]]
    few = Leaderboard(evidences({window: [good(uid, window) for uid in range(3, 13)] for window in (10, 11)}))
    assert len(svg) < 1.5 * len(draw(few))  # miners without a name cost nothing
