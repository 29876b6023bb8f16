"""Miners that want to be paid for another miner's work, or for their own work twice.

The first kind publishes legal objects with old content: a copy within the window cannot match a commitment that was
made in time, so they commit in time to payloads of the window before, or to what several of them share in private. The
second kind, the impostors, copies commitments, buckets, names and old objects. Each has what everybody has: every
bucket to read, the chain, and the clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lab.adversary.cheats import FamilyMiner, KeepGoing, untrained, zero_update
from templar.agreement.voter import Settlement
from templar.canonical import keyed_seed, sha256_hex
from templar.chain.ledger import Ledger
from templar.errors import Reason, TemplarError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest
from templar.exchange.publish import TimedReport
from templar.exchange.signed import Sealed, seal, unseal
from templar.gradient.aggregate import aggregate
from templar.gradient.codec.planes import Section
from templar.gradient.codec.sections import pack, unpack
from templar.gradient.codec.values import MAX_STEP, Coefficients
from templar.gradient.codec.wire import Payload, decode, encode
from templar.neuron.miner import Miner, TrainReport
from templar.training.train import TrainResult

BLENDED_SHARE = 0.6
SYBIL_SHARE = 0.95
SCALE_STEPS = 2  # twelfths of an octave by which a copy that is varied is scaled
WITHIN_NORM_DEVIATIONS = 1.5
MAX_BYTES = 1 << 24

Sections = Mapping[str, Section]


class SecondHandMiner(Miner, ABC):
    """Publishes what it finds, and trains only where it finds nothing."""

    _found: Sections | None = None

    @abstractmethod
    def find(self, window: int) -> Sections | None:
        """Return what to publish under the own header; None if there is nothing."""

    def train(self, window: int) -> TrainReport:
        """As every miner; what there is to be found is found before."""
        self._found = self.find(window)
        return super().train(window)

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """Nothing where something was found."""
        if self._found is None:
            return super().learn(window, sequences, keep_going)
        return untrained(self, zero_update(self))

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """Return what was found, under the own header of this window."""
        return super().payload_bytes(window, payload if self._found is None else Payload(payload.header, self._found))


class RecyclingMiner(SecondHandMiner):
    """Trains in every second window, and publishes the result again in the next one."""

    def find(self, window: int) -> Sections | None:
        """Return what it published itself in the window before."""
        path = self._payload_path(window - 1)
        return decode(path.read_bytes(), self.layout).sections if window % 2 == 0 and path.exists() else None


class PlagiarisingMiner(SecondHandMiner):
    """Publishes what another miner published in the window before, each time another one that is paid."""

    def find(self, window: int) -> Sections | None:
        """A payload that was applied in the window before, by a miner that earns if there is one."""
        payloads = others_payloads(self, window - 1)
        earning = {neuron.uid for neuron in self.exchange.miners(window) if neuron.incentive > 0}
        uids = sorted(payloads.keys() & earning or payloads.keys())
        return payloads[uids[seed_for("plagiarising", self, window) % len(uids)]].sections if uids else None


class BlendingMiner(PlagiarisingMiner):
    """As `PlagiarisingMiner`, with six of ten coefficients copied, the others made up, and all of them scaled."""

    def find(self, window: int) -> Sections | None:
        """A copy that looks like none."""
        found = super().find(window)
        seed = seed_for("blending", self, window)
        return None if found is None else varied(found, kept=BLENDED_SHARE, seed=seed, scale_steps=SCALE_STEPS)


class WithinNormMiner(Miner):
    """Publishes the others' mean of the window before, moved by some deviations against itself (ALIE, 1902.06156).

    No coefficient is larger than others' are, and together they pull the mean where nobody wants it.
    """

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """Return what the others' payloads say; the data is looked at only if there are none yet."""
        payloads = others_payloads(self, window - 1)
        if not payloads:
            return super().learn(window, sequences, keep_going)
        sums, squares = zero_update(self), zero_update(self)
        for _, payload in sorted(payloads.items()):
            for name, values in aggregate([payload], self.layout).items():
                sums[name] += values
                squares[name] += values.square()
        update = {}
        for name, total in sums.items():
            mean = total / len(payloads)
            deviation = (squares[name] / len(payloads) - mean.square()).clamp(min=0).sqrt()
            update[name] = mean - WITHIN_NORM_DEVIATIONS * deviation * mean.sign()
        return untrained(self, update)


class SybilMiner(FamilyMiner):
    """One of several uids of one trainer: all train what the first was assigned, and publish nearly the same."""

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """Return what the first of the family has to publish, but for some coefficients."""
        sections = self.first_trained(window, payload)
        if sections is not payload.sections:
            sections = varied(sections, kept=SYBIL_SHARE, seed=seed_for("sybil", self, window))
        return super().payload_bytes(window, Payload(payload.header, sections))

    def _training_sequences(self, window: int) -> Tensor:
        first = self.workload.assignment(window, self.relatives(window)[0])
        return torch.from_numpy(self.workload.sequences(first)) if first.units else super()._training_sequences(window)


def others_payloads(miner: Miner, window: int) -> dict[int, Payload]:
    """The payloads of a window that this miner applied and that are not its own, by uid; none if it applied none."""
    known = miner.journal.result(window, "settle")
    settlement = None if known is None else Settlement.from_json(known)
    entries = () if settlement is None or settlement.roster is None else settlement.roster.entries
    own = miner.exchange.own_signer.address
    return {entry.uid: miner.cache.payload(window, entry.payload_sha256) for entry in entries if entry.hotkey != own}


def varied(sections: Sections, *, kept: float, seed: int, scale_steps: int = 0) -> Sections:
    """Keep a share of the coefficients, in (0, 1); the others move to random places with random signs.

    All scales are raised by `scale_steps` steps, as far as the table of scales goes.
    """
    generator = np.random.default_rng(seed)
    return {name: _varied(section, kept, generator, scale_steps) for name, section in sorted(sections.items())}


def _varied(section: Section, kept: float, generator: np.random.Generator, scale_steps: int) -> Section:
    """One tensor of `varied`; silent chunks stay silent, and a chunk that is published whole keeps its places."""
    tensor, old = section.tensor, unpack(section)
    shape, k = (tensor.num_chunks, tensor.chunk_length), tensor.k
    taken, signs = np.zeros(shape, np.bool_), generator.random(shape) < 0.5
    places = old.indices.astype(np.int64)
    np.put_along_axis(taken, places, values=True, axis=1)
    by_chance = np.argsort(np.where(taken, 0.0, 1.0) + generator.random(shape), axis=1)  # the k taken places first
    made_up = round(k * (1 - kept))
    moved = min(made_up, tensor.chunk_length - k)
    chosen = np.sort(np.concatenate([by_chance[:, moved:k], by_chance[:, k : k + moved]], axis=1), axis=1)
    by_chance_too = np.take_along_axis(signs, by_chance[:, :made_up], axis=1)
    np.put_along_axis(signs, places, old.negative, axis=1)
    np.put_along_axis(signs, by_chance[:, :made_up], by_chance_too, axis=1)
    silent, top = old.steps == 0, int(old.steps.max())
    raised = old.steps + np.uint16(min(scale_steps, MAX_STEP - top))
    coefficients = Coefficients(
        np.where(silent[:, None], old.indices, chosen).astype(np.uint16),
        np.take_along_axis(signs, chosen, axis=1) & ~silent[:, None],
        np.where(silent, 0, raised).astype(np.uint16),
    )
    return pack(coefficients, tensor)


def seed_for(what: str, miner: Miner, window: int) -> int:
    """A seed that depends on the miner and the window alone."""
    return keyed_seed(f"templar.{what}", miner.exchange.own_signer.address, window)


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

    def steal_commit(self, window: int) -> bytes | None:
        """Another's commitment, read in the last second in which a commitment counts."""
        self.chain.clock.sleep_until(self.exchange.expected_times(window).commit_interval.last)
        return self.stolen(window, Kind.COMMIT)

    def put(self, kind: Kind, window: int, data: bytes) -> None:
        """Write bytes under an own key and overwrite what is there."""
        uid = self.exchange.identity(window).uid
        self.buckets.own.put(window_key(kind, window, uid), data)

    def put_sealed(self, body: Commit | Manifest) -> None:
        """Sign an object and publish it, overwriting what is there."""
        self.put(body.kind, body.window, seal(body, self.exchange.own_signer).encode())


class CopyingMiner(Impostor):
    """Publishes another's payload, bit for bit, under a manifest of its own that it never committed to."""

    def upload(self, window: int) -> TimedReport:
        """The copy as the own work."""
        self.wait_for_reveals(window)
        payload, manifest = self.stolen(window, Kind.GRADIENT), self.stolen(window, Kind.MANIFEST)
        if payload is None or manifest is None:
            return nothing_to_steal(window)
        self.put(Kind.GRADIENT, window, payload)
        self.put_sealed(with_payload_of(manifest, self._manifest(window)))
        return TimedReport(())


class LateCommittingCopyingMiner(CopyingMiner):
    """Copies, and puts a fitting commitment in the place of the one that it made in time."""

    def upload(self, window: int) -> TimedReport:
        """Copy, manifest and commitment fit together; the commitment's time does not."""
        report = super().upload(window)
        if report.reason is None:
            key = window_key(Kind.MANIFEST, window, self.exchange.identity(window).uid)
            manifest = unseal(self.buckets.own.get(key, max_bytes=Manifest.max_bytes), Manifest).body
            self.put_sealed(manifest.commit)
        return report


class BackdatingMiner(Impostor):
    """Commits to nothing in time, then reveals another's payload under its own header with a commitment made to fit.

    Its bucket shows the commitment with a time before the close (`lab.adversary.faults.BACKDATED`).
    """

    def commit(self, window: int) -> TimedReport:
        """Nothing yet."""
        return TimedReport(())

    def upload(self, window: int) -> TimedReport:
        """The other's work under the own name, and the commitment to it."""
        self.wait_for_reveals(window)
        stolen = self.stolen(window, Kind.GRADIENT)
        if stolen is None:
            return nothing_to_steal(window)
        payload, own = decode(stolen, self.layout), self.exchange.identity(window)
        header = replace(payload.header, uid=own.uid, hotkey=own.hotkey)
        data = encode(Payload(header, payload.sections), self.layout)
        promised = {"payload_sha256": sha256_hex(data), "payload_bytes": len(data)}
        manifest = self._manifest(window).model_copy(update=promised)
        self.put(Kind.GRADIENT, window, data)
        self.put_sealed(manifest)
        self.put_sealed(manifest.commit)
        return TimedReport(())


class BucketCopyingMiner(Impostor):
    """Puts another's signed commitment, manifest and payload into its own bucket, as they are."""

    def commit(self, window: int) -> TimedReport:
        """The other's signed commitment."""
        stolen = self.steal_commit(window)
        if stolen is None:
            return nothing_to_steal(window)
        self.put(Kind.COMMIT, window, stolen)
        return TimedReport(())

    def upload(self, window: int) -> TimedReport:
        """The other's signed manifest and its payload."""
        self.wait_for_reveals(window)
        for kind in (Kind.MANIFEST, Kind.GRADIENT):
            stolen = self.stolen(window, kind)
            if stolen is not None:
                self.put(kind, window, stolen)
        return TimedReport(())


class CommitCopyingMiner(BucketCopyingMiner):
    """Commits to the digest that another committed to, and hopes to have its manifest count as well."""

    def commit(self, window: int) -> TimedReport:
        """Another's commitment under the own name."""
        stolen = self.steal_commit(window)
        if stolen is None:
            return nothing_to_steal(window)
        digest = unseal(stolen, Commit).body.commitment
        self.put_sealed(self._manifest(window).commit.model_copy(update={"commitment": digest}))
        return TimedReport(())


class MovingMiner(Impostor):
    """Commits another miner's bucket on chain as soon as a window has opened, to be read there by some and not all."""

    def commit(self, window: int) -> TimedReport:
        """The own commitment; then the chain names another's bucket."""
        report, own = super().commit(window), self.exchange.identity(window)
        others = (each.commitment for each in self.exchange.miners(window) if each.uid != own.uid)
        named = next((each for each in others if each is not None), None)
        if named is not None:
            self.chain.set_commitment(named)
        return report


class StakingMiner(Impostor):
    """Stakes on all other miners until the chain gives them permits and the first ranks."""

    def commit(self, window: int) -> TimedReport:
        """The own commitment; then the stake, which needs nobody's signature but that of who pays for it."""
        report, chain = super().commit(window), self.chain
        for neuron in self.exchange.miners(window):
            if isinstance(chain, Ledger) and neuron.uid != self.exchange.identity(window).uid:
                chain.set_stake(neuron.hotkey, 1e6, validator_permit=True)
        return report


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
        return with_payload_of(self._old(Kind.MANIFEST, window), manifest)


def with_payload_of(other: bytes, manifest: Manifest) -> Manifest:
    """A manifest that names the payload of another one, which is given signed."""
    body = unseal(other, Manifest).body
    return manifest.model_copy(update={"payload_sha256": body.payload_sha256, "payload_bytes": body.payload_bytes})


def nothing_to_steal(window: int) -> TimedReport:
    """Report that an impostor publishes nothing because there is nothing to copy."""
    return TimedReport((), Reason.NO_TIME_LEFT, f"window {window}: there is nothing to steal")
