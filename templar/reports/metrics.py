"""The figures of a window at one node, from its gather, its training and its evidence, for monitoring.

The names are those that the reference system documents, where it has the figure. They are published in two forms: one
line of JSON for log collectors, and a file in Prometheus' text format for the textfile collector of its node exporter.
A figure that is not known is left out, never reported as 0.
"""

import json
import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import TypeAdapter

from templar.agreement.voter import Settlement
from templar.errors import TemplarError
from templar.exchange.gather import GatherReport, Tier
from templar.neuron.miner import Miner, TrainReport
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.reports.checkpoint_evaluation import EvaluatedCheckpoint
from templar.scoring.evidence import Evidence, MinerRecord
from templar.scoring.score import relative_gain
from templar.scoring.standing import Event
from templar.store.files import replacing
from templar.timeline import window_of
from templar.traffic import TRAFFIC
from templar.training.schedule import outer_learning_rate

LOGGER = "templar.metrics"  # the logger of the JSON lines
log = logging.getLogger(LOGGER)

FILE_NAME = "metrics.prom"  # the file in the neuron's folder; it is replaced as a whole in every window
HELD_OUT_FILE = "held_out.json"  # there: the newest own checkpoint that was measured
HELP = {
    "network/window": "The window.",
    "network/step": "Outer steps of the state after it.",
    "network/applied_uids": "Payloads that were applied; 0 in a null window.",
    "network/findings": "What did not fit together in the audit of the roster.",
    "gather/success_rate": "Share of the gather tier that revealed something that counts.",
    "gather/successful_uids": "Miners whose payload counts.",
    "gather/failed_uids": "Miners that were asked and whose payload does not count.",
    "gather/failures": "Those miners by reason.",
    "timing/gather": "Seconds that the gather took, the wait for the reveals included.",
    "timing/window_total": "Seconds since the flow run of the window began.",
    "share/training": "Share of the time since the window was taken up in which the node trained.",
    "share/compressing": "The same for compressing the update.",
    "share/exchanging": "The same for reading and writing data, payloads and words.",
    "share/evaluating": "The same for measuring and rating.",
    "share/applying": "The same for applying the decided payloads, snapshot included.",
    "share/waiting": "The same for sleeping: until a block, the close or a decision.",
    "share/other": "The rest, such as the time between two steps.",
    "state/windows_behind": "Closed windows that the state lacks.",
    "chain/lag_seconds": "Age of the newest block that the node sees.",
    "chain/lag_blocks": "The same in blocks: how many should have come since.",
    "lease/held": "1 if this process holds the neuron's lease, 0 if it has lost it.",
    "lease/seconds_left": "Seconds until another machine may take the neuron over, unless the lease is renewed.",
    "disk/free_bytes": "Bytes that are free on the disk of the neuron's folder.",
    "disk/free_share": "Share of that disk that is free.",
    "bytes/up": "Bytes of objects sent to S3 since the process began.",
    "bytes/down": "Bytes of objects and listings that came from S3 since the process began.",
    "retries": "Requests that were repeated since the process began, by bucket or chain endpoint and reason.",
    "loss": "Mean loss: a validator's of the evaluation batch before the step, a miner's of its last inner step.",
    "window_entry_loss": "Mean loss of the first inner step.",
    "inner_steps": "Inner steps taken.",
    "batch_tokens": "Tokens trained on in the window.",
    "tokens_per_sec": "Tokens trained per second of training.",
    "mfu": "Share of the device's assumed peak that the training used, at 6 N + 12 * layers * hidden * length "
    "operations per token; not on a CPU.",
    "timing/training": "Seconds that the training took.",
    "total_tokens": "Tokens in the payloads of this miner so far.",
    "inner_lr": "AdamW's learning rate in the last inner step.",
    "min_grad_norm": "Least norm of the gradient of an inner step, before it is clipped.",
    "mean_grad_norm": "Mean of these norms.",
    "max_grad_norm": "Largest of them.",
    "optimizer/outer_lr": "Learning rate of the outer step.",
    "steps/inner_step": "Number of an inner step in its window.",
    "steps/loss": "Its mean loss.",
    "steps/grad_norm": "Norm of its gradient, before it is clipped.",
    "steps/inner_lr": "AdamW's learning rate in it.",
    "custom_eval/window": "Window of the newest own checkpoint that was measured on held-out text.",
    "custom_eval/average_loss": "Its mean loss there, in nats per token.",
    "custom_eval/perplexity": "Its perplexity there, per token.",
    "custom_eval/bpb": "Its bits per byte there.",
    "custom_eval/trained_tokens": "Tokens in the payloads that were applied up to that checkpoint.",
    "benchmark": "Its result in a task of lm-evaluation-harness.",
    "gpu_memory_allocated": "Peak of the GPU's memory in the training, in MiB.",
    "system_memory": "Peak of the process's resident memory, in MiB, where it trains on the CPU.",
    "applied": "1 if the own payload was applied, else 0.",
    "loss/own/before": "Mean loss on the miners' own segments.",
    "loss/own/after": "The same less what the linear score takes off.",
    "loss/own/improvement": "Mean relative fall of it.",
    "loss/random/before": "Mean loss on the rest of the evaluation batch.",
    "loss/random/after": "The same less what the linear score takes off.",
    "loss/random/improvement": "Mean relative fall of it.",
    "network/block": "The block that settled the window.",
    "network/evaluated_uids": "Miners that were measured.",
    "network/active_miners": "Miners of the evidence whose payload counts.",
    "gather/intended_mean_final": "Mean final score of the gather tier.",
    "gather/actual_mean_final": "Mean final score of those whose payload was applied.",
    "gather/reserve_used": "Miners of the reserve that were applied.",
    "overlap/max": "Largest share of common coefficients of two payloads of the window.",
    "gradient_scores": "Score of the window.",
    "binary_indicators": "1 if the loss fell more on the own data than on others', else -1.",
    "binary_moving_averages": "Moving average of the indicator.",
    "advantages": "Moving average of by how much the scores were above the baseline's.",
    "advantage/typical": "Median of those above 0, which final scores count in.",
    "own_excesses": "Moving average of by how much more the own data gained than others' data.",
    "own_excess/typical": "Median of those above 0, of miners with an advantage above 0.",
    "final_scores": "Final score after the window.",
    "sync_score": "Sync score.",
    "sync/avg_steps_behind": "Windows that its state was behind.",
    "openskill/mu": "Mean of the rating.",
    "openskill/sigma": "Uncertainty of the rating.",
    "openskill/ordinal": "Rating less three uncertainties.",
    "openskill/baseline": "The same of the baseline, which final scores count from.",
    "weights": "Weight that the scores amount to.",
    "slash": "A penalty of the window, by event and reason.",
    "slash/score_before": "Final score before a window with penalties.",
    "slash/score_after": "Final score after it.",
    "inactivity/score_before": "Final score before a window in which inactivity cost something.",
    "inactivity/score_after": "Final score after it.",
}
"""Name, without the prefix of the role, and meaning of every figure."""
LABELS: dict[str, tuple[str, ...]] = {
    "benchmark": ("task", "metric"),
    "gather/failures": ("reason",),
    "retries": ("store", "reason"),
    "slash": ("uid", "event", "reason"),
}
"""Labels that tell the samples of a figure apart, besides the neuron."""
COUNTERS = frozenset({"bytes/up", "bytes/down", "retries"})
"""Figures that only grow, until the process ends; Prometheus adds `_total` to their names."""
_INACTIVITY = (Event.INACTIVITY, Event.INACTIVITY_RESET)
_TRAIN_REPORT = TypeAdapter(TrainReport)
_HELD_OUT = TypeAdapter(EvaluatedCheckpoint)


@dataclass(frozen=True)
class Metrics(Collector):
    """The figures of one window of one node, as Prometheus collects them."""

    neuron: str  # the neuron's name on this host
    role: str
    window: int
    values: Mapping[str, float]  # name -> figure
    of_uids: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # name -> uid -> figure, where known
    slashes: tuple[tuple[int, str, str], ...] = ()  # uid, event and reason of each penalty
    of_labels: Mapping[str, Mapping[tuple[str, ...], float]] = field(default_factory=dict)  # name -> labels -> figure
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # name -> figure of each inner step

    def rows(self) -> Iterator[dict[str, float]]:
        """The figures of one inner step after another, by name."""
        return (dict(zip(self.series, row, strict=True)) for row in zip(*self.series.values(), strict=True))

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield name, labels and number of every figure but the series; those of one name follow each other."""
        for name, value in self.values.items():
            yield name, {}, value
        for name, figures in self.of_uids.items():
            for uid, value in figures.items():
                yield name, {"uid": str(uid)}, value
        slashes = {"slash": dict.fromkeys(((str(uid), *rest) for uid, *rest in self.slashes), 1.0)}
        for name, by_labels in (*self.of_labels.items(), *slashes.items()):
            for labels, value in by_labels.items():
                yield name, dict(zip(LABELS[name], labels, strict=True)), value

    def to_json(self) -> str:
        """One line of JSON: a key per documented name, objects by uid, lists for series, six digits per figure."""

        def short(value: float) -> float:
            return value if isinstance(value, int) else float(f"{value:.6g}")

        record: dict[str, object] = {"record": "metrics", "neuron": self.neuron, "window": self.window}
        record |= {f"{self.role}/{name}": short(value) for name, value in self.values.items()}
        for name, numbers in self.of_uids.items():
            record[f"{self.role}/{name}"] = {uid: short(value) for uid, value in numbers.items()}
        for name, by_labels in self.of_labels.items():
            record[f"{self.role}/{name}"] = {" ".join(labels): short(value) for labels, value in by_labels.items()}
        record |= {f"{self.role}/{name}": figures for name, figures in self.series.items()}
        reasons: dict[int, str] = {}
        for uid, event, reason in self.slashes:
            reasons[uid] = ", ".join(filter(None, (reasons.get(uid), f"{event} ({reason})")))
        if reasons:
            record[f"{self.role}/slash/reason"] = reasons
        return json.dumps(record, separators=(",", ":"), allow_nan=False)

    def collect(self) -> Iterable[Metric]:
        """Every figure as a metric of Prometheus: a slash in a name becomes an underscore."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, labels, value in self.samples():
            if name not in families:
                family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                metric = f"templar_{self.role}_{name.replace('/', '_')}"
                families[name] = family(metric, HELP[name], labels=("neuron", *labels))
            families[name].add_metric((self.neuron, *labels.values()), value)
        return families.values()


def publish_metrics(metrics: Metrics, home: Path) -> None:
    """Log the figures and replace the file in the neuron's folder; a failed write is logged and costs no window."""
    log.info("%s", metrics.to_json())
    try:
        with replacing(home / FILE_NAME) as file:
            file.write(generate_latest(metrics))
    except TemplarError as error:
        log.warning("window %d: the metrics are not on the disk: %s", metrics.window, error)


def metrics_of(
    node: Node, report: GatherReport, settlement: Settlement, *, findings: int, seconds: float | None
) -> Metrics:
    """The figures of a window that a node has applied."""
    window, role = settlement.window, node.role or "observer"
    values = {
        "network/window": window,
        "network/step": node.state.outer_steps,
        "network/applied_uids": len(settlement.uids),
        "network/findings": findings,
        "gather/successful_uids": len(report.submissions),
        "gather/failed_uids": len(report.outcomes) - len(report.submissions),
        "timing/gather": report.seconds,
        **condition_values(node),
    }
    if settlement.roster is not None:
        values["optimizer/outer_lr"] = outer_learning_rate(node.hparams.training, node.state.outer_steps - 1)
    if tier := [outcome.submission is not None for outcome in report.outcomes if outcome.tier == Tier.GATHER]:
        values["gather/success_rate"] = sum(tier) / len(tier)
    if seconds is not None:
        values["timing/window_total"] = seconds
    spent = node.time.seconds(window)  # by activity; empty if another process ran the window
    if total := sum(spent.values()):
        values |= {f"share/{name}": number / total for name, number in spent.items()}
    measured = measured_checkpoint(node.home)
    by_labels, series = labelled_values(report, measured), dict[str, tuple[float, ...]]()
    values |= held_out_values(measured)
    if isinstance(node, Miner):
        trained = train_report(node, window)
        values |= training_values(trained, node.hparams.data.sequence_length)
        series = step_values(trained)
        hotkeys = {entry.hotkey for entry in settlement.roster.entries} if settlement.roster is not None else set()
        values["applied"] = int(node.exchange.own_signer.address in hotkeys)
    evidence = node.book.evidence(window) if isinstance(node, Validator) else None
    if evidence is None:
        return Metrics(node.name, role, window, values, of_labels=by_labels, series=series)
    slashes = tuple(
        (record.uid, str(slash.event), str(slash.reason)) for record in evidence.miners for slash in record.slashes
    )
    values |= evidence_values(evidence)
    return Metrics(node.name, role, window, values, miner_values(evidence), slashes, by_labels)


def condition_of(node: Node, window: int) -> Metrics:
    """The metrics of a node in a window that it did not run: its own condition."""
    return Metrics(node.name, node.role or "observer", window, condition_values(node), of_labels=labelled_values(None))


def condition_values(node: Node) -> dict[str, float]:
    """Figures of a node's own condition: chain, lease, disk and traffic."""
    values: dict[str, float] = {}
    # 1. The chain. If it does not answer now, the node's next window is told so, with the reason.
    with suppress(TemplarError):
        head = node.chain.head()
        values["state/windows_behind"] = max(0, window_of(head, node.hparams.windows) - 1 - node.state.window)
        age = max(0.0, node.chain.clock.now() - node.chain.block_time(head, finalized=False))
        values |= {"chain/lag_seconds": age, "chain/lag_blocks": int(age // node.chain.block_seconds)}

    # 2. The lease, and the disk.
    if (left := node.lease_seconds_left) is not None:
        values |= {"lease/held": int(left > 0), "lease/seconds_left": left}
    with suppress(OSError):
        disk = shutil.disk_usage(node.home)
        values |= {"disk/free_bytes": disk.free, "disk/free_share": disk.free / disk.total}

    # 3. Traffic of this process; stores in folders have none.
    traffic = {"bytes/up": TRAFFIC.sent_bytes, "bytes/down": TRAFFIC.fetched_bytes}
    return values | {name: count for name, count in traffic.items() if count}


def labelled_values(
    report: GatherReport | None, measured: EvaluatedCheckpoint | None = None
) -> dict[str, Mapping[tuple[str, ...], float]]:
    """Figures that are counted by something else than a uid; names without any are left out."""
    found: dict[str, Mapping[tuple[str, ...], float]] = {"retries": TRAFFIC.retries()}
    if report is not None:
        found["gather/failures"] = {(str(reason),): count for reason, count in report.rejected.items()}
    if measured is not None:
        found["benchmark"] = {(task, metric): value for task, metric, value in measured.results}
    return {name: counts for name, counts in found.items() if counts}


def keep_measured(home: Path, newest: EvaluatedCheckpoint) -> None:
    """Leave the newest measured checkpoint in a neuron's folder, where the windows' figures take it from."""
    with replacing(home / HELD_OUT_FILE, durable=True) as file:
        file.write(_HELD_OUT.dump_json(newest))


def measured_checkpoint(home: Path) -> EvaluatedCheckpoint | None:
    """What `keep_measured` left in a folder; None if there is nothing, or another release's."""
    try:
        return _HELD_OUT.validate_json((home / HELD_OUT_FILE).read_bytes())
    except (OSError, ValueError):
        return None


def held_out_values(measured: EvaluatedCheckpoint | None) -> dict[str, float]:
    """Figures of a checkpoint on held-out text."""
    if measured is None:
        return {}
    score, trained = measured.score, measured.trained
    values = {"window": measured.window, "average_loss": score.loss, "perplexity": score.perplexity}
    values |= {"bpb": score.bits_per_byte, **({} if trained is None else {"trained_tokens": trained})}
    return {f"custom_eval/{name}": value for name, value in values.items()}


def train_report(miner: Miner, window: int) -> TrainReport:
    """Read from a miner's journal how it trained in a window; an empty report if it says nothing."""
    known = miner.journal.result(window, "train")
    return TrainReport(window, None) if known is None else _TRAIN_REPORT.validate_json(known)


def training_values(report: TrainReport, sequence_length: int) -> dict[str, float]:
    """Figures of a miner's training; without losses if it did not train."""
    values: dict[str, float] = {"batch_tokens": report.num_sequences * sequence_length, "inner_steps": report.num_steps}
    losses = {"loss": report.last_loss, "window_entry_loss": report.first_loss}
    values |= {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
    if (figures := report.figures) is not None:
        values["tokens_per_sec"], values["timing/training"] = figures.tokens_per_second, figures.seconds
        memory = "gpu_memory_allocated" if figures.is_cuda else "system_memory"
        values[memory] = figures.peak_bytes / 2**20
        if figures.mfu is not None:
            values["mfu"] = figures.mfu
    if report.total_tokens:
        values["total_tokens"] = report.total_tokens
    if (series := report.series) is not None and series.inner_lr:
        values["inner_lr"] = series.inner_lr[-1]
    if series is not None and series.norms is not None:
        values |= {f"{name}_grad_norm": norm for name, norm in zip(("min", "mean", "max"), series.norms, strict=True)}
    return values


def step_values(report: TrainReport) -> dict[str, tuple[float, ...]]:
    """Figures of the inner steps: name -> one per step; those that are not known are left out."""
    if (series := report.series) is None:
        return {}
    found = {name: getattr(series, name) for name in ("inner_step", "loss", "grad_norm", "inner_lr")}
    return {f"steps/{name}": figures for name, figures in found.items() if figures}


def evidence_values(evidence: Evidence) -> dict[str, float]:
    """A validator's figures of all miners together; losses that are not finite are left out."""
    records = evidence.miners
    applied = [record for record in records if record.facts.applied]
    means = {
        **_loss_values(records),
        "loss": [] if evidence.loss is None else [evidence.loss],
        "gather/intended_mean_final": [record.final for record in records if record.facts.tier == Tier.GATHER],
        "gather/actual_mean_final": [record.final for record in applied],
    }
    overlaps = [record.facts.overlap.share for record in records if record.facts.overlap is not None]
    return {
        # Divided first, so that no sum of finite numbers can overflow.
        **{name: math.fsum(each / len(numbers) for each in numbers) for name, numbers in means.items() if numbers},
        "network/block": evidence.seed_block,
        "network/evaluated_uids": sum(record.facts.estimate is not None for record in records),
        "network/active_miners": sum(record.facts.payload_sha256 is not None for record in records),
        "gather/success_rate": evidence.facts.success_rate,
        "openskill/baseline": evidence.baseline.ordinal,
        "advantage/typical": evidence.typical_advantage,
        "own_excess/typical": evidence.typical_own_excess,
        "gather/reserve_used": sum(record.facts.tier == Tier.RESERVE for record in applied),
        **({"overlap/max": max(overlaps)} if overlaps else {}),
    }


def miner_values(evidence: Evidence) -> dict[str, dict[int, float]]:
    """A validator's figures of each miner: name -> uid -> figure; unknown figures and empty names are left out."""
    records, weights = evidence.miners, {record.uid: record.weight for record in evidence.weights}
    values: dict[str, dict[int, float | None]] = {
        "gradient_scores": {record.uid: record.gradient_score for record in records},
        "binary_indicators": {record.uid: record.indicator for record in records},
        "binary_moving_averages": {record.uid: record.after.binary_average for record in records},
        "advantages": {record.uid: record.after.advantage for record in records},
        "own_excesses": {record.uid: record.after.own_excess for record in records},
        "final_scores": {record.uid: record.final for record in records},
        "sync_score": {record.uid: record.after.sync for record in records},
        "sync/avg_steps_behind": {record.uid: record.facts.windows_behind for record in records},
        "openskill/mu": {record.uid: record.after.mu for record in records},
        "openskill/sigma": {record.uid: record.after.sigma for record in records},
        "openskill/ordinal": {record.uid: record.after.rating.ordinal for record in records},
        "weights": {record.uid: weights.get(record.uid, 0.0) for record in records},
    }
    punished = [record for record in records if record.slashes]
    inactive = [record for record in punished if any(slash.event in _INACTIVITY for slash in record.slashes)]
    for name, affected in (("slash", punished), ("inactivity", inactive)):
        values[f"{name}/score_before"] = {record.uid: record.before.final for record in affected}
        values[f"{name}/score_after"] = {record.uid: record.final for record in affected}
    known = {
        name: {uid: number for uid, number in numbers.items() if number is not None} for name, numbers in values.items()
    }
    return {name: numbers for name, numbers in known.items() if numbers}


def _loss_values(records: Iterable[MinerRecord]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for record in records:
        estimate = record.facts.estimate
        for where in ("own", "random") if estimate is not None else ():
            before, gain = getattr(estimate, f"{where}_before"), getattr(estimate, f"{where}_gain")
            if before is None or gain is None or not math.isfinite(before - gain):
                continue
            found = {"before": before, "after": before - gain, "improvement": relative_gain(before, gain)}
            for name, number in found.items():
                values.setdefault(f"loss/{where}/{name}", []).append(number)
    return values
