"""Miners that want to be paid for another's work, or for their own twice.

Each has what anybody has: every bucket to read, the chain, and the clock.
"""

from templar.errors import Reason, TemplarError
from templar.exchange.keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest
from templar.exchange.publish import TimedReport
from templar.exchange.sealing import Sealed, seal, unseal
from templar.neuron.miner import Miner

MAX_BYTES = 1 << 24


class Impostor(Miner):
    """Looks at what others publish."""

    def stolen(self, window: int, kind: Kind) -> bytes | None:
        """The first other miner's object of a kind that can be read now."""
        own = self.exchange.identity(window).uid
        for neuron in self.exchange.miners(window):
            key = window_key(kind, window, neuron.uid)
            try:
                store = self.buckets.reader(neuron)
                if neuron.uid != own and store.head(key) is not None:
                    return store.get(key, max_bytes=MAX_BYTES)
            except TemplarError:
                continue  # who cannot be read cannot be robbed
        return None

    def wait_for_reveals(self, window: int) -> None:
        """Until the last second in which a reveal counts: the others have revealed by then."""
        self.chain.clock.sleep_until(self.exchange.acting_times(window).reveal_interval.last)

    def show_stolen(self, window: int) -> TimedReport:
        """Publish another's manifest and payload, as they are, under the own keys."""
        self.wait_for_reveals(window)
        for kind in (Kind.MANIFEST, Kind.GRADIENT):
            stolen = self.stolen(window, kind)
            if stolen is not None:
                self.put(kind, window, stolen)
        return TimedReport(())

    def put(self, kind: Kind, window: int, data: bytes) -> None:
        """Publish bytes under an own key, over whatever is there."""
        uid = self.exchange.identity(window).uid
        self.buckets.own.put(window_key(kind, window, uid), data)

    def put_sealed(self, body: Commit | Manifest) -> None:
        """Sign and publish an object, over whatever is there."""
        self.put(body.kind, body.window, seal(body, self.exchange.own_signer).encode())


class CopyingMiner(Impostor):
    """Publishes another's payload, bit for bit, under a manifest of its own that it never committed to."""

    def upload(self, window: int) -> TimedReport:
        """The copy as the own work."""
        self.wait_for_reveals(window)
        payload, manifest = self.stolen(window, Kind.GRADIENT), self.stolen(window, Kind.MANIFEST)
        if payload is None or manifest is None:
            return nothing_to_steal(window)
        other = unseal(manifest, Manifest).body
        copied = {"payload_sha256": other.payload_sha256, "payload_bytes": other.payload_bytes}
        self.put(Kind.GRADIENT, window, payload)
        self.put_sealed(self._manifest(window).model_copy(update=copied))
        return TimedReport(())


class LateCommittingCopyingMiner(CopyingMiner):
    """Copies, and puts a fitting commitment in the place of the one that it made in time."""

    def upload(self, window: int) -> TimedReport:
        """Copy, manifest and commitment fit together; the commitment's time does not."""
        report = super().upload(window)
        if report.in_time:
            key = window_key(Kind.MANIFEST, window, self.exchange.identity(window).uid)
            manifest = unseal(self.buckets.own.get(key, max_bytes=Manifest.max_bytes), Manifest).body
            self.put_sealed(manifest.commit)
        return report


class CommitCopyingMiner(Impostor):
    """Commits to the digest that another committed to, and hopes to have its manifest count as well."""

    def commit(self, window: int) -> TimedReport:
        """Another's commitment under the own name."""
        times = self.exchange.expected_times(window)
        self.chain.clock.sleep_until(times.commit_interval.last)
        stolen = self.stolen(window, Kind.COMMIT)
        if stolen is None:
            return nothing_to_steal(window)
        digest = unseal(stolen, Commit).body.commitment
        self.put_sealed(self._manifest(window).commit.model_copy(update={"commitment": digest}))
        return TimedReport(())

    def upload(self, window: int) -> TimedReport:
        """The other's manifest and payload as they are."""
        return self.show_stolen(window)


class ImpersonatingMiner(Impostor):
    """Signs a manifest that names another's uid and hotkey."""

    def upload(self, window: int) -> TimedReport:
        """The other's name over the own signature."""
        self.wait_for_reveals(window)
        stolen = self.stolen(window, Kind.MANIFEST)
        if stolen is None:
            return nothing_to_steal(window)
        other, own = unseal(stolen, Manifest).body, self._manifest(window)
        sealed = seal(own, self.exchange.own_signer)
        named = own.model_copy(update={"uid": other.uid, "hotkey": other.hotkey})
        self.put(Kind.MANIFEST, window, Sealed(named, sealed.signature).encode())
        self.put(Kind.GRADIENT, window, self._payload_path(window).read_bytes())
        return TimedReport(())


class BucketCopyingMiner(Impostor):
    """Puts another's signed commitment, manifest and payload into its own bucket, as they are."""

    def commit(self, window: int) -> TimedReport:
        """The other's signed commitment."""
        times = self.exchange.expected_times(window)
        self.chain.clock.sleep_until(times.commit_interval.last)
        stolen = self.stolen(window, Kind.COMMIT)
        if stolen is None:
            return nothing_to_steal(window)
        self.put(Kind.COMMIT, window, stolen)
        return TimedReport(())

    def upload(self, window: int) -> TimedReport:
        """The other's signed manifest and its payload."""
        return self.show_stolen(window)


class ReplayingMiner(Impostor):
    """Works in its first window, and publishes the signed objects of that window again in every later one."""

    _worked: int | None = None

    def commit(self, window: int) -> TimedReport:
        """The old commitment."""
        if self._worked is None:
            self._worked = window
            return super().commit(window)
        self.put(Kind.COMMIT, window, self._old(Kind.COMMIT, window))
        return TimedReport(())

    def upload(self, window: int) -> TimedReport:
        """The old manifest and payload."""
        if self._worked in (None, window):
            return super().upload(window)
        self.wait_for_reveals(window)
        for kind in (Kind.MANIFEST, Kind.GRADIENT):
            self.put(kind, window, self._old(kind, window))
        return TimedReport(())

    def _old(self, kind: Kind, window: int) -> bytes:
        uid = self.exchange.identity(window).uid
        return self.buckets.own.get(window_key(kind, self._worked or window, uid), max_bytes=MAX_BYTES)


class RepeatingMiner(ReplayingMiner):
    """Works in its first window, and commits anew to the same payload in every later one."""

    def commit(self, window: int) -> TimedReport:
        """A new commitment to a new manifest of the old payload."""
        if self._worked is None:
            return super().commit(window)
        self.put_sealed(self._manifest(window).commit)
        return TimedReport(())

    def upload(self, window: int) -> TimedReport:
        """A new manifest, and the old payload."""
        if self._worked in (None, window):
            return super().upload(window)
        self.wait_for_reveals(window)
        self.put_sealed(self._manifest(window))
        self.put(Kind.GRADIENT, window, self._old(Kind.GRADIENT, window))
        return TimedReport(())

    def _manifest(self, window: int) -> Manifest:
        manifest = super()._manifest(window)
        if self._worked in (None, window):
            return manifest
        old = unseal(self._old(Kind.MANIFEST, window), Manifest).body
        copied = {"payload_sha256": old.payload_sha256, "payload_bytes": old.payload_bytes}
        return manifest.model_copy(update=copied)


def nothing_to_steal(window: int) -> TimedReport:
    """Whoever lives by stealing publishes nothing where there is nothing to steal."""
    return TimedReport((), Reason.NO_TIME_LEFT, f"window {window}: there is nothing to steal")
