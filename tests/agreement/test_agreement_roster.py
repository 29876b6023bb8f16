import errno
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from templar.agreement.roster import draft_roster, fetch_payloads, fetch_roster, publish_roster
from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import Roster
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.signed import seal, unseal
from templar.timeline import WindowTimes
from tests.support.errors import refusal
from tests.support.scripted_store import ScriptedStore, failing
from tests.support.subnet import LAYOUT, Subnet, fields_of, gathered, payload_bytes

WINDOW = 3
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
PREVIOUS, PEER_LIST = "12" * 32, "34" * 32


class Scene:
    """A window that has closed, and a publisher who gathered some payloads."""

    def __init__(self, folder):
        self.folder = folder
        self.subnet = Subnet(folder, stakes=(100.0, 50.0), num_miners=4)
        self.publisher = self.subnet.validators[0]
        self.exchange: NetworkView = self.subnet.exchange(self.publisher)
        self.times: WindowTimes = self.exchange.times(WINDOW)
        self.slot = self.times.roster_slot(0)
        self.store: ScriptedStore = self.subnet.store(self.publisher)
        self.cache = PayloadCache(folder / "payloads", LAYOUT)
        self.key = window_key(Kind.ROSTER, WINDOW, self.publisher.uid)

    def fetch(self, roster, store, cache):
        fetch_payloads(self.subnet.exchange(), roster, store, cache, seconds=5.0)

    def gathered(self, authors=None, seed=0):
        authors = self.subnet.miners[:3] if authors is None else authors
        return gathered(self.cache, authors, WINDOW, seed=seed, times=(1000, 2000))

    def publish(self, submissions, *, rank=0, previous=PREVIOUS):
        draft = draft_roster(
            self.exchange,
            WINDOW,
            submissions,
            previous=previous,
            peer_list=PEER_LIST,
            cache=self.cache,
            spool=self.folder / "spool",
            durable=False,
        )
        publish_roster(self.exchange, draft, self.times.roster_slot(rank))
        return draft.roster

    def empty_cache(self, name="empty"):
        return PayloadCache(self.folder / name, LAYOUT)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


# Publishing.


def test_a_roster_lists_the_submissions(scene):
    submissions = scene.gathered()
    roster = scene.publish(submissions)
    assert [(entry.uid, entry.committed_at, entry.revealed_at) for entry in roster.entries] == [
        (each.uid, 1000 + each.uid, 2000 + each.uid) for each in submissions
    ]
    assert (roster.previous, roster.peer_list, roster.window) == (PREVIOUS, PEER_LIST, WINDOW)
    data = b"".join(payload_bytes(author, WINDOW) for author in scene.subnet.miners[:3])
    assert scene.store.inner.get(aggregate_key(WINDOW), max_bytes=10_000) == data
    assert (roster.aggregate_sha256, roster.aggregate_bytes) == (sha256_hex(data), len(data))
    assert unseal(scene.store.inner.get(scene.key, max_bytes=10_000), Roster).body == roster


def test_the_slot_is_waited_for_and_the_aggregate_comes_first(scene):
    assert scene.subnet.clock.now() < scene.slot.first
    scene.publish(scene.gathered())
    written = [key for operation, key in scene.store.calls if operation.startswith("put")]
    assert written == [aggregate_key(WINDOW), scene.key]
    assert {info.last_modified for info in scene.store.inner.list()} == {scene.slot.first}


def test_both_are_on_the_disk_before_anything_leaves(scene):
    spool, seen = scene.folder / "spool", []
    scene.store.before = lambda operation, key: seen.append(sorted(path.name for path in spool.iterdir()))
    scene.publish(scene.gathered())
    assert {tuple(names) for names in seen} == {(f"aggregate-{WINDOW}.bin", f"roster-{WINDOW}.json")}


@pytest.mark.parametrize("key", [aggregate_key(WINDOW), window_key(Kind.ROSTER, WINDOW, 1)])
@pytest.mark.parametrize("lost", [False, True])
def test_an_interrupted_publication_continues_with_the_same_draft(scene, key, lost):
    hook = failing(BUSY, "put_if_absent", key=key, times=1)
    if lost:
        scene.store.after = hook
    else:
        scene.store.before = hook
    first = scene.gathered()
    with pytest.raises(TransientError):
        scene.publish(first)
    data = {entry.uid: entry for entry in scene.publish(scene.gathered(scene.subnet.miners, seed=1)).entries}
    assert sorted(data) == [each.uid for each in first]
    assert all(data[each.uid].payload_sha256 == each.manifest.payload_sha256 for each in first)
    assert scene.store.count("put_if_absent") == (2 if lost else 3)


def test_a_repeated_publication_changes_nothing_not_even_after_the_slot(scene):
    first = scene.publish(scene.gathered())
    before = list(scene.store.inner.list())
    scene.subnet.clock.sleep_until(scene.slot.last + 100)
    assert scene.publish(scene.gathered(scene.subnet.miners[:1]), previous=None) == first
    assert list(scene.store.inner.list()) == before


def test_nothing_is_published_after_the_slot(scene):
    scene.subnet.clock.sleep_until(scene.slot.last + 1)
    refusal(lambda: scene.publish(scene.gathered()), PermanentError, Reason.NO_TIME_LEFT)
    assert list(scene.store.inner.list()) == []


def test_a_roster_without_time_left_after_its_aggregate_is_not_published(scene):
    def delay(operation, key):
        if (operation, key) == ("put_if_absent", aggregate_key(WINDOW)):
            scene.subnet.clock.sleep_until(scene.slot.last + 1)

    scene.store.after = delay
    refusal(lambda: scene.publish(scene.gathered()), PermanentError, Reason.NO_TIME_LEFT)
    assert scene.store.inner.head(scene.key) is None


def test_two_rosters_of_one_hotkey_are_refused(scene):
    scene.publish(scene.gathered())
    for file in (scene.folder / "spool").iterdir():
        file.unlink()  # as if the disk had been lost
    refusal(lambda: scene.publish(scene.gathered(seed=1)), PermanentError, Reason.OBJECT_DIFFERS)
    fetched = fetch_roster(scene.exchange, scene.publisher.neuron, WINDOW)
    assert len(fetched.body.entries) == 3


def test_a_journal_of_another_network_is_left_alone(scene):
    journal = scene.folder / "spool" / f"roster-{WINDOW}.json"
    gathered = scene.gathered()
    first = scene.publish(gathered)
    foreign = first.model_copy(update={"genesis": "00" * 32})
    journal.write_bytes(foreign.canonical())
    assert scene.publish(gathered) == first
    assert journal.read_bytes() == first.canonical()


def test_a_damaged_journal_is_an_error(scene):
    journal = scene.folder / "spool" / f"roster-{WINDOW}.json"
    scene.publish(scene.gathered())
    journal.write_bytes(b"{}")
    refusal(lambda: scene.publish(scene.gathered()), PermanentError, Reason.BAD_STATE_FILE)


def test_durable_files_reach_the_disk(scene, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    draft_roster(
        scene.exchange,
        WINDOW,
        scene.gathered(),
        previous=None,
        peer_list=None,
        cache=scene.cache,
        spool=scene.folder / "durable",
    )
    assert len(synced) == 4  # two files, and each time their folder


# Fetching.


def test_missing_payloads_come_from_the_aggregate_by_range(scene):
    submissions = scene.gathered()
    roster = scene.publish(submissions)
    cache, (first, second, third) = scene.empty_cache(), scene.subnet.miners[:3]
    data = payload_bytes(second, WINDOW)
    cache.admit(data, sha256_hex(data), window=WINDOW, uid=second.uid, hotkey=second.hotkey.address)
    ranges = []

    class Ranges(ScriptedStore):
        def get_range(self, key, start, length):
            ranges.append((key, start, length))
            return super().get_range(key, start, length)

    scene.fetch(roster, Ranges(scene.store.inner), cache)
    size = len(data)
    assert ranges == [(aggregate_key(WINDOW), 0, size), (aggregate_key(WINDOW), 2 * size, size)]
    for author in (first, second, third):
        data = payload_bytes(author, WINDOW)
        assert cache.read(WINDOW, sha256_hex(data)) == data


def altered(roster, uid, **changes):
    """A roster, as its publisher may sign it, with another entry for a uid."""
    entries = [entry.model_dump() | (changes if entry.uid == uid else {}) for entry in roster.entries]
    total = sum(entry["payload_bytes"] for entry in entries)
    return Roster.model_validate(fields_of(roster, entries=entries, aggregate_bytes=total))


@pytest.mark.parametrize("declared", [LAYOUT.min_payload_bytes - 1, LAYOUT.max_payload_bytes + 1])
def test_a_roster_of_oversized_payloads_is_refused_before_a_byte_is_read(scene, declared):
    roster = scene.publish(scene.gathered())
    forged = altered(roster, scene.subnet.miners[2].uid, payload_bytes=declared)
    store = ScriptedStore(scene.store.inner)
    refusal(lambda: scene.fetch(forged, store, scene.empty_cache()), RejectedError, Reason.WRONG_SIZE)
    assert store.calls == []


def test_an_aggregate_of_other_bytes_is_rejected(scene):
    roster = scene.publish(scene.gathered())
    data, first = scene.store.inner.get(aggregate_key(WINDOW), max_bytes=10_000), roster.entries[0].payload_bytes
    for forged, reason in (
        (bytes(len(data)), Reason.WRONG_HASH),
        (data[first:] + data[:first], Reason.WRONG_HASH),
        (data[:-1], Reason.OBJECT_TRUNCATED),
        (b"", Reason.OBJECT_TRUNCATED),
    ):
        scene.store.inner.put(aggregate_key(WINDOW), forged)
        cache = scene.empty_cache(f"empty-{len(forged)}-{reason}")
        refusal(partial(scene.fetch, roster, scene.store, cache), RejectedError, reason)
    scene.store.inner.delete([aggregate_key(WINDOW)])
    cache = scene.empty_cache("nothing")
    refusal(lambda: scene.fetch(roster, scene.store, cache), RejectedError, Reason.OBJECT_MISSING)


def test_payloads_that_a_bad_aggregate_lacks_are_read_from_the_miner(scene):
    """So a bad aggregate does not part those who have the payloads from those who do not."""
    roster = scene.publish(scene.gathered())
    data = scene.store.inner.get(aggregate_key(WINDOW), max_bytes=10_000)
    scene.store.inner.put(aggregate_key(WINDOW), bytes(len(data)))
    for author in scene.subnet.miners[:3]:
        key = window_key(Kind.GRADIENT, WINDOW, author.uid)
        scene.subnet.store(author).inner.put(key, payload_bytes(author, WINDOW))
    cache = scene.empty_cache()
    scene.fetch(roster, scene.store, cache)
    assert [cache.read(WINDOW, entry.payload_sha256) for entry in roster.entries] == [
        payload_bytes(author, WINDOW) for author in scene.subnet.miners[:3]
    ]


def test_a_full_disk_is_no_verdict_on_a_roster(scene, monkeypatch):
    roster, cache = scene.publish(scene.gathered()), scene.empty_cache()

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    refusal(lambda: scene.fetch(roster, scene.store, cache), TransientError, Reason.LOCAL_FILE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"hotkey": "5" + "1" * 47}, Reason.WRONG_IDENTITY), ({"payload_sha256": "00" * 32}, Reason.WRONG_HASH)],
)
def test_a_roster_with_a_wrong_author_or_hash_is_rejected(scene, changes, reason):
    roster = scene.publish(scene.gathered())
    forged = altered(roster, scene.subnet.miners[0].uid, **changes)
    for cache in (scene.cache, scene.empty_cache()):
        refusal(partial(scene.fetch, forged, scene.store, cache), RejectedError, reason)


def test_a_copied_roster_in_another_bucket_is_rejected(scene):
    roster = scene.publish(scene.gathered())
    other = scene.subnet.validators[1]
    copied = seal(roster, scene.publisher.hotkey).encode()
    scene.subnet.store(other).inner.put(window_key(Kind.ROSTER, WINDOW, other.uid), copied)
    reader = scene.subnet.exchange()
    refusal(lambda: fetch_roster(reader, other.neuron, WINDOW), RejectedError, Reason.WRONG_IDENTITY)


# The store's clock, which is not this machine's.


class BehindStore(ScriptedStore):
    """Stamps objects by a clock that is behind the one that the publisher goes by."""

    def __init__(self, inner, seconds):
        super().__init__(inner)
        self._seconds = seconds

    def head(self, key):
        info = super().head(key)
        return None if info is None else replace(info, last_modified=info.last_modified - self._seconds)


def behind(scene, seconds):
    """Make the publisher's bucket such a store."""
    store = scene.subnet.stores[scene.publisher.account] = BehindStore(scene.store.inner, seconds)
    scene.exchange = scene.subnet.exchange(scene.publisher)
    return store


def test_a_roster_that_is_stored_before_its_slot_is_stored_again_inside(scene):
    store = behind(scene, 2)
    roster = scene.publish(scene.gathered())
    info = store.head(scene.key)
    assert info is not None
    assert info.last_modified == scene.slot.first
    assert unseal(store.get(scene.key, max_bytes=10_000), Roster).body == roster


def test_a_publisher_whose_clock_is_too_far_ahead_gives_up_at_once(scene):
    length = scene.slot.last + 1 - scene.slot.first
    behind(scene, length)
    refusal(lambda: scene.publish(scene.gathered()), RejectedError, Reason.ROSTER_EARLY)
    assert scene.subnet.clock.now() <= scene.slot.first + 1


def test_a_publisher_whose_roster_came_too_late_for_the_store_gives_up_at_once(scene):
    behind(scene, -100)
    refusal(lambda: scene.publish(scene.gathered()), RejectedError, Reason.ROSTER_LATE)


def test_payloads_come_from_the_miners_if_the_aggregate_cannot_be_read_now(scene):
    roster = scene.publish(scene.gathered())
    for author in scene.subnet.miners[:3]:
        key = window_key(Kind.GRADIENT, WINDOW, author.uid)
        scene.subnet.store(author).inner.put(key, payload_bytes(author, WINDOW))
    store, cache = ScriptedStore(scene.store.inner), scene.empty_cache()
    store.before = failing(BUSY)
    scene.fetch(roster, store, cache)
    assert [cache.read(WINDOW, entry.payload_sha256) for entry in roster.entries] == [
        payload_bytes(author, WINDOW) for author in scene.subnet.miners[:3]
    ]
