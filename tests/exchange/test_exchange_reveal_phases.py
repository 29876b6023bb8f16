"""Stores stamp whole seconds and blocks come at any fraction of one: the rules hold at every phase between the two."""

from dataclasses import replace
from math import floor
from pathlib import Path

import pytest

from templar.chain.clock import SimulatedClock
from templar.errors import Reason, RejectedError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules, Submission, fetch_reveal, publish_commit, publish_reveal
from templar.exchange.signed import Sealed, seal
from templar.gradient.codec.wire import decode, encode
from templar.neuron.miner import Miner
from templar.timeline import WindowTimes
from tests.support.network import Network, tiny
from tests.support.subnet import (
    ASSIGNMENT,
    LAYOUT,
    NETWORK,
    RULES,
    Bucket,
    commit_to,
    manifest_of,
    member,
    payload_bytes,
)

PHASES = [0.0, 0.05, 0.4, 0.65, 0.95]
"""Fractions of the second of the close; the window opens 0.35 s later in its second."""
WINDOW = 10
ALICE, MALLORY = member(5), member(6)
BYTES = payload_bytes(ALICE, WINDOW)
PUBLISHED = (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT)
INSTANT = 0.001


@pytest.fixture(params=PHASES, ids=lambda phase: f"{phase:.2f}")
def times(request: pytest.FixtureRequest) -> WindowTimes:
    """A window that closes at a phase of a second; it opened at another one."""
    return WindowTimes(WINDOW, 1_000_000 + (request.param + 0.35) % 1, 1_000_060 + request.param, RULES)


@pytest.fixture
def cache(tmp_path: Path) -> PayloadCache:
    return PayloadCache(tmp_path / "payloads", LAYOUT)


def fetch(bucket: Bucket, times: WindowTimes, cache: PayloadCache) -> Submission:
    return fetch_reveal(bucket.owner.neuron, bucket.store, RevealRules(NETWORK, times, lambda uid: ASSIGNMENT), cache)


# A miner that keeps the rules is accepted.


@pytest.mark.parametrize("late", [False, True], ids=["earliest", "latest"])
def test_the_earliest_and_the_latest_reveal_count(
    times: WindowTimes, cache: PayloadCache, tmp_path: Path, late: bool
) -> None:
    """`publish_commit` and `publish_reveal` as a miner calls them, at the first and the last moment that it may."""
    commit, reveal, bucket = times.commit_interval, times.reveal_interval, Bucket(ALICE)
    payload, manifest = tmp_path / "payload", manifest_of(ALICE, WINDOW, BYTES)
    payload.write_bytes(BYTES)
    bucket.hand.now = commit.last + 1 - INSTANT if late else float(commit.first)
    clock = SimulatedClock(bucket.hand.now)
    for _ in range(2):
        publish_commit(bucket.store, manifest, ALICE.hotkey, clock=clock, deadline=commit.last + 1)
    committed = bucket.memory.get(window_key(Kind.COMMIT, WINDOW, ALICE.uid), max_bytes=1000)
    assert BYTES[:16] not in committed
    assert manifest.payload_sha256.encode() not in committed
    seen = times.closed  # the closing block is seen when it comes, at the earliest
    bucket.hand.now = reveal.last + 1 - INSTANT if late else float(max(reveal.first, floor(seen) + 1))
    clock.sleep_until(bucket.hand.now)
    for _ in range(2):
        publish_reveal(bucket.store, manifest, ALICE.hotkey, payload, clock=clock, deadline=reveal.last + 1)
    found = fetch(bucket, times, cache)
    assert (found.committed_at in commit, found.revealed_at in reveal) == (True, True)


# A copier reads everything at once and writes at any time within the interval.


def own_header() -> bytes:
    """Alice's coefficients as a legal payload of Mallory's."""
    theirs = decode(BYTES, LAYOUT)
    header = replace(theirs.header, uid=MALLORY.uid, hotkey=MALLORY.hotkey.address)
    return encode(replace(theirs, header=header), LAYOUT)


COPY = own_header()
ALICES = manifest_of(ALICE, WINDOW, BYTES)
OF_COPY, OF_BYTES, OF_OWN = (
    manifest_of(MALLORY, WINDOW, payload) for payload in (COPY, BYTES, payload_bytes(MALLORY, WINDOW))
)


@pytest.mark.parametrize(
    ("commit", "in_time", "manifest", "payload", "reason"),
    [
        (commit_to(OF_COPY), False, seal(OF_COPY, MALLORY.hotkey), COPY, Reason.COMMIT_LATE),
        (commit_to(OF_OWN), True, seal(OF_COPY, MALLORY.hotkey), COPY, Reason.COMMIT_MISMATCH),
        # The copied commitment, signed again, without and with the copied manifest.
        (
            commit_to(OF_BYTES, commitment=ALICES.digest),
            True,
            seal(OF_BYTES, MALLORY.hotkey),
            BYTES,
            Reason.COMMIT_MISMATCH,
        ),
        (commit_to(OF_BYTES, commitment=ALICES.digest), True, seal(ALICES, ALICE.hotkey), BYTES, Reason.WRONG_IDENTITY),
        # Mallory learnt the payload before the close, so only its header names the true author.
        (commit_to(OF_BYTES), True, seal(OF_BYTES, MALLORY.hotkey), BYTES, Reason.WRONG_IDENTITY),
    ],
    ids=["copied then committed", "another commitment", "copied commitment", "copied manifest", "wrapped again"],
)
def test_no_copy_counts(
    times: WindowTimes,
    cache: PayloadCache,
    *,
    commit: Commit,
    in_time: bool,
    manifest: Sealed[Manifest],
    payload: bytes,
    reason: Reason,
) -> None:
    interval, honest = times.reveal_interval, Bucket(ALICE)
    honest.reveal(times, BYTES)
    for at in (interval.first, times.closed + 1, interval.last + 1 - INSTANT):
        copier = Bucket(MALLORY)
        objects = (seal(commit, MALLORY.hotkey).encode(), manifest.encode(), payload)
        for kind, data in zip(PUBLISHED, objects, strict=True):
            early = kind is Kind.COMMIT and in_time
            copier.put(window_key(kind, WINDOW, MALLORY.uid), data, times.commit_interval.last if early else at)
        with pytest.raises(RejectedError) as caught:
            fetch(copier, times, cache)
        assert caught.value.reason is reason
    assert fetch(honest, times, cache).uid == ALICE.uid


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
        clock.sleep_until(miner.exchange.acting_times(window).reveal_interval.last + 1 - INSTANT)
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
