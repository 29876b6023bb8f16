"""Explain what a miner got for a window, and why, from what the validators have published.

    templar why --uid 3 --window 120 [--validator 2] [--json]

Per validator: whether the miner had data, whether its payload counted and was applied, its measured score, penalties,
averages before and after, and its weight, each with the reason code (docs/protocol.md 16) and the hash of the signed
evidence that says so. `templar audit` checks whether that evidence is true.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from deployments.neuron.status import folding_table
from deployments.options import command_parser
from deployments.reading import open_network
from templar.arguments import whole_number
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.network_view import NetworkView
from templar.neuron.configuration import NeuronConfig
from templar.reports.history import read_published
from templar.scoring.evidence import Evidence, MinerRecord
from templar.timeline import window_of

AVERAGES = ("binary_average", "advantage", "own_excess", "sync", "mu", "sigma", "final")
"""The fields of a score card that pay follows from."""
TIERS = {"gather": "on the peer list", "reserve": "in the reserve of the peer list", "other": "not on the peer list"}


@dataclass(frozen=True)
class Point:
    """One thing that a validator found about a miner in a window."""

    what: str
    found: str
    reason: Reason | None = None  # of what cost the miner something


@dataclass(frozen=True)
class Answer:
    """The statements of one validator about a miner in a window."""

    validator: int
    evidence: str | None  # hash of the signed object that says so; None if there is none
    points: tuple[Point, ...]


def explain(evidence: Evidence, uid: int) -> tuple[Point, ...]:
    """Return what a validator's evidence of a window says about a uid, in the order in which it came about."""
    record = next((each for each in evidence.miners if each.uid == uid), None)
    if record is None:
        text = f"uid {uid} was no miner when window {evidence.window} opened: not registered, or with another role"
        return (Point("registered", text, Reason.NOT_REGISTERED),)
    return (*_of_payload(record), *_of_score(record), *_of_pay(evidence, record))


def _of_payload(record: MinerRecord) -> Iterator[Point]:
    facts = record.facts
    if not facts.assigned:
        yield Point("data", "all slots were taken: it had nothing to train on", Reason.NO_ASSIGNMENT)
    yield Point("peers", TIERS[facts.tier])
    if facts.payload_sha256 is None:
        yield Point("payload", "none counts", facts.reason or (None if facts.assigned else Reason.NO_ASSIGNMENT))
        return
    yield Point("payload", f"{facts.payload_sha256[:12]} counts")
    yield Point("roster", "applied" if facts.applied else "not applied: it is measured all the same")
    behind = "unknown, its store failed" if facts.windows_behind is None else f"{facts.windows_behind} windows behind"
    yield Point("state", behind)


def _of_score(record: MinerRecord) -> Iterator[Point]:
    facts = record.facts
    if facts.estimate is not None:
        own, others = facts.estimate.own_gain, facts.estimate.random_gain
        yield Point("gain", f"first order, in nats per token: {_number(own)} on its data, {_number(others)} on others'")
    if facts.measurement is not None:
        measured = facts.measurement
        fall = f"{_number(measured.random_before)} to {_number(measured.random_after)}"
        yield Point("measured exactly", f"loss on others' data {fall}")
    if record.gradient_score is not None:
        yield Point("score", f"{_number(record.gradient_score)}, indicator {record.indicator:+d}", record.discount)
    elif facts.payload_sha256 is not None:
        yield Point("score", "not scored", record.discount)
    for name, likeness in (("overlap", facts.overlap), ("repeat", facts.repeat)):
        if likeness is not None and record.copied:
            yield Point(
                name, f"{100 * likeness.share:.0f} % of the coefficients beyond chance are uid {likeness.uid}'s"
            )
    for slash in record.slashes:
        yield Point("penalty", slash.event, slash.reason)


def _of_pay(evidence: Evidence, record: MinerRecord) -> Iterator[Point]:
    before, after = record.before, record.after
    changed = (f"{name} {_number(getattr(before, name))} to {_number(getattr(after, name))}" for name in AVERAGES)
    yield Point("averages", ", ".join(changed))
    subjects = {record.facts.hotkey, record.facts.bucket}
    for ban in evidence.bans:
        if ban.subject in subjects:
            yield Point("ban", f"to window {ban.last_window}")
    weight = next((each.weight for each in evidence.weights if each.uid == record.uid), 0.0)
    yield Point("weight", f"{weight:.4f}" if weight else f"none: the final score is {_number(after.final)}")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def answers(config: NeuronConfig, uid: int, window: int, validator: int | None) -> list[Answer]:
    """What each validator that announced itself says, or one of them; `window_not_open`, `not_registered`."""
    birth = config.birth()
    exchange = config.reading(birth)
    current = window_of(config.chain.block(), config.hparams.windows)
    if not birth.start.start_window <= window < current:
        problem = f"--window {window}: the windows that have closed are {birth.start.start_window} to {current - 1}"
        raise PermanentError(Reason.WINDOW_NOT_OPEN, problem)
    validators = [each for each in exchange.newest_metagraph().validators() if validator in (None, each.uid)]
    if not validators:
        raise PermanentError(Reason.NOT_REGISTERED, f"--validator {validator}: there is no such validator")
    return [_answer(exchange, each, uid, window) for each in validators]


def _answer(exchange: NetworkView, validator: NeuronInfo, uid: int, window: int) -> Answer:
    try:
        published = read_published(exchange, validator, range(window, window + 1))
    except TemplarError as error:
        return Answer(validator.uid, None, (Point("evidence", error.message, error.reason),))
    for _, fault in published.left_out:
        return Answer(validator.uid, None, (Point("evidence", str(fault), fault.reason),))
    for evidence in published.evidences:
        return Answer(validator.uid, evidence.digest, explain(evidence, uid))
    text = "none of this window: it measured nothing, is not done yet, or has removed it"
    return Answer(validator.uid, None, (Point("evidence", text, Reason.EVIDENCE_MISSING),))


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line; 0 if at least one validator's evidence answers."""
    parser = command_parser("templar why", __doc__, "--neuron", "--env-file", "--validator", "--json")
    parser.add_argument("--uid", type=whole_number(0), required=True, help="the miner")
    parser.add_argument("--window", type=whole_number(0), required=True, help="the window")
    arguments = parser.parse_args(words)
    config = open_network(arguments).config
    with closing(config.buckets):
        found = answers(config, arguments.uid, arguments.window, arguments.validator)
    if arguments.json:
        print(json.dumps([asdict(answer) for answer in found]))
    else:
        show(found, Console())
    return 0 if any(answer.evidence for answer in found) else 1


def show(found: Sequence[Answer], console: Console) -> None:
    """Print a table per validator."""
    for answer in found:
        says = "has no evidence" if answer.evidence is None else f"evidence {answer.evidence[:12]}"
        rows = ((point.what, point.found, Text(point.reason or "", "red")) for point in answer.points)
        console.print(
            folding_table("what", "found", "reason", rows=rows, title=f"validator {answer.validator}: {says}")
        )
