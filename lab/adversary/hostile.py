"""Miners that publish hostile objects, or publish at the wrong time.

The objects are payloads, manifests and keys that no reader may fail on. Some bytes would run code in a reader that
unpickles or unpacks them; each of those leaves a file or folder called `TRAP` where it succeeds. The miners with wrong
times act by a wrong clock, miss deadlines, or change what they have published.
"""

import io
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

from lab.adversary.chains import SkewedChain
from lab.adversary.mutations import PayloadMutation, cut, patched, rebuilt
from templar.canonical import keyed_seed, sha256_hex
from templar.errors import Reason
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest
from templar.exchange.publish import TimedReport, publish_in_time
from templar.exchange.reveal import publish_commit
from templar.exchange.signed import seal
from templar.gradient.codec.wire import Payload
from templar.gradient.layout import HEADER_BYTES, TOP_BYTES
from templar.neuron.configuration import NeuronConfig
from templar.neuron.miner import Miner

TRAP = "somebody-ran-what-a-peer-published"  # the name of the trace
BOMB_BYTES = 1 << 17
HUGE_BYTES = 1 << 20
FIVE_GIB = 5 << 30
JUNK_KEYS = 200
SKEW_SECONDS = 30.0

M = TypeVar("M", bound=Miner)


def variant(base: type[M], name: str, **members: object) -> type[M]:
    """A subclass of a miner's class with other class attributes; functions become static methods."""
    statics = {key: staticmethod(member) if callable(member) else member for key, member in members.items()}
    return type(f"{base.__name__}_{name}", (base,), {"__doc__": base.__doc__, "__module__": __name__, **statics})


def pickle_bytes(folder: Path) -> bytes:
    """A pickle, in the oldest protocol, whose loading makes the folder `TRAP` below another."""
    path = str(folder / TRAP).encode("ascii", "backslashreplace")
    return b"cos\nmkdir\n(V" + path + b"\ntR."


def zip_bomb(num_bytes: int) -> bytes:
    """An archive hundreds of times smaller than what it unpacks to, that wants out of its folder as well."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in (f"../../{TRAP}", f"/tmp/{TRAP}", "archive/data.pkl"):  # noqa: S108 - never unpacked
            archive.writestr(zipfile.ZipInfo(name), bytes(num_bytes), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def padded(data: bytes, num_bytes: int) -> bytes:
    """Bytes of a length that a payload may have, so that nobody refuses them for their length alone."""
    return data[:num_bytes].ljust(num_bytes, b"\0")


class MutatingMiner(Miner):
    """Publishes what a mutation makes of its honest payload, and a manifest that is true of that."""

    mutation: ClassVar[PayloadMutation]

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """Mutated bytes."""
        return type(self).mutation(super().payload_bytes(window, payload), self.layout)


class OtherBytesMiner(Miner):
    """Publishes other content than a payload, in a legal length."""

    content: ClassVar[Callable[[Path], bytes]]
    """From the miner's folder to the bytes."""

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """The other content."""
        data = super().payload_bytes(window, payload)
        return padded(type(self).content(self.home), max(len(data), self.layout.min_payload_bytes))


class SmuggledPickleMiner(Miner):
    """Publishes a payload whose first section is a pickle; header and checksum are right."""

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """A payload with a pickle inside."""
        data = super().payload_bytes(window, payload)
        sections = cut(data, self.layout)
        return rebuilt(data, [padded(pickle_bytes(self.home), len(sections[0])), *sections[1:]])


class JunkKeysMiner(Miner):
    """An honest miner that also fills its bucket with keys that are malformed, nearly valid, or of future windows."""

    def upload(self, window: int) -> TimedReport:
        """Junk first, then what an honest miner publishes."""
        uid, store = self.exchange.identity(window).uid, self.buckets.own
        names = [f"junk-{window}-{number}" for number in range(JUNK_KEYS)]
        names += [f"gradient-{window}-{uid}-v2.bin.part", f"gradient-{window:03d}-{uid}-v2.bin", "gradient--1-0-v2.bin"]
        names += [window_key(Kind.MANIFEST, window + 10**6, uid), window_key(Kind.GRADIENT, window, uid + 1)]
        for name in names:
            store.put(name, b"junk")
        return super().upload(window)


class ForgingMiner(Miner):
    """Signs, commits to and publishes a manifest with false or foreign entries."""

    forge: ClassVar[Callable[[Manifest], Mapping[str, object]]]
    """From the honest manifest to the entries that are replaced."""

    def _manifest(self, window: int) -> Manifest:
        honest = super()._manifest(window)
        return honest.model_copy(update=type(self).forge(honest))


FORGED_MANIFESTS: Mapping[str, Callable[[Manifest], Mapping[str, object]]] = {
    "wrong_hash": lambda honest: {"payload_sha256": sha256_hex(honest.canonical())},
    "wrong_size": lambda honest: {"payload_bytes": honest.payload_bytes - 1},
    "five_gigabytes": lambda honest: {"payload_bytes": FIVE_GIB},
    "foreign": lambda honest: {"netuid": honest.netuid + 1},
    "old_client": lambda honest: {"protocol": "1"},
    "other_data": lambda honest: {"assignment": sha256_hex(b"other data")},
}


class RawManifestMiner(Miner):
    """Commits to an honest manifest, and publishes what `spoil` makes of its bytes instead."""

    spoil: ClassVar[Callable[[bytes], bytes]]

    def _reveal(self, window: int, *, deadline: float, first: int = 0) -> TimedReport:
        manifest, store = self._manifest(window), self.buckets.own
        honest = seal(manifest, self.exchange.own_signer).encode()
        store.put(window_key(Kind.MANIFEST, window, manifest.uid), type(self).spoil(honest))
        store.put_file(window_key(Kind.GRADIENT, window, manifest.uid), self._payload_path(window))
        return TimedReport(())


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
    return b""


SPOILT_MANIFESTS: Mapping[str, Callable[[bytes], bytes]] = {
    "manifest_deep_json": deep_json,
    "manifest_huge_string": huge_string,
    "manifest_control_characters": control_characters,
    "manifest_raw_control_characters": raw_control_characters,
    "manifest_not_a_number": not_a_number,
    "manifest_spaced": spaced,
    "manifest_forged_signature": forged_signature,
    "manifest_empty": no_manifest,
}


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
        """Everything is published already."""
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
    """Seconds that the clock is ahead."""

    def __init__(self, config: NeuronConfig) -> None:
        super().__init__(replace(config, chain=SkewedChain(config.chain, self.skew_seconds)))


class SwappingMiner(Miner):
    """Reveals, and puts another payload in its place while the reveals are still open."""

    def upload(self, window: int) -> TimedReport:
        """Two payloads, the second over the first."""
        report = super().upload(window)
        self.chain.clock.sleep_until(self.swap_at(window))
        data = self._payload_path(window).read_bytes()
        first_sign = HEADER_BYTES + TOP_BYTES + self.layout.tensors[0].num_chunks
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
