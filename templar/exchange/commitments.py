"""Observed commitments: what a node saw of them before the close (docs/protocol.md 7).

A store's time alone proves nothing: a server may stamp the beginning of an upload that ends after the reveals, show an
older version again, or belong to the miner. So every author of a roster looks at the commitments before a reveal is
public, and lists no payload whose commitment it did not see then. Not to have seen one says nothing of its miner: the
store may have failed, or this node.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter

from pydantic import TypeAdapter

from templar.canonical import keyed_seed
from templar.errors import TemplarError, TransientError, as_reader_failure
from templar.exchange.gather import POLL_SECONDS, Workers
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit
from templar.exchange.signed import check_author, check_window, unseal
from templar.timeline import closing_block

log = logging.getLogger(__name__)

GUARDS = 3  # the first look is so many times `commit_guard_seconds` before the close: the guard alone may be a second
LOOKS_PER_GUARD = 3  # a missing commitment is looked for again so often within `commit_guard_seconds`
LEAST_READ_SECONDS = 1.0
"""Least time of one read; it has the time until the next look otherwise, so that no bucket can hold up another one."""
READS_PER_PLACE = 4  # reads at once, as a multiple of the peers that are fetched at once: commitments are small


@dataclass(frozen=True)
class Observed:
    """The commitments of a window that this node saw before the close."""

    window: int
    # Hotkey -> digest of the manifest that it committed to. None if this node did not look everywhere: it may propose
    # nothing.
    digests: Mapping[str, str] | None

    def to_json(self) -> str:
        """The observation as JSON, for the journal."""
        return _JSON.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Observed":
        """The inverse of `to_json`."""
        return _JSON.validate_json(text)


_JSON = TypeAdapter(Observed)


def observe_commitments(exchange: NetworkView, window: int, *, concurrency: int) -> Observed:
    """Look at all commitments of a window, the missing ones again, until all are seen or the window closes.

    The first look is `GUARDS` guards before the expected close. What was read when the closing block was at the head,
    or when the close was over by this machine's clock, counts for nothing: reveals may have been public by then.
    A commitment that is there is read once. A node whose reads do not count for every bucket, because its chain
    endpoint or its clock was wrong, has not looked.

    Raises:
        TransientError: The chain did not name the miners, or the close.
    """
    clock, looks = exchange.chain.clock, _Looks(exchange, window)
    workers: Workers[str | None] = Workers(looks.read, concurrency * READS_PER_PLACE if concurrency > 1 else 1)
    try:
        # 1. Wait for the time of the first look. The expected close may move meanwhile.
        while clock.now() < looks.begin:
            clock.sleep_until(looks.begin)
            looks.estimate()
        while not looks.is_open():
            if looks.is_past_end():
                return Observed(window, None)
            clock.sleep_until(clock.now() + looks.pause)
        # 2. Read what is due; what was seen counts if the chain shows that the window is open still.
        while looks.due and not looks.is_past_end():
            looks.start(workers)
            read = dict(workers.results(POLL_SECONDS))
            if read and looks.is_open() and not looks.is_past_end():
                looks.take(read)
            if looks.due and not workers.is_busy:
                clock.sleep_until(min(*looks.due.values(), looks.times.reveal_interval.first))
        unanswered = {uid for uid in looks.unread if workers.is_running(uid)}
    finally:
        workers.close()
    # 3. Who did not come to look at every bucket would leave out miners that have done nothing wrong. A bucket that
    #    still has not answered fails by itself.
    not_looked_at = sorted(uid for uid in looks.unread if uid not in unanswered)
    if not_looked_at:
        log.warning("window %d: no look at the commitments of uids %s counts", window, not_looked_at)
        return Observed(window, None)
    log.info(
        "window %d: %d commitments seen, those of uids %s are missing", window, len(looks.digests), sorted(looks.due)
    )
    return Observed(window, looks.digests)


class _Looks:
    """The looks at the commitments of one window."""

    def __init__(self, exchange: NetworkView, window: int) -> None:
        rules, own = exchange.hparams.windows, exchange.own_signer.address
        self._exchange, self._window = exchange, window
        self._miners = {neuron.uid: neuron for neuron in exchange.miners(window)}
        self.pause = rules.commit_guard_seconds / LOOKS_PER_GUARD
        self.digests: dict[str, str] = {}
        # Uid -> time of the next look, in an order of this node's own: nobody can be sure to come first.
        order = sorted(self._miners, key=lambda uid: keyed_seed("templar.commitments.order", own, window, uid))
        self.due = dict.fromkeys(order, 0.0)
        self.unread = set(order)  # those of which no read counts so far, not even a failed one
        self.times = exchange.expected_times(window)

    @property
    def begin(self) -> float:
        """When to look for the first time."""
        return self.times.close - GUARDS * self._exchange.hparams.windows.commit_guard_seconds

    def estimate(self) -> None:
        """Estimate the close again, unless the chain does not answer."""
        with suppress(TransientError):
            self.times = self._exchange.expected_times(self._window)

    def is_past_end(self) -> bool:
        """Whether reveals may be public by this machine's clock, though the close is expected as late as it can be."""
        clock = self._exchange.chain.clock
        if clock.now() >= self.times.reveal_interval.first:
            self.estimate()
        return clock.now() >= self.times.reveal_interval.first

    def is_open(self) -> bool:
        """Whether the chain shows that the closing block is not there yet; not, if it does not answer."""
        try:
            head = self._exchange.chain.head()
        except TransientError as error:
            log.warning("window %d: commitments that were just seen do not count: %s", self._window, error)
            return False
        return head < closing_block(self._window, self._exchange.hparams.windows)

    def start(self, workers: Workers[str | None]) -> None:
        """Start the reads that are due, as many as there is room for; those that wait longest come first.

        A bucket that hangs is not asked again before every other one was asked once.
        """
        now = self._exchange.chain.clock.now()
        for uid, due in sorted(self.due.items(), key=itemgetter(1)):
            if due <= now and not workers.is_running(uid) and workers.has_room():
                self.due[uid] = now + self.pause
                workers.start(uid, max(LEAST_READ_SECONDS, self.pause))

    def take(self, read: Mapping[int, str | None]) -> None:
        """Accept what reads showed that ended while the window was open; None showed no commitment."""
        self.unread -= read.keys()
        for uid, digest in read.items():
            if digest is not None:
                del self.due[uid]
                self.digests[self._miners[uid].hotkey] = digest

    def read(self, uid: int) -> str | None:
        """The digest that a miner committed to, by one request; None if no legal commitment is shown."""
        miner = self._miners[uid]
        try:
            with as_reader_failure(f"commitment of uid {uid}"):
                key = str(window_key(Kind.COMMIT, self._window, uid))
                data = self._exchange.buckets.reader(miner).get(key, max_bytes=Commit.max_bytes)
                body = unseal(data, Commit).body
                check_author(body, network=self._exchange.network, uid=uid, hotkey=miner.hotkey)
                check_window(body, self._window)
                return body.commitment
        except TemplarError as error:
            log.debug("window %d: the commitment of uid %d is not seen: %s", self._window, uid, error)
            return None
