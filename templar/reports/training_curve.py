"""The training at a glance: the last windows of a node or of a network, as a drawing and as rows of text.

A node's windows are read from its journal and score book, the network's from published evidence and decided rosters,
and its held-out curve from the signed evaluations of checkpoints. Nothing else is kept, so a restart changes nothing.
What is not known is a gap.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter

from templar.agreement.genesis import Birth
from templar.agreement.voter import Settlement
from templar.errors import TransientError
from templar.exchange.network_view import NetworkView
from templar.exchange.objects import CheckpointEvaluation, RosterEntry
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.reports.checkpoint_evaluation import HeldOut, HeldOutPoint, Place, read_evaluations, shown_results
from templar.reports.history import CONCURRENCY, decided_entries, first_published
from templar.reports.metrics import train_report
from templar.scoring.evidence import Evidence
from templar.store.deadline import in_parallel
from templar.store.files import replacing

LATE_WINDOWS = 3  # evidence of the newest windows is asked for again so many times, because it is published late
MOST_MINERS = 30  # miners that a network's table has besides those of this host
MOST_TASKS = 32  # results of tasks of one checkpoint that are shown; its publisher may list hundreds
OWN_NAME, FAULTS = "neuron of this host", "evaluations left out"
"""The column of names that this host's operator gave, and the row of messages that are the operator's alone."""
NEWEST_EVALUATIONS = 10  # measured checkpoints that a table lists
WIDTH, HEIGHT, LEFT, RIGHT = 720, 320, 56, 704
LOSS_TOP, LOSS_BOTTOM, BARS_TOP, BARS_BOTTOM = 36, 216, 246, 296
HELD_OUT_HEIGHT, MIDDLE_LEFT, MIDDLE_RIGHT = 250, 330, 410
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class CurvePoint:
    """The figures of one window; None for those that are not known."""

    window: int
    loss: float | None = None  # in nats per token
    applied: int | None = None  # payloads; 0 in a null window
    tokens: int | None = None  # that the applied payloads were trained on, as their authors say
    own: bool | None = None  # whether this node's payload was applied

    @classmethod
    def of(
        cls, window: int, loss: float | None, entries: Sequence[RosterEntry] | None, own: str | None = None
    ) -> "CurvePoint":
        """The point of a window with these payloads in its decided roster; None if that is not known."""
        loss = loss if loss is not None and math.isfinite(loss) else None
        if entries is None:
            return cls(window, loss)
        hotkeys = {entry.hotkey for entry in entries}
        tokens = sum(entry.tokens for entry in entries)
        return cls(window, loss, len(entries), tokens, None if own is None else own in hotkeys)


class NodeCurve:
    """The windows that a node's journal still has; each is read once, and again if the node applied it otherwise."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[str | None, CurvePoint]] = {}  # window -> root after it, point

    def points(self, node: Node, window: int) -> tuple[CurvePoint, ...]:
        """The points of a node, always the same one, up to a window, by rising window."""
        first = max(node.birth.start.start_window, window + 1 - node.hparams.storage.retention_windows)
        windows, roots = range(first, window + 1), node.journal.roots(first, window)
        for each in windows:
            root, known = roots.get(each), self._read.get(each)
            if root is None or known is None or known[0] != root:
                self._read[each] = root, _point_of(node, each)
        self._read = {each: self._read[each] for each in windows}
        return tuple(point for _, point in self._read.values())


def _point_of(node: Node, window: int) -> CurvePoint:
    loss, own = None, None
    if isinstance(node, Miner):
        loss, own = train_report(node, window).last_loss, node.exchange.own_signer.address
    elif isinstance(node, Validator) and (evidence := node.book.evidence(window)) is not None:
        loss = evidence.loss
    known = node.journal.result(window, "settle")
    settlement = None if known is None else Settlement.from_json(known)
    if settlement is None:
        return CurvePoint.of(window, loss, None)
    return CurvePoint.of(window, loss, () if settlement.roster is None else settlement.roster.entries, own)


def node_rows(node: Node, points: Sequence[CurvePoint]) -> Rows:
    """The rows of a node's page beside its curve, one per figure; TemplarError if the chain failed."""
    newest, rows = points[-1], [*common_rows(points, node.state.outer_steps, node.birth.start.start_window)]
    if isinstance(node, Miner):
        trained = train_report(node, newest.window)
        speed = "" if trained.figures is None else f", {trained.figures.tokens_per_second:,.0f} tokens/s"
        rows.append(("trained in the newest window", f"{trained.num_steps} steps{speed}"))
        decided = [point for point in points if point.own is not None]
        applied = sum(bool(point.own) for point in decided)
        rows.append(("own payload applied", f"in {applied} of {len(decided)} windows"))
        uid, exchange = node.exchange.identity(newest.window).uid, node.exchange
        on_chain = sorted((validator, row.get(uid, 0.0)) for validator, row in exchange.chain.weights().items())
        shown = ", ".join(f"{weight:.4f} by uid {validator}" for validator, weight in on_chain)
        rows.append(("own weight on chain", shown or "no validator has set weights yet"))
        neuron = exchange.newest_metagraph().by_uid(uid)
        rows.append(("own share of the miners' emission", "unknown" if neuron is None else f"{neuron.incentive:.1%}"))
    if isinstance(node, Validator) and (evidence := node.book.evidence(newest.window)) is not None:
        weights = sorted(evidence.weights, key=lambda each: (-each.weight, each.uid))[:MOST_MINERS]
        shown = ", ".join(f"uid {each.uid}: {each.weight:.4f}" for each in weights if each.weight > 0)
        rows.append(("weights", shown or "none"))
    return rows


def common_rows(points: Sequence[CurvePoint], outer_steps: int | None, start_window: int) -> Iterator[tuple[str, str]]:
    """The figures that every page has."""
    yield "newest window", str(points[-1].window)
    if losses := [point.loss for point in points if point.loss is not None]:
        yield "loss, nats per token", " → ".join(f"{loss:.4f}" for loss in dict.fromkeys((losses[0], losses[-1])))
    if outer_steps is not None:
        yield "outer steps", f"{outer_steps:,}"
    tokens = sum(point.tokens for point in points if point.tokens is not None)
    since = "the start" if points[0].window <= start_window else f"window {points[0].window}"
    unknown = sum(point.tokens is None for point in points)
    without = f"; {unknown} windows are not known" if unknown else ""
    yield "tokens in the applied payloads", f"{tokens:,} since {since}{without}"
    if applied := [point.applied for point in points if point.applied is not None]:
        mean = sum(applied) / len(applied)
        yield "miners applied", f"{applied[-1]} in the newest decided window, {mean:.1f} on average"


@dataclass(frozen=True)
class NetworkGlance:
    """A network as its public objects show it."""

    points: tuple[CurvePoint, ...]  # at least one, by rising window
    rows: Rows
    miners: tuple[Mapping[str, str], ...]  # one row each, the largest weight first
    held_out: tuple[HeldOutPoint, ...] = ()  # of the published checkpoints, by rising window


@dataclass(frozen=True)
class KeptLook:
    """What a look at a network found, for the next one by another process."""

    genesis: str
    points: tuple[CurvePoint, ...]
    held_out: tuple[HeldOutPoint, ...]
    evaluations: tuple[CheckpointEvaluation, ...]  # that they rest on


_KEPT_LOOK = TypeAdapter(KeptLook)


class NetworkCurve:
    """A network's windows out of public objects; a later look reads only what is new. Safe under threads."""

    def __init__(self, exchange: NetworkView, birth: Birth, names: Mapping[str, str]) -> None:
        self.start_window = birth.start.start_window
        self._exchange, self._birth, self._names = exchange, birth, names
        self._held_out = HeldOut()
        self._points: dict[int, CurvePoint] = {}
        self._newest: Evidence | None = None
        self._hotkey: str | None = None  # of the validator whose evidence the last look found
        self._lock = threading.Lock()

    def restore(self, path: Path) -> None:
        """Go on from what `keep` left there, if it is of this network and release."""
        try:
            kept = _KEPT_LOOK.validate_json(path.read_bytes())
        except (OSError, ValueError):
            return
        if kept.genesis == self._birth.network.genesis:
            self._points = {point.window: point for point in kept.points}
            found: dict[Place, CheckpointEvaluation] = {(body.hotkey, body.window): body for body in kept.evaluations}
            self._held_out = HeldOut(kept.held_out, found=found)

    def keep(self, path: Path) -> None:
        """Leave what a later process need not read again: up to the newest evidence, for later one may still come."""
        if (newest := self._newest) is None:
            return
        points = tuple(point for point in self._points.values() if point.window <= newest.window)
        held_out = self._held_out
        kept = KeptLook(self._birth.network.genesis, points, held_out.points, tuple(held_out.found.values()))
        with replacing(path, durable=True) as file:
            file.write(_KEPT_LOOK.dump_json(kept))

    def look(self, window: int) -> NetworkGlance:
        """The windows up to this one, which must be decided; TemplarError if the chain failed."""
        with self._lock:
            return self._look(window)

    def _look(self, window: int) -> NetworkGlance:
        # 1. Ask for what is new, and for what may have been published since the last look.
        first = max(self.start_window, window + 1 - self._exchange.hparams.storage.retention_windows)
        measured = max((each for each, point in self._points.items() if point.loss is not None), default=window)
        wanted = []
        for each in range(first, window + 1):
            point = self._points.get(each)
            has_standings = self._newest is None and each >= measured  # after `restore`
            is_late = each > window - LATE_WINDOWS and point is not None and None in (point.loss, point.applied)
            if point is None or has_standings or is_late:
                wanted.append(each)
        evidences = self._evidences(range(wanted[0], window + 1)) if wanted else {}
        rosters = in_parallel(partial(decided_entries, self._exchange), wanted, CONCURRENCY)
        for each, entries in zip(wanted, rosters, strict=True):
            known, evidence = self._points.get(each, CurvePoint(each)), evidences.get(each)
            found = CurvePoint.of(each, known.loss if evidence is None else evidence.loss, entries)
            self._points[each] = replace(known, loss=found.loss) if entries is None else found
        points = tuple(self._points[each] for each in range(first, window + 1))
        self._points = {point.window: point for point in points}

        # 2. What was measured of published checkpoints.
        self._held_out = read_evaluations(self._exchange, self._birth, self._held_out)
        held_out = self._held_out.points

        # 3. The newest evidence has the standings.
        if evidences:
            self._newest = evidences[max(evidences)]
        steps = None if (newest := self._newest) is None else newest.outer_steps + (newest.roster is not None)
        rows = [*common_rows(points, steps, self.start_window)]
        if held_out:
            score, after = held_out[-1].score, f"after window {held_out[-1].window}"
            text = f"{score.loss:.4f} nats per token, {score.bits_per_byte:.4f} bits per byte, {after}"
            rows.append(("held-out text", text))
        if faults := self._held_out.left_out.values():
            rows.append((FAULTS, "; ".join(dict.fromkeys(map(str, faults)))))
        if newest is None:
            rows.append(("evidence", "no validator shows any of these windows"))
            return NetworkGlance(points, rows, (), held_out)
        rows.append(("evidence", f"of window {newest.window}, by uid {newest.uid}"))
        return NetworkGlance(points, rows, tuple(self._miners(newest)), held_out)

    def _evidences(self, windows: range) -> dict[int, Evidence]:
        """The evidence of the validator that had some at the last look, or else of the first one that has any."""
        self._exchange.newest_metagraph()  # a failure of the chain ends the look, and one of a bucket does not
        try:
            published = first_published(self._exchange, windows, first=self._hotkey)
        except TransientError:
            return {}
        if published is None:
            return {}
        self._hotkey = published.validator.hotkey
        return {evidence.window: evidence for evidence in published.evidences}

    def _miners(self, evidence: Evidence) -> Iterator[Mapping[str, str]]:
        weights = {each.uid: each.weight for each in evidence.weights}
        shares = {each.uid: each.incentive for each in self._exchange.newest_metagraph().neurons}
        ranked = sorted(evidence.miners, key=lambda each: (-weights.get(each.uid, 0.0), each.uid))
        for place, record in enumerate(ranked):
            name = self._names.get(record.facts.hotkey, "")
            if place < MOST_MINERS or name:
                yield {
                    "uid": str(record.uid),
                    OWN_NAME: name,
                    "weight": f"{weights.get(record.uid, 0.0):.4f}",
                    "share of the emission": f"{shares.get(record.uid, 0.0):.1%}",
                    "final score": f"{record.final:.4f}",
                    "newest payload": "applied" if record.facts.applied else str(record.facts.reason or "not applied"),
                }


def held_out_rows(points: Sequence[HeldOutPoint]) -> list[dict[str, str]]:
    """A row per evaluation, with texts as its values."""
    return [
        {
            "window": str(point.window),
            "tokens trained": "unknown" if point.trained is None else f"{point.trained:,}",
            "time": _duration(point.hours),
            "loss": f"{point.score.loss:.4f}",
            "bits per byte": f"{point.score.bits_per_byte:.4f}",
            "tasks": shown_results(point.results[:MOST_TASKS]) or "none",
            "by": ", ".join(f"uid {uid}" for uid in point.uids),
        }
        for point in points
    ]


def newest_evaluations(points: Sequence[HeldOutPoint]) -> list[dict[str, str]]:
    """As `held_out_rows`, of the newest `NEWEST_EVALUATIONS`; a drawing has all of them."""
    return held_out_rows(points[-NEWEST_EVALUATIONS:])


def _duration(hours: float) -> str:
    if hours < 2:
        return f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


# The drawings.


def draw_curve(points: Sequence[CurvePoint], title: str) -> bytes:
    """The loss as a line over bars with the number of applied payloads, as SVG; the same points give the same bytes."""
    first, last = points[0].window, points[-1].window
    width = (RIGHT - LEFT) / (last - first + 1)

    def x(window: int) -> float:
        return LEFT + (window - first + 0.5) * width

    most = max(point.applied or 0 for point in points)
    shapes = [
        text_at(LEFT, 20, escape(title)),
        text_at(LEFT, HEIGHT - 8, f"window {first}"),
        *([text_at(RIGHT, HEIGHT - 8, str(last), "end")] if last > first else []),
        text_at(LEFT, BARS_TOP - 8, f"miners applied, at most {most}"),
    ]

    # A bar per window that is decided; one without payloads is a line at the bottom.
    for point in points:
        if point.applied is not None:
            tall = max(1.0, point.applied / max(most, 1) * (BARS_BOTTOM - BARS_TOP))
            left = x(point.window) - 0.4 * width
            place = f'x="{left:.1f}" y="{BARS_BOTTOM - tall:.1f}" width="{0.8 * width:.1f}" height="{tall:.1f}"'
            shapes.append(f'<rect {place} fill="#93c5fd"/>')

    # The losses between two grid lines; a window without one interrupts the line.
    losses = [point.loss for point in points if point.loss is not None]
    if not losses:
        return svg(HEIGHT, [*shapes, text_at(LEFT, LOSS_TOP + 20, "no loss is known")])
    low, high = min(losses), max(losses)
    for value in dict.fromkeys((high, low)):
        y = height(value, low, high)
        shapes.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#ddd"/>')
        shapes.append(text_at(LEFT - 6, y + 4, f"{value:.2f}", "end"))
    for part in unbroken(
        None if each.loss is None else (x(each.window), height(each.loss, low, high)) for each in points
    ):
        shapes += curve(part)
    return svg(HEIGHT, shapes)


def draw_held_out(points: Sequence[HeldOutPoint]) -> bytes:
    """The held-out loss over tokens and wall time of one point or more, as SVG; the same points give the same bytes."""
    title = f"held-out text: nats per token (right: bits per byte), {len(points)} checkpoints"
    counted = [(float(point.trained), point.score.loss) for point in points if point.trained is not None]
    timed = [(point.hours, point.score.loss) for point in points]
    bits = {point.score.loss: f"{point.score.bits_per_byte:.2f}" for point in points}
    return _over_tokens_and_time(title, counted, timed, "the start", bits)


def draw_over_tokens(points: Sequence[CurvePoint], title: str, window_hours: float, start_window: int) -> bytes | None:
    """The loss of windows over tokens and time, as SVG; None without two losses. A window is so many hours long.

    Tokens that are not known count as none, and a window without a loss is passed over.
    """
    counted, timed, tokens, first = list[tuple[float, float]](), list[tuple[float, float]](), 0, points[0].window
    for point in points:
        if point.loss is not None:
            counted.append((float(tokens), point.loss))
            timed.append(((point.window - first) * window_hours, point.loss))
        tokens += point.tokens or 0
    since = "the start" if first <= start_window else f"window {first}"
    return _over_tokens_and_time(escape(title), counted, timed, since, {}) if len(timed) > 1 else None


def _over_tokens_and_time(
    title: str,
    counted: Sequence[tuple[float, float]],
    timed: Sequence[tuple[float, float]],
    since: str,
    right_marks: Mapping[float, str],
) -> bytes:
    """Two drawings side by side: losses by tokens and by hours, with what stands on the right of a loss."""
    losses = [loss for _, loss in timed]
    low, high = min(losses), max(losses)
    shapes = [text_at(LEFT, 20, title)]
    for loss in dict.fromkeys((high, low)):
        y = height(loss, low, high)
        shapes += [
            f'<path d="M{LEFT} {y:.1f}H{MIDDLE_LEFT}M{MIDDLE_RIGHT} {y:.1f}H{RIGHT - 40}" stroke="#ddd"/>',
            text_at(LEFT - 6, y + 4, f"{loss:.2f}", "end"),
            text_at(RIGHT, y + 4, right_marks.get(loss, ""), "end"),
        ]
    tokens, hours = max(counted, default=(0.0, 0.0))[0], max(timed)[0]
    under = "tokens are not known" if not counted else f"{tokens:,.0f} tokens in the applied payloads"
    for places, most, left, right, label in (
        (counted, tokens, LEFT, MIDDLE_LEFT, under),
        (timed, hours, MIDDLE_RIGHT, RIGHT - 40, f"{_duration(hours)} since {since}"),
    ):
        scale = (right - left) / (most or 1.0)
        shapes += curve([(left + x * scale, height(loss, low, high)) for x, loss in places])
        shapes += [text_at(left, LOSS_BOTTOM + 22, "0"), text_at(right, LOSS_BOTTOM + 22, label, "end")]
    return svg(HELD_OUT_HEIGHT, shapes)


def svg(height: int, shapes: Iterable[str]) -> bytes:
    """An SVG file of `WIDTH` and a height, with these elements."""
    body = "\n".join((f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *shapes))
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{body}\n</svg>\n'.encode()


def height(number: float, low: float, high: float, top: float = LOSS_TOP, bottom: float = LOSS_BOTTOM) -> float:
    """The height of a number between the lowest, at the bottom, and the highest."""
    return top + (high - number) / (high - low or 1.0) * (bottom - top)


def unbroken(places: Iterable[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    """The places in parts without a gap, which is None."""
    return [[place for place in part if place] for is_known, part in groupby(places, bool) if is_known]


def curve(places: Sequence[tuple[float, float]], colour: str = "#1d4ed8") -> Iterator[str]:
    """A point at each place, and the line through them."""
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>'
    if len(places) > 1:
        through = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield f'<path d="M{through}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def text_at(x: float, y: float, text: str, anchor: str = "start") -> str:
    """A text that begins, ends or has its middle at a place."""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-family="sans-serif" font-size="12" text-anchor="{anchor}">{text}</text>'
