"""The leaderboard and its columns: a validator's evidence of some windows as pandas tables, as text and as a drawing.

A window without evidence is a gap: nothing is filled in, and means are over the windows that are there. Miners are
followed by hotkey, under any uid.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from templar.reports.training_curve import LEFT, RIGHT, curve, height, svg, text_at, unbroken
from templar.scoring.evidence import Evidence, MinerRecord

LINES = 10  # the best miners have lines and names, as many as there are colours; all others are within a grey band
COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
CURVES_RIGHT = RIGHT - 84  # the end of the curves, and to the right of it their names
_DTYPES = {
    "window": "int64",
    "uid": "int64",
    "hotkey": "object",
    **dict.fromkeys(("final", "mu", "sigma", "ordinal", "average", "advantage", "own_excess", "sync"), "float64"),
    **dict.fromkeys(("curvature", "predicted_gain", "score"), "float64"),
    "indicator": "Int64",
    "exact": "bool",
    "applied": "bool",
    **dict.fromkeys(("own_loss", "random_loss"), "float64"),
    "reason": "object",
    "discount": "object",
    "slashes": "object",
    "weight": "float64",
}


class Leaderboard:
    """Tables of one validator's evidence, in any order; ValueError without any, or with two of one window."""

    def __init__(self, evidences: Sequence[Evidence]) -> None:
        self.evidences = sorted(evidences, key=lambda evidence: evidence.window)
        windows = [evidence.window for evidence in self.evidences]
        if not windows or len(set(windows)) < len(windows):
            raise ValueError(f"evidences: there must be one of each window, and at least one; these are {windows}")
        self.newest = self.evidences[-1]
        self._every_window = pd.RangeIndex(windows[0], windows[-1] + 1, name="window")

    @property
    def burned(self) -> float:
        """The weight that goes to no miner in the newest window."""
        miners = {record.uid for record in self.newest.miners}
        return sum(record.weight for record in self.newest.weights if record.uid not in miners)

    @cached_property
    def losses(self) -> "pd.Series[float]":
        """Mean loss of the evaluation batch before each window's step, by window; NaN in gaps."""
        known = {evidence.window: np.nan if evidence.loss is None else evidence.loss for evidence in self.evidences}
        return pd.Series(known, dtype=float, name="loss").reindex(self._every_window)

    @cached_property
    def history(self) -> pd.DataFrame:
        """One row per window and miner, by window and uid; CSV files are made of it.

        Columns: `window`, `uid`, `hotkey`, `final`, `mu`, `sigma`, `ordinal`, `average` (of the indicator),
        `advantage`, `own_excess`, `sync`, `curvature` (NaN if it was never measured exactly), `predicted_gain` (that
        the curvature was left out of; each after the window), `score` (NaN if it was not scored), `indicator`, `exact`
        (measured exactly), `applied`, `own_loss`, `random_loss` (before; NaN if not measured or not finite), `reason`
        (why no payload counted), `discount` (why its score counts for less; empty if it counts in full), `slashes`
        (text), `weight`.
        """
        rows = []
        for evidence in self.evidences:
            weights = {record.uid: record.weight for record in evidence.weights}
            rows += [_row(evidence.window, record, weights.get(record.uid, 0.0)) for record in evidence.miners]
        return pd.DataFrame(rows, columns=list(_DTYPES)).astype(_DTYPES)

    @cached_property
    def standings(self) -> pd.DataFrame:
        """The miners of the newest window, the best final score first; the index is the rank.

        Columns: those of `history` from `uid` to `sync`, and `weight`, as of the newest window; `score` (mean),
        `mean_weight`, `windows` (in which it was registered), `measured`, `applied` (in how many of them), `trend`
        (slope of the final score, per window), `slashes` (text), `banned_until` (window; NA if it is not banned).
        """
        history = self.history
        now = history[history["window"] == self.newest.window].set_index("hotkey")
        groups = history[history["hotkey"].isin(now.index)].groupby("hotkey")
        newest = ["uid", "final", "mu", "sigma", "ordinal", "average", "advantage", "own_excess", "sync", "weight"]
        board = now[newest].assign(
            score=groups["score"].mean(),
            mean_weight=groups["weight"].mean(),
            windows=groups.size(),
            measured=groups["score"].count(),
            applied=groups["applied"].sum(),
            trend=pd.Series({hotkey: _slope(group) for hotkey, group in groups}, dtype=float),
            slashes=pd.Series(self._slashes_by_hotkey(), dtype=object),
            banned_until=pd.Series(self._banned(), dtype="Int64"),
        )
        board.insert(1, "hotkey", board.index)
        ranked = board.sort_values(["final", "uid"], ascending=[False, True], ignore_index=True)
        ranked.index = pd.RangeIndex(1, len(ranked) + 1, name="rank")
        return ranked

    @cached_property
    def finals(self) -> pd.DataFrame:
        """Final score by window (rows, gaps included) and hotkey, of the miners of the standings in their order."""
        return self._wide("final")

    @cached_property
    def weights(self) -> pd.DataFrame:
        """Weight by window and hotkey, like `finals`."""
        return self._wide("weight")

    def cells(self) -> list[dict[str, Any]]:
        """Return the standings as texts for people, one row per miner."""
        return [
            {
                "rank": rank,
                "uid": row["uid"],
                "weight": f"{row['weight']:.4f}",
                "mean weight": f"{row['mean_weight']:.4f}",
                "final": f"{row['final']:.4f}",
                "trend": f"{row['trend']:+.4f}",
                "rating": f"{row['ordinal']:.2f} ({row['mu']:.2f} ± {row['sigma']:.2f})",
                "indicator": f"{row['average']:+.4f}",
                "advantage": f"{row['advantage']:+.6f}",
                "own excess": f"{row['own_excess']:+.6f}",
                "mean score": "" if np.isnan(row["score"]) else f"{row['score']:+.6f}",
                "measured": f"{row['measured']} of {row['windows']}",
                "slashes": "; ".join(filter(None, (_ban(row["banned_until"]), row["slashes"]))),
                "hotkey": row["hotkey"],
            }
            for rank, row in enumerate(self.standings.to_dict("records"), start=1)
        ]

    @property
    def summary(self) -> str:
        """One line: the loss, the leader, and how many miners earn."""
        losses = [f"{loss:.4f}" for loss in self.losses.dropna()]
        parts = [f"loss {' → '.join(dict.fromkeys((losses[0], losses[-1])))}"] if losses else []
        for _, first in self.standings.head(1).iterrows():
            parts.append(f"uid {first['uid']} leads with {first['final']:.4f}")
        earning = int((self.standings["weight"] > 0).sum())
        parts.append(f"{earning} of {len(self.standings)} miners earn")
        return ", ".join([*parts, f"{self.burned:.4f} of the weight is burned"] if self.burned else parts)

    def _wide(self, column: str) -> pd.DataFrame:
        table = self.history.pivot_table(index="window", columns="hotkey", values=column)
        return table.reindex(index=self._every_window, columns=list(self.standings["hotkey"]))

    def _slashes_by_hotkey(self) -> dict[str, str]:
        """For example `missing (payload_missing) x3, banned (banned)`, the most frequent one first."""
        counts = defaultdict[str, Counter[str]](Counter)
        for record in (record for evidence in self.evidences for record in evidence.miners):
            counts[record.facts.hotkey].update(f"{slash.event} ({slash.reason})" for slash in record.slashes)
        texts = dict[str, str]()
        for hotkey, slashes in counts.items():
            ranked = sorted(slashes.items(), key=lambda each: (-each[1], each[0]))
            texts[hotkey] = ", ".join(text if count == 1 else f"{text} x{count}" for text, count in ranked)
        return texts

    def _banned(self) -> dict[str, int]:
        bans = {ban.subject: ban.last_window for ban in self.newest.bans}
        found = {}
        for record in self.newest.miners:
            last = [bans[subject] for subject in (record.facts.hotkey, record.facts.bucket) if subject in bans]
            if last:
                found[record.facts.hotkey] = max(last)
        return found


def _row(window: int, record: MinerRecord, weight: float) -> tuple[Any, ...]:
    facts, card, estimate = record.facts, record.after, record.facts.estimate
    return (
        window,
        record.uid,
        facts.hotkey,
        card.final,
        card.mu,
        card.sigma,
        card.rating.ordinal,
        card.binary_average,
        card.advantage,
        card.own_excess,
        card.sync,
        card.curvature,
        card.predicted_gain,
        record.gradient_score,
        record.indicator,
        facts.measurement is not None,
        facts.applied,
        None if estimate is None else estimate.own_before,
        None if estimate is None else estimate.random_before,
        "" if facts.reason is None else str(facts.reason),
        "" if record.discount is None else str(record.discount),
        ", ".join(f"{slash.event} ({slash.reason})" for slash in record.slashes),
        weight,
    )


def _slope(group: pd.DataFrame) -> float:
    """Least-squares slope of the final score; 0 for one window."""
    return float(np.polyfit(group["window"], group["final"], 1)[0]) if len(group) > 1 else 0.0


def _ban(until: Any) -> str:
    return "" if pd.isna(until) else f"banned until window {until}"


def draw(board: Leaderboard) -> bytes:
    """Draw the loss, the final scores with their penalties, and the weights by window, as SVG.

    The same leaderboard gives the same bytes. Gaps are gaps in the lines.
    """
    title = f"loss of the evaluation batch, as uid {board.newest.uid} measured it (nats per token)"
    finals = Panel(166, 346, "final score; grey: all others; a cross is a penalty", board.finals)
    loss, weights = board.losses.to_frame(), Panel(386, 506, "weight", board.weights)
    shapes = [*Panel(36, 126, title, loss, ("black",)).shapes(), *finals.shapes(), *weights.shapes()]
    named = board.history["hotkey"].isin(board.finals.columns[:LINES])
    for _, row in board.history[named & (board.history["slashes"] != "")].iterrows():
        x, y = finals.place(row["window"], row["final"])
        shapes.append(f'<path d="M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6" stroke="black"/>')
    for line, (uid, colour) in enumerate(zip(board.standings["uid"], COLOURS, strict=False)):
        shapes.append(f'<rect x="{CURVES_RIGHT + 12}" y="{168 + 18 * line}" width="10" height="3" fill="{colour}"/>')
        shapes.append(text_at(CURVES_RIGHT + 28, 174 + 18 * line, f"uid {uid}"))
    first = text_at(LEFT, 526, f"window {board.evidences[0].window}")
    return svg(536, [*shapes, first, text_at(CURVES_RIGHT, 526, str(board.newest.window), "end")])


@dataclass(frozen=True, eq=False)
class Panel:
    """Curves between two heights of a drawing, one for each of the first columns over the band of all others."""

    top: float
    bottom: float
    title: str
    table: pd.DataFrame  # by window, gaps included
    colours: tuple[str, ...] = COLOURS

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest number; zeros if there is none."""
        low, high = np.nan_to_num([self.table.min().min(), self.table.max().max()]).tolist()
        return low, high

    def place(self, window: int, number: float) -> tuple[float, float]:
        """The place in the drawing of a number in a window."""
        width = (CURVES_RIGHT - LEFT) / len(self.table)
        x = LEFT + (window - self.table.index[0] + 0.5) * width
        return x, height(number, *self.ends, self.top, self.bottom)

    def shapes(self) -> Iterator[str]:
        """All elements; the first column is uppermost."""
        yield text_at(LEFT, self.top - 12, self.title)
        for number in dict.fromkeys(reversed(self.ends)):
            _, y = self.place(0, number)
            yield f'<path d="M{LEFT} {y:.1f}H{CURVES_RIGHT}" stroke="#ddd"/>'
            yield text_at(LEFT - 6, y + 4, f"{number:.3g}", "end")
        others = self.table.iloc[:, len(self.colours) :]
        for under, over in zip(self._runs(others.min(axis=1)), self._runs(others.max(axis=1)), strict=True):
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*over, *reversed(under)])
            yield f'<polygon points="{corners}" fill="#ddd"/>'
        for column, colour in reversed([*zip(self.table, self.colours, strict=False)]):
            for run in self._runs(self.table[column]):
                yield from curve(run, colour)

    def _runs(self, numbers: "pd.Series[float]") -> list[list[tuple[float, float]]]:
        """The places of numbers by window, in parts without a gap."""
        by_window = zip(self.table.index, numbers, strict=True)
        return unbroken(None if np.isnan(number) else self.place(window, number) for window, number in by_window)
