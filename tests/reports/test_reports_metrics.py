"""The figures of a window: their sources and their two published forms."""

import json
import logging
import re
from statistics import fmean

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from templar.errors import Reason, TransientError
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.reports.checkpoint_evaluation import EvaluatedCheckpoint
from templar.reports.metrics import (
    FILE_NAME,
    HELD_OUT_FILE,
    HELP,
    Metrics,
    condition_of,
    evidence_values,
    keep_measured,
    metrics_of,
    miner_values,
    publish_metrics,
    train_report,
)
from templar.reports.text_score import TextScore
from templar.scoring.evidence import Estimate
from templar.traffic import Traffic
from templar.training.schedule import inner_learning_rate, outer_learning_rate
from tests.support.facts import absent, concluded, like, revealed, standing_of, veteran
from tests.support.servers import REPOSITORY

SMALL = Metrics(
    "default",
    "validator",
    12,
    {"network/window": 12, "loss": 3.8},
    {"final_scores": {3: 0.5, 4: -0.25}},
    ((4, "missing", "payload_missing"), (4, "desync", "desync")),
    {"retries": {("alice", "store_busy"): 2}},
)


def samples(text):
    """Name and uid -> number, as a scraper reads them."""
    return {
        (sample.name, sample.labels.get("uid")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# Two forms.


def test_the_text_format():
    text = generate_latest(SMALL).decode()
    assert "# TYPE templar_validator_network_window gauge" in text.splitlines()
    assert f"# HELP templar_validator_loss {HELP['loss']}" in text.splitlines()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        ("templar_validator_network_window", {"neuron": "default"}, 12),
        ("templar_validator_loss", {"neuron": "default"}, 3.8),
        ("templar_validator_final_scores", {"neuron": "default", "uid": "3"}, 0.5),
        ("templar_validator_final_scores", {"neuron": "default", "uid": "4"}, -0.25),
        ("templar_validator_retries_total", {"neuron": "default", "store": "alice", "reason": "store_busy"}, 2),
        *(
            ("templar_validator_slash", {"neuron": "default", "uid": "4", "event": event, "reason": reason}, 1)
            for event, reason in (("missing", "payload_missing"), ("desync", "desync"))
        ),
    ]


def test_a_penalty_that_is_there_twice_is_one_sample():
    """Two samples with the same labels make a scraper refuse the whole file."""
    twice = Metrics("default", "validator", 1, {}, {}, (SMALL.slashes[0], SMALL.slashes[0]))
    assert generate_latest(twice).decode().count("templar_validator_slash{") == 1


def test_every_name_is_in_the_guide():
    guide = (REPOSITORY / "docs" / "validator.md").read_text()
    section = guide[guide.index("## Metrics") :]
    named = set(re.findall(r"`([a-z_/]+)`", section[: section.index("\n## ", 1)]))
    assert set(HELP) <= named


# Where the numbers come from.


def test_validator_figures_of_all_miners():
    evidence = concluded(
        revealed(3, 0.1, overlap=like(4, 0.3)),
        revealed(4, 0.2, tier="reserve", overlap=like(3, 0.3)),
        revealed(5, None, applied=False, tier="other"),
        absent(6),
    )
    values, finals = evidence_values(evidence), {record.uid: record.final for record in evidence.miners}
    assert values["loss"] == 4.0
    assert values["network/block"] == 4000
    assert (values["network/evaluated_uids"], values["network/active_miners"]) == (3, 3)
    assert values["gather/success_rate"] == 0.5  # of 3 and 6
    assert values["gather/reserve_used"] == 1
    assert values["gather/intended_mean_final"] == pytest.approx(fmean([finals[3], finals[6]]))
    assert values["gather/actual_mean_final"] == pytest.approx(fmean([finals[3], finals[4]]))
    assert values["overlap/max"] == 0.3
    assert values["loss/random/before"] == pytest.approx(4.0)
    assert values["loss/random/after"] == pytest.approx(4.0 * (1 - 0.15))  # the one that is not finite is left out
    assert values["loss/random/improvement"] == pytest.approx(0.15)


def test_unmeasured_figures_are_left_out():
    evidence = concluded(absent(3), absent(4, None, assigned=False, tier="other"), loss=None, roster=None)
    values = evidence_values(evidence)
    assert not [name for name in values if name.startswith(("loss", "overlap")) or name == "gather/actual_mean_final"]
    assert (values["network/evaluated_uids"], values["gather/success_rate"]) == (0, 0.0)
    of_uids = miner_values(evidence)
    assert not {"gradient_scores", "binary_indicators", "sync/avg_steps_behind"} & set(of_uids)
    assert of_uids["weights"] == {3: 0.0, 4: 0.0}


def test_huge_losses_overflow_no_figure():
    huge = Estimate(own_before=1e308, own_gain=-1e308, random_before=1e308, random_gain=0.0, expected=0.0)
    evidence = concluded(revealed(3, estimate=huge), revealed(4, estimate=huge))
    values = evidence_values(evidence)
    assert "loss/own/after" not in values
    assert values["loss/random/before"] == pytest.approx(1e308)
    json.loads(Metrics("n", "validator", 1, values, miner_values(evidence)).to_json())


def test_validator_figures_of_each_miner():
    standing = standing_of([veteran(3), veteran(4), veteran(5, idle=9)])
    evidence = concluded(revealed(3, 0.1, windows_behind=9), absent(4), absent(5), standing=standing)
    values, records = miner_values(evidence), {record.uid: record for record in evidence.miners}
    weights = {record.uid: record.weight for record in evidence.weights}
    assert values["gradient_scores"] == {3: records[3].gradient_score}
    assert (values["binary_indicators"], values["sync/avg_steps_behind"]) == ({3: 1}, {3: 9})
    for name, figure in (
        ("final_scores", lambda card: card.final),
        ("binary_moving_averages", lambda card: card.binary_average),
        ("advantages", lambda card: card.advantage),
        ("own_excesses", lambda card: card.own_excess),
        ("sync_score", lambda card: card.sync),
        ("openskill/ordinal", lambda card: card.rating.ordinal),
    ):
        assert values[name] == {uid: figure(record.after) for uid, record in records.items()}
    assert values["weights"] == {uid: weights.get(uid, 0.0) for uid in records}
    assert evidence_values(evidence)["openskill/baseline"] == evidence.baseline.ordinal
    assert values["slash/score_before"] == {3: 20.0, 4: 20.0, 5: 20.0}
    assert values["inactivity/score_before"] == {5: 20.0}
    assert values["inactivity/score_after"] == {5: records[5].final}


@pytest.fixture(scope="module")
def ran(build_shared):
    return build_shared(actors=["honest", "silent"], windows=[1])


def of(node):
    report = GatherReport(1, (PeerOutcome(3, Tier.GATHER, None, Reason.PAYLOAD_MISSING, "", 0.1),), seconds=1.5)
    return metrics_of(node, report, node.settle(1), findings=2, seconds=9.5)


def test_figures_of_every_role(ran):
    honest, silent = ran.miners
    evidence = ran.validator.book.evidence(1)
    validator = of(ran.validator)
    assert validator.values["loss"] == evidence.loss
    assert validator.values["gather/success_rate"] == evidence.facts.success_rate
    assert validator.of_uids == miner_values(evidence)
    assert [uid for uid, _, _ in validator.slashes] == [ran.member(silent).uid]
    aggregator, first, second = of(ran.aggregator), of(honest), of(silent)
    for metrics in (validator, aggregator, first, second):
        assert (metrics.values["network/window"], metrics.values["network/step"]) == (1, 1)
        assert (metrics.values["network/applied_uids"], metrics.values["network/findings"]) == (1, 2)
        assert (metrics.values["timing/gather"], metrics.values["timing/window_total"]) == (1.5, 9.5)
        assert metrics.of_labels["gather/failures"] == {("payload_missing",): 1}
        assert (metrics.values["state/windows_behind"], metrics.values["lease/held"]) == (0, 1)
        names = {*metrics.values, *metrics.of_uids, *metrics.of_labels}
        assert names | {*metrics.series} <= set(HELP)
        assert len(samples(generate_latest(metrics).decode())) >= len(names)
    assert (aggregator.role, aggregator.of_uids, "loss" in aggregator.values) == ("aggregator", {}, False)
    assert (first.values["applied"], second.values["applied"]) == (1, 0)
    assert first.values["batch_tokens"] > 0
    assert first.values["tokens_per_sec"] == first.values["batch_tokens"] / first.values["timing/training"]
    assert first.values["total_tokens"] == first.values["batch_tokens"]
    training = ran.hparams.training
    last = inner_learning_rate(training, 0, training.inner_steps - 1)
    assert (first.values["inner_lr"], first.values["optimizer/outer_lr"]) == (
        pytest.approx(last, rel=1e-5),
        outer_learning_rate(training, 0),
    )
    assert first.series["steps/inner_step"] == tuple(range(training.inner_steps))
    assert first.series["steps/loss"][-1] == pytest.approx(first.values["loss"], rel=1e-5)
    norms = first.series["steps/grad_norm"]
    assert first.values["max_grad_norm"] == pytest.approx(max(norms), rel=1e-5)
    assert first.values["min_grad_norm"] <= first.values["mean_grad_norm"] <= first.values["max_grad_norm"]
    assert json.loads(first.to_json())["miner/steps/loss"] == list(first.series["steps/loss"])
    assert first.values["system_memory"] > 1
    assert not {"mfu", "gpu_memory_allocated"} & set(first.values)
    assert 0 < first.values["loss"] < 10
    for metrics in (validator, aggregator, first, second):
        shares = {name: share for name, share in metrics.values.items() if name.startswith("share/")}
        assert sum(shares.values()) == pytest.approx(1)
        assert all(share >= 0 for share in shares.values())
        assert shares["share/exchanging"] > 0
        assert ("share/training" in shares) is ("share/compressing" in shares) is (metrics.role == "miner")
        assert ("share/evaluating" in shares) is (metrics.role == "validator")
    assert ran.validator.name == validator.neuron


def test_tokens_are_added_up_over_windows_and_restarts(build):
    network = build(actors=["honest"], windows=[1])
    (miner,) = network.miners
    first = of(miner).values["total_tokens"]
    miner.pass_by(2, Reason.TRAINER_FAILED)
    miner = network.restart(miner)
    network.run([2, 3])
    trained = [train_report(miner, window) for window in (1, 2, 3)]
    assert [report.total_tokens for report in trained] == [first, 0, 2 * first]


def test_what_was_measured_of_the_newest_checkpoint_stands_in_every_window(ran, monkeypatch, tmp_path):
    node = ran.validator
    assert "custom_eval/bpb" not in of(node).values
    monkeypatch.setattr(node, "home", tmp_path / "made")
    score = TextScore(4, 100, 400, 350.0)
    keep_measured(node.home, EvaluatedCheckpoint(1, "f" * 64, score, (("arc_easy", "acc", 0.25),), True, 5000))
    values = of(node).values
    found = {name: value for name, value in values.items() if name.startswith("custom_eval/")}
    assert found == {
        "custom_eval/window": 1,
        "custom_eval/average_loss": score.loss,
        "custom_eval/perplexity": score.perplexity,
        "custom_eval/bpb": score.bits_per_byte,
        "custom_eval/trained_tokens": 5000,
    }
    sample = f'benchmark{{metric="acc",neuron="{node.name}",task="arc_easy"}} 0.25'
    assert sample in generate_latest(of(node)).decode()
    (node.home / HELD_OUT_FILE).write_text("{")
    assert "custom_eval/bpb" not in of(node).values


CHAIN = {"state/windows_behind", "chain/lag_seconds", "chain/lag_blocks"}
BLOCK = 1.0
DISK = {"disk/free_bytes", "disk/free_share"}
LEASE = {"lease/held", "lease/seconds_left"}


def condition(node):
    """A node's own condition, without the traffic of this process."""
    metrics = condition_of(node, 1)
    assert (metrics.neuron, metrics.window, metrics.of_uids) == (node.name, 1, {})
    return {name: value for name, value in metrics.values.items() if not name.startswith("bytes")}


def test_the_condition_of_a_node_that_is_behind(ran, monkeypatch):
    node = ran.miners[0]
    blocks = node.hparams.windows.blocks_per_window
    monkeypatch.setattr(type(node.chain), "block_seconds", BLOCK)
    monkeypatch.setattr(node.chain, "head", lambda: 5 * blocks)
    monkeypatch.setattr(node.chain, "block_time", lambda number, finalized: node.chain.clock.now() - 2.5 * BLOCK)
    values = condition(node)
    assert values.keys() == CHAIN | DISK | LEASE
    assert values["state/windows_behind"] == 4 - node.state.window
    assert (values["chain/lag_seconds"], values["chain/lag_blocks"]) == (pytest.approx(2.5 * BLOCK), 2)
    assert 0 < values["lease/seconds_left"] <= 600
    assert 0 < values["disk/free_share"] < 1 < values["disk/free_bytes"]


def test_what_cannot_be_read_of_a_node_is_left_out(ran, monkeypatch):
    def unreachable():
        raise TransientError(Reason.CHAIN_UNREACHABLE, "no answer")

    node = ran.miners[0]
    monkeypatch.setattr(node.chain, "head", unreachable)
    monkeypatch.setattr(node, "_lease", None)
    monkeypatch.setattr(node, "home", node.home / "nowhere")
    assert condition(node) == {}


def test_a_lease_that_is_lost_is_told(ran, monkeypatch):
    node = ran.miners[1]
    monkeypatch.setattr(node._lease, "_lost", True)
    values = condition(node)
    assert (values["lease/held"], values["lease/seconds_left"]) == (0, 0)


def test_traffic_is_counted_since_the_process_began(ran, monkeypatch):
    traffic = Traffic()
    monkeypatch.setattr("templar.reports.metrics.TRAFFIC", traffic)
    names = {"bytes/up", "bytes/down"}
    assert not names & condition_of(ran.miners[0], 1).values.keys()
    traffic.count_sent(5)
    traffic.count_fetched(7)
    traffic.count_retry("alice", Reason.STORE_BUSY)
    found = condition_of(ran.miners[0], 1)
    assert {name: found.values[name] for name in names} == {"bytes/up": 5, "bytes/down": 7}
    assert found.of_labels == {"retries": {("alice", "store_busy"): 1}}
    assert json.loads(found.to_json())["miner/retries"] == {"alice store_busy": 1}


def test_a_window_that_was_never_measured_has_no_scores(ran, monkeypatch):
    monkeypatch.setattr(ran.validator.book, "evidence", lambda _: None)
    unmeasured = of(ran.validator)
    assert (unmeasured.of_uids, unmeasured.slashes, "loss" in unmeasured.values) == ({}, (), False)


# Where they go.


def test_the_file_is_replaced_and_the_line_is_logged(tmp_path, caplog):
    (tmp_path / FILE_NAME).write_text("of the window before")
    with caplog.at_level(logging.INFO, "templar"):
        publish_metrics(SMALL, tmp_path)
    assert (tmp_path / FILE_NAME).read_text() == generate_latest(SMALL).decode()
    assert [each.name for each in tmp_path.iterdir()] == [FILE_NAME]
    ((name, line),) = ((record.name, record.getMessage()) for record in caplog.records)
    assert (name, line) == ("templar.metrics", SMALL.to_json())


def test_a_disk_that_refuses_costs_the_file_alone(tmp_path, caplog):
    (tmp_path / FILE_NAME).mkdir()
    with caplog.at_level(logging.INFO, "templar"):
        publish_metrics(SMALL, tmp_path)
        publish_metrics(SMALL, tmp_path / "nowhere")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"] * 2
    assert caplog.records[1].getMessage().startswith("window 12: the metrics are not on the disk: [local_file]")
    assert [each.name for each in tmp_path.iterdir()] == [FILE_NAME]
