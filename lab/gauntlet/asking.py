"""Ask `templar why` about a miner in a window, and hold the answer against the validator's own score book."""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from deployments.why import Answer, Point, answers
from templar.errors import TemplarError
from templar.neuron.configuration import NeuronConfig
from templar.neuron.validator import Validator
from templar.scoring.evidence import Evidence, MinerRecord


@dataclass(frozen=True)
class Asked:
    """One question, and what came of it."""

    uid: int
    window: int
    seconds: float
    answered: bool  # what the miner got is explained
    differences: tuple[str, ...]  # what the answer says otherwise than the evidence that the validator keeps

    @property
    def problem(self) -> str | None:
        """Return what is wrong with the answer, in one line; None if nothing is."""
        if self.answered and not self.differences:
            return None
        wrong = f"says otherwise than the evidence: {', '.join(self.differences)}" if self.differences else "no answer"
        return f"why uid {self.uid} got what it got in window {self.window}: {wrong}"


@dataclass(frozen=True)
class Questions:
    """All questions about one network."""

    asked: tuple[Asked, ...]

    @property
    def summary(self) -> str:
        """The figures in one line."""
        right = sum(each.problem is None for each in self.asked)
        slowest = max((each.seconds for each in self.asked), default=0.0)
        return f"why: {right} of {len(self.asked)} answers agree with the evidence, the slowest took {slowest:.1f} s"

    def problems(self, uids: Collection[int]) -> tuple[str, ...]:
        """Return what is wrong with the answers about some miners."""
        return tuple(each.problem for each in self.asked if each.uid in uids and each.problem is not None)


def ask(asking: NeuronConfig, validator: Validator, uid: int, window: int) -> Asked:
    """Ask about one miner in one window, from public objects, as its operator would."""
    own, evidence = validator.exchange.identity(window).uid, validator.book.evidence(window)
    started = time.perf_counter()
    try:
        (answer,) = answers(asking, uid, window, own)
    except TemplarError as error:
        return Asked(uid, window, time.perf_counter() - started, False, (str(error),))
    seconds = time.perf_counter() - started
    return Asked(uid, window, seconds, is_answered(answer), tuple(differences(answer, evidence, uid)))


def is_answered(answer: Answer) -> bool:
    """Whether the answer says what the miner got, and why if that was nothing."""
    points = {point.what: point for point in answer.points}
    if answer.evidence is None or "weight" not in points:
        return any(point.reason is not None for point in answer.points)
    return "score" in points or points["payload"].reason is not None or "penalty" in points


def differences(answer: Answer, evidence: Evidence | None, uid: int) -> Iterator[str]:
    """Yield what an answer says otherwise than the evidence that the validator keeps; None if it keeps none."""
    if evidence is None or answer.evidence is None:
        if evidence is not None or answer.evidence is not None:
            yield "whether there is evidence"
        return
    record = next((each for each in evidence.miners if each.uid == uid), None)
    points = {point.what: point for point in answer.points}
    if answer.evidence != evidence.digest:
        yield "the hash of the evidence"
    if record is None or "registered" in points:
        if record is not None or "registered" not in points:
            yield "whether it was a miner"
        return
    weight = next((each.weight for each in evidence.weights if each.uid == uid), 0.0)
    if not points["weight"].found.startswith(f"{weight:.4f}" if weight else "none: "):
        yield "the weight"
    if {point.reason for point in answer.points if point.what == "penalty"} != {each.reason for each in record.slashes}:
        yield "the penalties"
    yield from _payload_differences(points, record)


def _payload_differences(points: Mapping[str, Point], record: MinerRecord) -> Iterator[str]:
    facts = record.facts
    if facts.payload_sha256 is None:
        if facts.reason is not None and points["payload"].reason is not facts.reason:
            yield "why no payload counts"
    elif points["roster"].found.startswith("applied") is not facts.applied:
        yield "whether the payload was applied"
    elif points["score"].reason is not record.discount:
        yield "the discount"
