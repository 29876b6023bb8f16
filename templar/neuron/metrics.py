"""What a node says of a window in numbers, for whoever watches many of them.

The names are those that the reference system documents, where the number exists here as well (`templar.neuron.figures`
collects them). The same numbers have two forms: one line of JSON for whoever collects logs, and a file in Prometheus'
text format for the textfile collector of its node exporter.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from templar.errors import TemplarError
from templar.store.files import replacing

LOGGER = "templar.metrics"
"""Where the lines of JSON are logged."""

log = logging.getLogger(LOGGER)

FILE_NAME = "metrics.prom"
"""The file in the neuron's folder; it is replaced as a whole in every window."""

HELP = {
    "network/window": "The window.",
    "network/step": "Outer steps of the state after it.",
    "network/applied_uids": "Payloads that were applied; 0 in a null window.",
    "network/findings": "What did not fit together in the audit of the roster.",
    "gather/success_rate": "Share of the gather tier that revealed something that counts.",
    "gather/successful_uids": "Miners whose payload counts.",
    "gather/failed_uids": "Miners that were asked and whose payload does not count.",
    "timing/gather": "Seconds that the gather took, the wait for the reveals included.",
    "timing/window_total": "Seconds since the flow run of the window began.",
    "loss": "Mean loss: a validator's of the evaluation batch before the step, a miner's of its last inner step.",
    "window_entry_loss": "Mean loss of the first inner step.",
    "inner_steps": "Inner steps taken.",
    "batch_tokens": "Tokens trained on in the window.",
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
"""Every name, without the role that stands before it, and what it means."""


@dataclass(frozen=True)
class Metrics:
    """The numbers of one window of one node.

    Attributes:
        neuron: The neuron's name on this host.
        role: Its role.
        window: The window.
        values: Name -> number.
        of_uids: Name -> uid -> number, of whom there is one; no name without a uid.
        slashes: Uid, event and reason of each penalty.
    """

    neuron: str
    role: str
    window: int
    values: Mapping[str, float]
    of_uids: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    slashes: tuple[tuple[int, str, str], ...] = ()

    def to_json(self) -> str:
        """One line of JSON: the documented names, for each uid in an object, six digits of each number."""
        record: dict[str, object] = {"record": "metrics", "neuron": self.neuron, "window": self.window}
        record |= {f"{self.role}/{name}": _short(value) for name, value in self.values.items()}
        for name, numbers in self.of_uids.items():
            record[f"{self.role}/{name}"] = {uid: _short(value) for uid, value in numbers.items()}
        reasons: dict[int, str] = {}
        for uid, event, reason in self.slashes:
            reasons[uid] = ", ".join(filter(None, (reasons.get(uid), f"{event} ({reason})")))
        if reasons:
            record[f"{self.role}/slash/reason"] = reasons
        return json.dumps(record, separators=(",", ":"), allow_nan=False)

    def to_prometheus(self) -> str:
        """Prometheus' text format: all are gauges; a slash in a name is an underscore, a uid is a label."""
        lines = []
        for name, value in self.values.items():
            lines += [*self._head(name), self._sample(name, value)]
        for name, numbers in self.of_uids.items():
            lines += self._head(name)
            lines += [self._sample(name, value, uid=uid) for uid, value in numbers.items()]
        lines += self._head("slash") if self.slashes else []
        for uid, event, reason in dict.fromkeys(self.slashes):  # a sample that is there twice spoils the whole file
            lines.append(self._sample("slash", 1, uid=uid, event=event, reason=reason))
        return "\n".join([*lines, ""])

    def _metric(self, name: str) -> str:
        return f"templar_{self.role}_{name.replace('/', '_')}"

    def _head(self, name: str) -> list[str]:
        return [f"# HELP {self._metric(name)} {HELP[name]}", f"# TYPE {self._metric(name)} gauge"]

    def _sample(self, name: str, value: float, **labels: object) -> str:
        pairs = ",".join(
            f'{label}="{_escaped(str(text))}"' for label, text in {"neuron": self.neuron, **labels}.items()
        )
        return f"{self._metric(name)}{{{pairs}}} {value!r}"


def publish_metrics(metrics: Metrics, home: Path) -> None:
    """Log the numbers, and replace the file in the neuron's folder; one that cannot be written costs no window."""
    log.info("%s", metrics.to_json())
    try:
        with replacing(home / FILE_NAME) as file:
            file.write(metrics.to_prometheus().encode())
    except TemplarError as error:
        log.warning("window %d: the metrics are not on the disk: %s", metrics.window, error)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
