"""Observe a network while and after it runs: gather reports, logs, public objects and journals.

`sweep` cleans every bucket while the network runs, by clocks that are wrong, to race with slow readers.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lab.adversary.chains import SkewedClock
from lab.adversary.hostile import SKEW_SECONDS, TRAP
from lab.adversary.judge import History, Sighting
from lab.adversary.reports import Accusation
from lab.simulate.world import START_WINDOW, Member, World
from templar.agreement.ballot_box import decided_roster
from templar.chain.base import NeuronInfo
from templar.errors import TransientError
from templar.exchange.gather import GatherReport
from templar.exchange.object_keys import Kind, aggregate_key, parse_current_key
from templar.exchange.objects import Roster
from templar.gradient.codec.wire import Payload, decode
from templar.housekeeping.maintenance import clean_bucket
from templar.neuron.node import Node
from templar.reports.metrics import LOGGER
from templar.timeline import window_of
from templar.training.model import genesis_parameters

MAX_LINE = 2000
MAX_METRICS_LINE = 1 << 16  # the line of metrics has figures of every miner: 33 kB for 256 of them


@dataclass
class Watch:
    """Observations of a network while it runs; the fields are as in `History`."""

    sightings: list[Sighting] = field(default_factory=list)
    crashes: dict[str, str] = field(default_factory=dict)
    unprintable: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    swept: int = 0

    def follow(self, node: Node) -> None:
        """Write down what a node finds when it gathers."""
        gather = node.gather

        def watched(window: int, *, others: Sequence[NeuronInfo] = ()) -> GatherReport:
            report = gather(window, others=others)
            name = node.name
            self.sightings += [Sighting(window, name, each.uid, each.reason, each.detail) for each in report.outcomes]
            return report

        node.gather = watched  # type: ignore[method-assign]

    @contextmanager
    def logs(self) -> Iterator[None]:
        """Look at every line that the project logs meanwhile."""
        handler, logger = _Inspector(self.unprintable), logging.getLogger("templar")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


class _Inspector(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.INFO)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what is not one printable line."""
        text = record.getMessage()
        longest = MAX_METRICS_LINE if record.name == LOGGER else MAX_LINE
        if not text.isprintable() or len(text) > longest:
            self._found.append(ascii(text[:200]))


def history_of(
    watch: Watch,
    world: World,
    nodes: Mapping[str, Node],
    witness: Node,
    windows: Sequence[int],
    *,
    accusations: Sequence[Accusation] = (),
) -> History:
    """The history of a network that ran, for windows whose objects are still there.

    `witness` is a node to which nothing happened; it reads the public objects.
    """
    genesis = genesis_parameters(world.hparams.model)
    rosters: dict[int, tuple[int, ...]] = {}
    payloads: dict[int, dict[int, Payload]] = {}
    for window in windows:
        try:
            found = decided_roster(witness.exchange, window)
        except TransientError as error:
            found, watch.crashes[f"window {window}"] = None, str(error)
        payloads[window] = {} if found is None else _payloads(witness, *found)
        rosters[window] = () if found is None else tuple(entry.uid for entry in found[0].entries)
    moved = sum(
        float((tensor.double() - genesis[name].double()).square().sum())
        for name, tensor in witness.state.params.items()
    )
    return History(
        windows=tuple(windows),
        rosters=rosters,
        payloads=payloads,
        sightings=tuple(watch.sightings),
        roots={name: node.journal.roots(windows[0], windows[-1]) for name, node in nodes.items()},
        crashes=dict(watch.crashes),
        traces=tuple(sorted(str(path.relative_to(world.root)) for path in world.root.rglob(TRAP))),
        unprintable=tuple(watch.unprintable),
        moved=math.sqrt(moved),
        deleted=tuple(watch.deleted),
        swept=watch.swept,
        accusations=tuple(accusations),
        first={window: witness.exchange.publishers(window)[0].uid for window in windows},
    )


def _payloads(witness: Node, roster: Roster, publisher: NeuronInfo) -> dict[int, Payload]:
    """The payloads of a roster, from its aggregate."""
    store, offset = witness.buckets.reader(publisher), 0
    data = store.get(aggregate_key(roster.window), max_bytes=roster.aggregate_bytes) if roster.entries else b""
    payloads = {}
    for entry in roster.entries:
        payloads[entry.uid] = decode(data[offset : offset + entry.payload_bytes], witness.layout)
        offset += entry.payload_bytes
    return payloads


def sweep(world: World, watch: Watch, last: int) -> None:
    """Clean every bucket twice in every window, each by a clock half a minute ahead, right, or behind.

    It records each object that is deleted too early: one of the last `retention_windows` windows, or one
    that has no window.
    """
    rules = world.hparams.windows
    window_seconds = rules.blocks_per_window * rules.block_seconds
    for turn in range(2 * START_WINDOW, 2 * last + 1):
        world.clock.sleep_until(world.stage.genesis_time + (turn / 2 + 0.15) * window_seconds)
        for member in world.running:
            _clean(world, watch, member, (0.0, SKEW_SECONDS, -SKEW_SECONDS)[member.uid % 3])


def _clean(world: World, watch: Watch, member: Member, skew_seconds: float) -> None:
    store = world.stage.open_store(member.account_id)
    before = {info.key for info in store.list()}
    oldest = window_of(world.chain.block(), world.hparams.windows) - world.hparams.storage.retention_windows
    try:
        clean_bucket(world.config(member, SkewedClock(world.clock, skew_seconds)), dry_run=False)
    except TransientError:
        return  # by this clock the chain has not begun yet
    except Exception as error:  # noqa: BLE001 - however a clean-up ends, it is the verdict's to say so
        watch.crashes[f"clean-up of {member.name}"] = f"{type(error).__name__}: {error}"
    for name in sorted(before - {info.key for info in store.list()}):
        key = parse_current_key(name)
        if key is None or key.window is None or (key.window >= oldest and key.kind is not Kind.CHECKPOINT):
            watch.deleted.append(f"{member.name}/{name}")
        else:
            watch.swept += 1
