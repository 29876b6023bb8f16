"""Miners whose objects are hostile: payloads, manifests and keys that no reader may trip over."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from templar.adversary.archives import padded, pickle_bytes, zip_bomb
from templar.adversary.mutations import PayloadMutation, cut, rebuilt
from templar.canonical import keyed_seed, sha256_hex
from templar.exchange.keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.publish import TimedReport
from templar.exchange.sealing import seal
from templar.gradient.payload import Payload
from templar.neuron.miner import Miner

BOMB_BYTES = 1 << 17
HUGE_BYTES = 1 << 20
JUNK_KEYS = 200
FIVE_GIB = 5 << 30


class MutatingMiner(Miner):
    """Publishes what a mutation makes of its honest payload, and a manifest that is true of that."""

    mutation: ClassVar[PayloadMutation]

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """Mutated bytes."""
        return type(self).mutation(super().payload_bytes(window, payload), self.layout)


def mutating(name: str, mutation: PayloadMutation) -> type[MutatingMiner]:
    """The miner that publishes what one mutation makes."""
    members = {"mutation": staticmethod(mutation), "__doc__": mutation.__doc__, "__module__": __name__}
    return type(f"Mutating_{name}", (MutatingMiner,), members)


class PickleMiner(Miner):
    """Publishes a pickle instead of a payload."""

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """A pickle of legal length that leaves a trace where it is loaded."""
        data = super().payload_bytes(window, payload)
        return padded(pickle_bytes(self.settings.home), max(len(data), self.layout.min_payload_bytes))


class SmuggledPickleMiner(Miner):
    """Publishes a payload whose first section is a pickle; header and checksum are right."""

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """A payload with a pickle inside."""
        data = super().payload_bytes(window, payload)
        sections = cut(data, self.layout)
        return rebuilt(data, [padded(pickle_bytes(self.settings.home), len(sections[0])), *sections[1:]])


class ZipBombMiner(Miner):
    """Publishes an archive that unpacks to hundreds of times its size, outside of its folder."""

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """An archive of legal length."""
        data = super().payload_bytes(window, payload)
        return padded(zip_bomb(BOMB_BYTES), max(len(data), self.layout.min_payload_bytes))


class JunkKeysMiner(Miner):
    """Honest, and fills its bucket with keys that are nobody's, nearly somebody's, or of windows to come."""

    def upload(self, window: int) -> TimedReport:
        """Junk first, then what an honest miner publishes."""
        uid, store = self.exchange.identity(window).uid, self.buckets.own
        names = [f"junk-{window}-{number}" for number in range(JUNK_KEYS)]
        names += [f"gradient-{window}-{uid}-v2.bin.part", f"gradient-{window:03d}-{uid}-v2.bin", "gradient--1-0-v2.bin"]
        names += [window_key(Kind.MANIFEST, window + 10**6, uid), window_key(Kind.GRADIENT, window, uid + 1)]
        for name in names:
            store.put(name, b"junk")
        return super().upload(window)


class ForgingMiner(Miner, ABC):
    """Signs, commits to and publishes a manifest that is not true or not for here."""

    @abstractmethod
    def forge(self, manifest: Manifest) -> Manifest:
        """What it says instead."""

    def _manifest(self, window: int) -> Manifest:
        return self.forge(super()._manifest(window))


class WrongHashMiner(ForgingMiner):
    """Promises the hash of something else."""

    def forge(self, manifest: Manifest) -> Manifest:
        """Another hash."""
        return manifest.model_copy(update={"payload_sha256": sha256_hex(manifest.canonical())})


class WrongSizeMiner(ForgingMiner):
    """Promises one byte less than it stores."""

    def forge(self, manifest: Manifest) -> Manifest:
        """A length that is not the object's."""
        return manifest.model_copy(update={"payload_bytes": manifest.payload_bytes - 1})


class FiveGigabyteMiner(ForgingMiner):
    """Promises five gigabytes."""

    def forge(self, manifest: Manifest) -> Manifest:
        """A length that no reader may make room for."""
        return manifest.model_copy(update={"payload_bytes": FIVE_GIB})


class ForeignMiner(ForgingMiner):
    """Signs for another subnet."""

    def forge(self, manifest: Manifest) -> Manifest:
        """Another netuid."""
        return manifest.model_copy(update={"netuid": manifest.netuid + 1})


class OldClientMiner(ForgingMiner):
    """A client of another protocol version, which says so in its manifest."""

    def forge(self, manifest: Manifest) -> Manifest:
        """Another version."""
        return manifest.model_copy(update={"protocol": "1"})


class OtherDataMiner(ForgingMiner):
    """Says that it trained on data that it was not assigned."""

    def forge(self, manifest: Manifest) -> Manifest:
        """Another assignment."""
        return manifest.model_copy(update={"assignment": sha256_hex(b"whatever is easiest")})


class RawManifestMiner(Miner):
    """Commits to an honest manifest, and publishes whatever `spoil` makes of its bytes in its place."""

    spoil: ClassVar[Callable[[bytes], bytes]]

    def _reveal(self, window: int, *, deadline: float) -> TimedReport:
        del deadline
        manifest, store = self._manifest(window), self.buckets.own
        honest = seal(manifest, self.exchange.own_signer).encode()
        store.put(window_key(Kind.MANIFEST, window, manifest.uid), type(self).spoil(honest))
        store.put_file(window_key(Kind.GRADIENT, window, manifest.uid), self._payload_path(window))
        return TimedReport(())


def spoiling(name: str, spoil: Callable[[bytes], bytes]) -> type[RawManifestMiner]:
    """The miner that publishes one kind of spoilt manifest."""
    members = {"spoil": staticmethod(spoil), "__doc__": spoil.__doc__, "__module__": __name__}
    return type(f"Spoiling_{name}", (RawManifestMiner,), members)


def deep_json(data: bytes) -> bytes:
    """Brackets within brackets, as many as may be."""
    return b"[" * (len(data) // 2) + b"]" * (len(data) // 2)


def huge_string(data: bytes) -> bytes:
    """A megabyte in one field."""
    return data[:-1] + b',"note":"' + b"A" * HUGE_BYTES + b'"}'


def control_characters(data: bytes) -> bytes:
    """A field whose name clears a terminal and forges a line of a log."""
    return data.replace(b'{"body":{', b'{"body":{"\\u001b[2J\\r\\nINFO all is well":1,', 1)


def raw_control_characters(data: bytes) -> bytes:
    """Control characters, and bytes that are no UTF-8, as they are."""
    return b"\x1b[2J\r\n\x00\xff\xfe" + data


def not_a_number(data: bytes) -> bytes:
    """A length that is not a number."""
    head, _, rest = data.partition(b'"payload_bytes":')
    return head + b'"payload_bytes":NaN' + rest.lstrip(b"0123456789")


def spaced(data: bytes) -> bytes:
    """The same JSON with spaces."""
    return data.replace(b":", b": ")


def forged_signature(data: bytes) -> bytes:
    """A signature that nobody made."""
    head, _, _ = data.partition(b'"signature":"')
    return head + b'"signature":"' + f"{keyed_seed('templar.forged', str(data)):0128x}".encode() + b'"}'


def no_manifest(data: bytes) -> bytes:
    """Nothing at all."""
    del data
    return b""
