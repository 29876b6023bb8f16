"""Points for InfluxDB, by its line protocol and the `/write` endpoint that 1.x and 2.x share."""

from collections.abc import Iterator, Mapping, Sequence

from tasks.sinks.sending import HttpTarget, Point

_IN_NAMES = str.maketrans({",": r"\,", "=": r"\=", " ": r"\ "})


class InfluxDatabase(HttpTarget):
    """Writes points to a database.

    The database may be a bucket of 2.x that is mapped to it. A server without authentication takes no token.
    """

    name = "influx"

    def __init__(self, url: str, database: str, token: str) -> None:
        super().__init__(url, {"Authorization": f"Token {token}"} if token else {})
        self._database = database

    def send(self, items: Sequence[Point]) -> None:
        """Write some points; writing them again changes nothing."""
        text = "\n".join(line for item in items for line in _lines(item))
        self.post("/write", text.encode(), query={"db": self._database, "precision": "ms"})


def _lines(point: Point) -> Iterator[str]:
    """Yield a line for the node, one per miner or inner step with figures, and one per figure with other labels."""
    metrics, stamp = point.metrics, int(1000 * point.seconds)
    measurement, neuron = f"templar_{metrics.role}", {"neuron": metrics.neuron}
    of_node: dict[str, float] = {}
    of_miners: dict[str, dict[str, float]] = {}
    others: list[str] = []
    for name, labels, value in metrics.samples():
        if not labels:
            of_node[name] = value
        elif labels.keys() == {"uid"}:
            of_miners.setdefault(labels["uid"], {})[name] = value
        else:
            others.append(_line(f"{measurement}_{name.replace('/', '_')}", neuron | labels, {"value": value}, stamp))
    if of_node:
        yield _line(measurement, neuron, of_node, stamp)
    for uid, values in sorted(of_miners.items(), key=lambda item: int(item[0])):
        yield _line(f"{measurement}_miners", neuron | {"uid": uid}, values, stamp)
    yield from others
    for seconds, _, row in point.steps():
        fields = {name.removeprefix("steps/"): value for name, value in row.items()}
        yield _line(f"{measurement}_steps", neuron, fields, int(1000 * seconds))


def _line(measurement: str, tags: Mapping[str, str], fields: Mapping[str, float], stamp: int) -> str:
    """One line of the protocol, at milliseconds; every figure is a float, so that a field never changes its type."""
    names = ",".join(f"{name.translate(_IN_NAMES)}={value.translate(_IN_NAMES)}" for name, value in tags.items())
    values = ",".join(f"{name.translate(_IN_NAMES)}={float(value)!r}" for name, value in fields.items())
    return f"{measurement},{names} {values} {stamp}"
