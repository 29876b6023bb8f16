"""Miners that publish at the wrong time, act by a wrong clock, or change what they have published."""

import math
from dataclasses import replace
from typing import ClassVar

from templar.adversary.chains import SkewedChain
from templar.adversary.mutations import patched
from templar.canonical import sha256_hex
from templar.errors import Reason
from templar.exchange.keys import Kind, window_key
from templar.exchange.objects import Commit
from templar.exchange.publish import TimedReport, publish_in_time
from templar.exchange.reveal import publish_commit
from templar.exchange.sealing import seal
from templar.gradient.layout import HEADER_BYTES, TOP_BYTES
from templar.hparams import HParams
from templar.neuron.joining import NodeSettings, Surroundings
from templar.neuron.miner import Miner

SKEW_SECONDS = 30.0


class SilentMiner(Miner):
    """Commits and never reveals."""

    def upload(self, window: int) -> TimedReport:
        """Nothing is published."""
        return TimedReport((), Reason.NO_TIME_LEFT, f"window {window}: a silent miner reveals nothing")


class LateMiner(Miner):
    """Reveals after the grace."""

    def upload(self, window: int) -> TimedReport:
        """Publish one second too late."""
        times = self.exchange.acting_times(window)
        self.chain.clock.sleep_until(times.reveal_interval.last + 1)
        return self._reveal(window, deadline=times.reveal_interval.last + 2)


class HastyMiner(Miner):
    """Reveals before the close."""

    def commit(self, window: int) -> TimedReport:
        """Everything at once."""
        report = super().commit(window)
        self._reveal(window, deadline=math.inf)
        return report

    def upload(self, window: int) -> TimedReport:
        """It is there already."""
        del window
        return TimedReport(())


class LateCommittingMiner(Miner):
    """Commits when the window has closed."""

    def commit(self, window: int) -> TimedReport:
        """One second too late."""
        last = self.exchange.expected_times(window).commit_interval.last
        clock, manifest, signer = self.chain.clock, self._manifest(window), self.exchange.own_signer
        clock.sleep_until(last + 1)
        return publish_in_time(
            lambda: (publish_commit(self.buckets.own, manifest, signer, clock=clock, deadline=math.inf),)
        )


class EarlyCommittingMiner(Miner):
    """Commits to the next window in this one: from its second window on, its commitments are too early."""

    def commit(self, window: int) -> TimedReport:
        """The own commitment if there is none yet, and one to nothing in particular for the next window."""
        uid, store = self.exchange.identity(window).uid, self.buckets.own
        is_there = store.head(window_key(Kind.COMMIT, window, uid)) is not None
        report = TimedReport(()) if is_there else super().commit(window)
        digest = sha256_hex(f"{window + 1}: to be decided".encode())
        body = Commit(**self.exchange.author(window), window=window + 1, commitment=digest)
        store.put(window_key(Kind.COMMIT, window + 1, uid), seal(body, self.exchange.own_signer).encode())
        return report


class SkewedMiner(Miner):
    """Honest, by a clock that is wrong."""

    skew_seconds: ClassVar[float]

    def __init__(self, settings: NodeSettings, hparams: HParams, surroundings: Surroundings) -> None:
        chain = SkewedChain(surroundings.chain, self.skew_seconds)
        super().__init__(settings, hparams, replace(surroundings, chain=chain))


class FastClockMiner(SkewedMiner):
    """Honest, by a clock that is half a minute ahead."""

    skew_seconds = SKEW_SECONDS


class SlowClockMiner(SkewedMiner):
    """Honest, by a clock that is half a minute behind."""

    skew_seconds = -SKEW_SECONDS


class SwappingMiner(Miner):
    """Reveals, and puts another payload in its place while the reveals are still open."""

    def upload(self, window: int) -> TimedReport:
        """Two payloads, the second over the first."""
        report = super().upload(window)
        self.chain.clock.sleep_until(self.swap_at(window))
        data = self._payload_path(window).read_bytes()
        first_sign = HEADER_BYTES + TOP_BYTES + self.layout.tensors[0].num_chunks * self.layout.tensors[0].levels
        swapped = patched(data, first_sign, bytes([data[first_sign] ^ 0xFF]))
        self.buckets.own.put(window_key(Kind.GRADIENT, window, self.exchange.identity(window).uid), swapped)
        return report

    def swap_at(self, window: int) -> float:
        """Before the reveals are relied upon."""
        return self.exchange.acting_times(window).reveal_interval.last


class LateSwappingMiner(SwappingMiner):
    """Reveals, and puts another payload in its place once the first readers have read."""

    def swap_at(self, window: int) -> float:
        """Between the readers at the settling second and those who come later."""
        return self.exchange.acting_times(window).settles + 0.5


class WithdrawingMiner(Miner):
    """Reveals, and takes the payload away again."""

    def upload(self, window: int) -> TimedReport:
        """There, and gone."""
        report = super().upload(window)
        self.chain.clock.sleep_until(self.exchange.acting_times(window).reveal_interval.last)
        self.buckets.own.delete([window_key(Kind.GRADIENT, window, self.exchange.identity(window).uid)])
        return report
