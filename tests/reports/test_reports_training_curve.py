"""The training at a glance: what the pages of nodes and of the network say, and that a restart changes none of it."""

import xml.etree.ElementTree as ET

import pytest

from templar.exchange.object_keys import Kind, window_key
from templar.reports import history, training_curve
from templar.reports.training_curve import (
    LEFT,
    CurvePoint,
    NetworkCurve,
    NodeCurve,
    draw_curve,
    draw_over_tokens,
    node_rows,
)
from tests.support.network import tiny

WINDOWS = (1, 2, 3)


@pytest.fixture(scope="module")
def network(build_shared):
    """Three windows of an honest miner and of one that never publishes."""
    return build_shared(tiny(), actors=["honest", "silent"], windows=WINDOWS, seed=2)


def rows_of(node):
    return dict(node_rows(node, NodeCurve().points(node, 3)))


def curve_of(network, **names):
    """The network as the clock of a miner's host sees it."""
    return NetworkCurve(network.miners[0].exchange, network.miners[0].birth, names)


class TestNodes:
    def test_a_point_per_window_with_what_the_journal_and_the_score_book_have(self, network):
        honest, silent = network.miners
        rosters = [network.roster(window) for window in WINDOWS]
        tokens = [sum(entry.tokens for entry in roster.entries) for roster in rosters if roster is not None]
        assert min(tokens) > 0
        for node in network.nodes.values():
            points = NodeCurve().points(node, 3)
            assert [(point.window, point.applied, point.tokens) for point in points] == [
                (window, 1, number) for window, number in zip(WINDOWS, tokens, strict=True)
            ]
        of = {node.name: NodeCurve().points(node, 3) for node in network.nodes.values()}
        measured = [network.evidence(window).loss for window in WINDOWS]
        assert [point.loss for point in of[network.validator.name]] == measured
        assert {point.loss for point in of[network.aggregator.name]} == {None}
        assert all(point.loss is not None and point.own for point in of[honest.name])
        assert [point.own for point in of[silent.name]] == [False] * 3
        assert {point.own for point in of[network.validator.name]} == {None}

    def test_rows_of_each_role(self, network):
        honest, silent = network.miners
        first, second, validator = rows_of(honest), rows_of(silent), rows_of(network.validator)
        assert (first["own payload applied"], second["own payload applied"]) == (
            "in 3 of 3 windows",
            "in 0 of 3 windows",
        )
        uid, judge = network.member(honest).uid, network.member(network.validator).uid
        assert first["own weight on chain"] == f"{network.world.chain.weights()[judge][uid]:.4f} by uid {judge}"
        assert float(first["own share of the miners' emission"].rstrip("%")) > 0
        assert second["own share of the miners' emission"] == "0.0%"
        assert "tokens/s" in first["trained in the newest window"]
        assert f"uid {uid}: " in validator["weights"]
        for rows in (first, second, validator, rows_of(network.aggregator)):
            assert (rows["newest window"], rows["outer steps"]) == ("3", "3")
            assert rows["tokens in the applied payloads"].endswith(" since the start")
            assert rows["miners applied"] == "1 in the newest decided window, 1.0 on average"

    def test_a_restart_changes_nothing(self, network):
        before = {name: (NodeCurve().points(node, 3), rows_of(node)) for name, node in network.nodes.items()}
        for name in before:
            network.restart(name)
        assert before == {name: (NodeCurve().points(node, 3), rows_of(node)) for name, node in network.nodes.items()}

    def test_a_window_is_read_once_until_the_node_applies_it_otherwise(self, network, monkeypatch):
        node = network.validator
        curve, read = NodeCurve(), list[int]()
        evidence = type(node.book).evidence
        monkeypatch.setattr(
            type(node.book), "evidence", lambda book, window: read.append(window) or evidence(book, window)
        )
        first = curve.points(node, 3)
        assert (curve.points(node, 3), read) == (first, [1, 2, 3])
        roots = node.journal.roots(1, 3)
        monkeypatch.setattr(node.journal, "roots", lambda *_: {**roots, 2: "another"})
        assert (curve.points(node, 3), read) == (first, [1, 2, 3, 2])

    def test_only_windows_that_are_kept_are_shown(self, network, monkeypatch):
        node = network.aggregator
        storage = node.hparams.storage.model_copy(update={"retention_windows": 2})
        monkeypatch.setattr(node, "hparams", node.hparams.model_copy(update={"storage": storage}))
        assert [point.window for point in NodeCurve().points(node, 3)] == [2, 3]
        assert rows_of(node)["tokens in the applied payloads"].endswith(" since window 2")


class TestNetwork:
    def test_it_is_read_from_public_objects_alone(self, network):
        honest = network.member(network.miners[0])
        glance = curve_of(network, **{honest.hotkey.address: "mine"}).look(3)
        own = NodeCurve().points(network.validator, 3)
        assert [(each.window, each.loss, each.applied, each.tokens) for each in glance.points] == [
            (each.window, each.loss, each.applied, each.tokens) for each in own
        ]
        rows = dict(glance.rows)
        assert rows["outer steps"] == "3"
        assert rows["evidence"] == f"of window 3, by uid {network.member(network.validator).uid}"
        first, second = glance.miners
        assert (first["uid"], first["neuron of this host"]) == (str(honest.uid), "mine")
        assert (first["newest payload"], second["newest payload"]) == ("applied", "manifest_missing")

    def test_a_later_look_reads_only_what_is_new(self, network, monkeypatch):
        asked = list[range]()
        real = history.read_published

        def read(exchange, validator, windows):
            asked.append(windows)
            return real(exchange, validator, windows)

        monkeypatch.setattr(history, "read_published", read)
        curve = curve_of(network)
        curve.look(2)
        asked.clear()
        assert [point.window for point in curve.look(3).points] == [1, 2, 3]
        assert asked == [range(3, 4)]

    def test_evidence_that_is_late_or_missing_is_a_gap_until_it_comes(self, network, monkeypatch):
        """What was known stays when it cannot be read again."""
        bucket, uid = network.bucket(network.validator), network.member(network.validator).uid
        key = window_key(Kind.EVIDENCE, 2, uid)
        data = bucket.get(key, max_bytes=1 << 30)
        bucket.delete([key])
        curve = curve_of(network)
        before = curve.look(3).points
        assert [point.loss is None for point in before] == [False, True, False]
        assert before[1].applied == 1
        bucket.put(key, data)
        monkeypatch.setattr(training_curve, "decided_entries", lambda *_: None)
        after = curve.look(3).points
        assert [(point.applied, point.tokens) for point in after] == [(each.applied, each.tokens) for each in before]
        assert [point.loss is None for point in after] == [False] * 3
        with network.outage(network.validator), network.outage(network.aggregator):
            assert curve.look(3).points == after

    def test_without_a_validator_that_can_be_read_it_says_so(self, network):
        with network.outage(network.validator), network.outage(network.aggregator):
            glance = curve_of(network).look(3)
        assert dict(glance.rows)["evidence"] == "no validator shows any of these windows"
        assert dict(glance.rows)["tokens in the applied payloads"] == "0 since the start; 3 windows are not known"
        assert {point.loss for point in glance.points} == {None}
        assert draw_curve(glance.points, "nothing")


class TestDrawing:
    POINTS = (CurvePoint(7, 6.0, 3, 100), CurvePoint(8), CurvePoint(9, 5.0, 0, 0), CurvePoint(10, 4.0, 2, 50))

    def test_what_is_not_known_is_a_gap(self):
        root = ET.fromstring(draw_curve(self.POINTS, "loss < 6 & falling"))
        texts = [each.text for each in root.findall(".//{*}text")]
        assert texts[0] == "loss < 6 & falling"
        assert {"6.00", "4.00", "window 7", "10", "miners applied, at most 3"} <= set(texts)
        assert len(root.findall(".//{*}circle")) == 3
        lines = [each for each in root.findall(".//{*}path") if "L" in each.get("d", "")]
        assert len(lines) == 1  # windows 9 and 10; the window before the gap is a point

    def test_the_loss_over_tokens_is_that_before_the_windows_step(self):
        drawing = draw_over_tokens(self.POINTS, "loss < 6", 0.5, start_window=1)
        root = ET.fromstring(drawing)
        texts = {each.text for each in root.findall(".//{*}text")}
        assert {"loss < 6", "6.00", "4.00", "100 tokens in the applied payloads", "90 min since window 7"} <= texts
        places = [float(each.get("cx", "")) for each in root.findall(".//{*}circle")]
        (start, then, last), hours = places[:3], places[3:]
        assert (start, then) == (LEFT, last), "the payloads of windows 7 and 9 had 100 tokens and none"
        assert [(each - hours[0]) / (hours[-1] - hours[0]) for each in hours] == pytest.approx([0, 2 / 3, 1], abs=1e-2)
        assert "since the start" in draw_over_tokens(self.POINTS, "", 0.5, start_window=7).decode()
        assert draw_over_tokens(self.POINTS[:2], "", 0.5, start_window=7) is None

    @pytest.mark.parametrize("points", [(CurvePoint(7),), (CurvePoint(7, 2.0, 1, 1),), (CurvePoint(7, None, 0, 0),)])
    def test_one_window_is_enough(self, points):
        ET.fromstring(draw_curve(points, "one"))
