"""Points for InfluxDB, by its line protocol and the `/write` endpoint that 1.x and 2.x share."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.sinks.http import HttpTarget
from templar.housekeeping.metrics import Metrics

_IN_NAMES = str.maketrans({",": r"\,", "=": r"\=", " ": r"\ "})


@dataclass(frozen=True)
class Point:
    """The figures of a window, and when they came."""

    metrics: Metrics
    seconds: float = field(default_factory=time.time)

    def lines(self) -> list[str]:
        """A line for the node, and one per miner that it has figures of."""
        role, neuron, stamp = self.metrics.role, self.metrics.neuron, int(self.seconds)
        by_uid: dict[int, dict[str, float]] = {}
        for name, figures in self.metrics.of_uids.items():
            for uid, value in figures.items():
                by_uid.setdefault(uid, {})[name] = value
        found = [_line(f"templar_{role}", {"neuron": neuron}, self.metrics.values, stamp)]
        for uid, values in sorted(by_uid.items()):
            found.append(_line(f"templar_{role}_miners", {"neuron": neuron, "uid": str(uid)}, values, stamp))
        return found


class InfluxDatabase(HttpTarget):
    """Writes points to a database.

    Args:
        url: Of the server.
        database: Name of the database; a bucket of 2.x that is mapped to it.
        token: For the header Authorization; empty for a server without authentication.
    """

    name = "influx"

    def __init__(self, url: str, database: str, token: str) -> None:
        super().__init__(url, {"Authorization": f"Token {token}"} if token else {})
        self._database = database

    def send(self, items: Sequence[Point]) -> None:
        """Write some points; writing them again changes nothing."""
        text = "\n".join(line for item in items for line in item.lines())
        self.post("/write", text.encode(), query={"db": self._database, "precision": "s"})


def _line(measurement: str, tags: Mapping[str, str], fields: Mapping[str, float], seconds: int) -> str:
    """One line of the protocol; every figure is a float, so that a field never changes its type."""
    names = ",".join(f"{name.translate(_IN_NAMES)}={value.translate(_IN_NAMES)}" for name, value in tags.items())
    values = ",".join(f"{name.translate(_IN_NAMES)}={float(value)!r}" for name, value in fields.items())
    return f"{measurement},{names} {values} {seconds}"
