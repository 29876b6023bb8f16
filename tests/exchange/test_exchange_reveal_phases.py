"""Stores stamp whole seconds and blocks come at any fraction of one: the rules hold at every phase between the two."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path

import pytest

from templar.chain.clock import SimulatedClock
from templar.errors import Reason, RejectedError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules, Submission, fetch_reveal, publish_commit, publish_reveal
from templar.exchange.signed import seal
from templar.gradient.codec.wire import decode, encode
from templar.neuron.miner import Miner
from templar.store.directory import DirectoryStore
from templar.timeline import WindowTimes
from tests.support.memory import folder
from tests.support.network import Network, tiny
from tests.support.subnet import (
    ASSIGNMENT,
    LAYOUT,
    NETWORK,
    RULES,
    Hand,
    Member,
    commit_to,
    manifest_of,
    member,
    other_payload,
    payload_bytes,
)

__all__ = ["folder"]

PHASES = [0.0, 0.05, 0.4, 0.65, 0.95]
"""Fractions of the second of the close; the window opens 0.35 s later in its second."""
WINDOW = 10
ALICE, MALLORY = member(5), member(6)
BYTES = payload_bytes(ALICE, WINDOW)
INSTANT = 0.001


class Place:
    """Two miners' buckets in folders, whose stamps a test sets, and a window that closes at a phase of a second.

    Args:
        root: An empty folder.
        phase: Fraction of the second in which the window closes; it opened at another one.
    """

    def __init__(self, root: Path, phase: float) -> None:
        self.hand = Hand()
        self.times = WindowTimes(WINDOW, 1_000_000 + (phase + 0.35) % 1, 1_000_060 + phase, RULES)
        self.stores: dict[int, DirectoryStore] = {}
        for owner in (ALICE, MALLORY):
            (root / owner.account).mkdir()
            self.stores[owner.uid] = DirectoryStore(root / owner.account, clock=self.hand)
        self.rules = RevealRules(NETWORK, self.times, lambda uid: ASSIGNMENT)
        self.cache = PayloadCache(root / "payloads", LAYOUT)

    def key(self, kind: Kind, owner: Member) -> str:
        return window_key(kind, WINDOW, owner.uid)

    def put(self, kind: Kind, data: bytes, at: float, owner: Member = ALICE) -> None:
        self.hand.now = at
        self.stores[owner.uid].put(self.key(kind, owner), data)

    def sign(self, body: Commit | Manifest, at: float, owner: Member = ALICE) -> None:
        self.put(body.kind, seal(body, owner.hotkey).encode(), at, owner)

    def honest(self, commit: float | None = None, reveal: float | None = None) -> None:
        """Alice commits and reveals; in the middle of what is allowed, unless another time is given."""
        manifest = manifest_of(ALICE, WINDOW, BYTES)
        self.sign(commit_to(manifest), self.times.commit_interval.first + 20 if commit is None else commit)
        at = self.times.reveal_interval.first + 1 if reveal is None else reveal
        self.sign(manifest, at)
        self.put(Kind.GRADIENT, BYTES, at)

    def fetch(self, owner: Member = ALICE) -> Submission:
        return fetch_reveal(owner.neuron, self.stores[owner.uid], self.rules, self.cache)

    def reason(self, owner: Member = ALICE) -> Reason | None:
        try:
            self.fetch(owner)
        except RejectedError as error:
            return error.reason
        return None


@pytest.fixture(params=PHASES, ids=lambda phase: f"{phase:.2f}")
def place(request: pytest.FixtureRequest, folder: Path) -> Place:
    return Place(folder, request.param)


# Violations of the times.


def _early_commit(place: Place) -> None:
    place.honest(commit=place.times.opened)


def _late_commit(place: Place) -> None:
    place.honest(commit=place.times.closed - RULES.commit_guard_seconds + 1)


def _early_reveal(place: Place) -> None:
    place.honest(reveal=place.times.closed)


def _late_reveal(place: Place) -> None:
    place.honest(reveal=place.times.closed + RULES.time_window_delta_seconds + 1)


def _replaced_in_time(place: Place) -> None:
    place.honest()
    place.put(Kind.GRADIENT, other_payload(ALICE, WINDOW), place.times.reveal_interval.last + 1 - INSTANT)


def _replaced_too_late(place: Place) -> None:
    place.honest()
    place.put(Kind.GRADIENT, BYTES, place.times.reveal_interval.last + 1)


REFUSED: list[tuple[Callable[[Place], None], Reason]] = [
    (_early_commit, Reason.COMMIT_EARLY),
    (_late_commit, Reason.COMMIT_LATE),
    (_early_reveal, Reason.REVEAL_EARLY),
    (_late_reveal, Reason.REVEAL_LATE),
    (_replaced_in_time, Reason.WRONG_HASH),
    (_replaced_too_late, Reason.REVEAL_LATE),
]


@pytest.mark.parametrize(("prepare", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", value))
def test_each_violation_has_its_own_reason(place: Place, prepare: Callable[[Place], None], reason: Reason) -> None:
    prepare(place)
    assert place.reason() is reason
    place.honest()
    assert place.reason() is None, "nothing of it stays behind"


# A miner that keeps the rules is accepted.


@pytest.mark.parametrize("late", [False, True], ids=["earliest", "latest"])
def test_the_earliest_and_the_latest_reveal_count(place: Place, tmp_path: Path, late: bool) -> None:
    """`publish_commit` and `publish_reveal` as a miner calls them, at the first and the last moment that it may."""
    commit, reveal, store = place.times.commit_interval, place.times.reveal_interval, place.stores[ALICE.uid]
    payload, manifest = tmp_path / "payload", manifest_of(ALICE, WINDOW, BYTES)
    payload.write_bytes(BYTES)
    place.hand.now = commit.last + 1 - INSTANT if late else float(commit.first)
    clock = SimulatedClock(place.hand.now)
    publish_commit(store, manifest, ALICE.hotkey, clock=clock, deadline=commit.last + 1)
    seen = place.times.closed  # the closing block is seen when it comes, at the earliest
    place.hand.now = reveal.last + 1 - INSTANT if late else float(max(reveal.first, floor(seen) + 1))
    clock.sleep_until(place.hand.now)
    publish_reveal(store, manifest, ALICE.hotkey, payload, clock=clock, deadline=reveal.last + 1)
    found = place.fetch()
    assert (found.committed_at in commit, found.revealed_at in reveal) == (True, True)


# A copier reads everything at once and writes at any time within the interval.


@dataclass(frozen=True)
class Stolen:
    """The objects that Mallory read from Alice's bucket."""

    commit: bytes
    manifest: bytes
    payload: bytes


def own_header(payload: bytes) -> bytes:
    """Alice's coefficients as a legal payload of Mallory's."""
    theirs = decode(payload, LAYOUT)
    header = replace(theirs.header, uid=MALLORY.uid, hotkey=MALLORY.hotkey.address)
    return encode(replace(theirs, header=header), LAYOUT)


def _copy_then_commit(place: Place, stolen: Stolen, at: float) -> None:
    copied = own_header(stolen.payload)
    manifest = manifest_of(MALLORY, WINDOW, copied)
    place.sign(commit_to(manifest), at, MALLORY)
    place.sign(manifest, at, MALLORY)
    place.put(Kind.GRADIENT, copied, at, MALLORY)


def _copy_without_commit(place: Place, stolen: Stolen, at: float) -> None:
    copied = own_header(stolen.payload)
    place.sign(manifest_of(MALLORY, WINDOW, copied), at, MALLORY)
    place.put(Kind.GRADIENT, copied, at, MALLORY)


def _copy_against_another_commitment(place: Place, stolen: Stolen, at: float) -> None:
    mine = payload_bytes(MALLORY, WINDOW)
    place.sign(commit_to(manifest_of(MALLORY, WINDOW, mine)), place.times.commit_interval.last, MALLORY)
    copied = own_header(stolen.payload)
    place.sign(manifest_of(MALLORY, WINDOW, copied), at, MALLORY)
    place.put(Kind.GRADIENT, copied, at, MALLORY)


def _commitment_replaced_later(place: Place, stolen: Stolen, at: float) -> None:
    _copy_against_another_commitment(place, stolen, at)
    place.sign(commit_to(manifest_of(MALLORY, WINDOW, own_header(stolen.payload))), at, MALLORY)


def _the_very_objects(place: Place, stolen: Stolen, at: float) -> None:
    place.put(Kind.COMMIT, stolen.commit, place.times.commit_interval.last, MALLORY)
    place.put(Kind.MANIFEST, stolen.manifest, at, MALLORY)
    place.put(Kind.GRADIENT, stolen.payload, at, MALLORY)


def _copied_commitment_signed_again(place: Place, stolen: Stolen, at: float) -> None:
    promise = commit_to(manifest_of(ALICE, WINDOW, BYTES)).commitment
    mine = manifest_of(MALLORY, WINDOW, stolen.payload)
    place.sign(commit_to(mine, commitment=promise), place.times.commit_interval.last, MALLORY)
    place.sign(mine, at, MALLORY)
    place.put(Kind.GRADIENT, stolen.payload, at, MALLORY)


def _copied_commitment_and_manifest(place: Place, stolen: Stolen, at: float) -> None:
    _copied_commitment_signed_again(place, stolen, at)
    place.put(Kind.MANIFEST, stolen.manifest, at, MALLORY)


def _rewrapped(place: Place, stolen: Stolen, at: float) -> None:
    """Mallory learnt the payload before the close, so only its header names the true author."""
    mine = manifest_of(MALLORY, WINDOW, stolen.payload)
    place.sign(commit_to(mine), place.times.commit_interval.last, MALLORY)
    place.sign(mine, at, MALLORY)
    place.put(Kind.GRADIENT, stolen.payload, at, MALLORY)


COPIES: list[tuple[Callable[[Place, Stolen, float], None], Reason]] = [
    (_copy_then_commit, Reason.COMMIT_LATE),
    (_copy_without_commit, Reason.COMMIT_MISSING),
    (_copy_against_another_commitment, Reason.COMMIT_MISMATCH),
    (_commitment_replaced_later, Reason.COMMIT_LATE),
    (_the_very_objects, Reason.WRONG_IDENTITY),
    (_copied_commitment_signed_again, Reason.COMMIT_MISMATCH),
    (_copied_commitment_and_manifest, Reason.WRONG_IDENTITY),
    (_rewrapped, Reason.WRONG_IDENTITY),
]


@pytest.mark.parametrize(("copy", "reason"), COPIES, ids=lambda value: getattr(value, "__name__", value))
def test_no_copy_counts(place: Place, copy: Callable[[Place, Stolen, float], None], reason: Reason) -> None:
    interval = place.times.reveal_interval
    place.honest(reveal=interval.first)
    store = place.stores[ALICE.uid]
    stolen = Stolen(
        *(store.get(place.key(kind, ALICE), max_bytes=10_000) for kind in (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT))
    )
    for at in (interval.first, place.times.closed + 1, interval.last + 1 - INSTANT):
        copy(place, stolen, at)
        assert place.reason(MALLORY) is reason
        place.stores[MALLORY.uid].delete(place.key(kind, MALLORY) for kind in Kind if kind in PUBLISHED)
    assert place.reason() is None


PUBLISHED = (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT)


# A whole network: 20 windows that close 0.05 s earlier in their second each.

BEATS = {"blocks_per_window": 19, "block_seconds": 1.05}
"""19.95 seconds: after 20 windows every phase has come."""


def at_the_last_moment(miner: Miner, windows: range, applied: dict[int, tuple[int, ...]]) -> None:
    """The windows of a miner that publishes when it is all but too late, and who was applied in each."""
    clock = miner.chain.clock
    for window in windows:
        miner.chain.wait_for_block(window * miner.hparams.windows.blocks_per_window)
        miner.takes_part(window)
        miner.fetch_pages(window)
        assert miner.train(window).reason is None
        miner.compress(window)
        clock.sleep_until(miner.exchange.expected_times(window).commit_interval.last + 1 - INSTANT)
        assert miner.commit(window).in_time
        clock.sleep_until(miner.exchange.acting_times(window).reveal_interval.last - INSTANT)  # it waits for a second
        assert miner.upload(window).in_time
        miner.gather(window)
        settlement = miner.settle(window)
        applied[window] = settlement.uids
        miner.apply(settlement)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_earliest_and_the_latest_reveal_are_in_every_roster_at_every_phase(folder: Path) -> None:
    network = Network(folder, tiny(windows=BEATS), num_validators=1)
    windows = range(1, 21)
    early, late = network.miners
    applied: dict[int, tuple[int, ...]] = {}
    network.run(windows, but=[network.name(late)], beside=[lambda: at_the_last_moment(late, windows, applied)])
    aggregator, phases = network.aggregator, set()
    for window in windows:
        times = aggregator.exchange.times(window)
        phases.add(round((times.closed - times.close) * 20) % 20)
        neurons = [miner.exchange.identity(window) for miner in (early, late)]
        assert applied[window] == tuple(neuron.uid for neuron in neurons)
        stamps = []
        for miner, neuron in zip((early, late), neurons, strict=True):
            store = network.bucket(network.name(miner))
            infos = {kind: store.head(window_key(kind, window, neuron.uid)) for kind in PUBLISHED}
            stamps.append([info.last_modified for info in infos.values() if info is not None])
        first, last = times.reveal_interval.first, times.reveal_interval.last
        assert stamps[0][1:] == [first, first]
        assert stamps[1] == [times.commit_interval.last, last, last]
    assert phases == set(range(20))
    network.stop()
