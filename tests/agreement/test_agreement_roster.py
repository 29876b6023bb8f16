import errno
from dataclasses import replace
from pathlib import Path

import pytest

from templar.agreement.roster import draft_roster, fetch_payloads, publish_roster
from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import Roster
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.signed import unseal
from tests.support.errors import raising
from tests.support.scripted_store import ScriptedStore, fail_once, failing
from tests.support.subnet import LAYOUT, Subnet, fields_of, gathered, payload_bytes

WINDOW = 3
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
PREVIOUS, PEER_LIST = "12" * 32, "34" * 32


class Scene:
    """A window that has closed, and a publisher who gathered some payloads."""

    def __init__(self, folder):
        self.folder, self.spool = folder, folder / "spool"
        self.subnet = Subnet(folder, stakes=(100.0, 50.0), num_miners=4)
        self.publisher, self.authors = self.subnet.validators[0], self.subnet.miners[:3]
        self.exchange = self.subnet.exchange(self.publisher)
        self.times = self.exchange.times(WINDOW)
        self.slot = self.times.roster_slot(0)
        self.store = self.subnet.store(self.publisher)
        self.cache = PayloadCache(folder / "payloads", LAYOUT)
        self.key = window_key(Kind.ROSTER, WINDOW, self.publisher.uid)

    def gathered(self, authors=None, seed=0):
        return gathered(self.cache, authors or self.authors, WINDOW, seed=seed, times=(1000, 2000))

    def draft(self, submissions=None, *, previous=PREVIOUS, spool=None, durable=False):
        submissions = self.gathered() if submissions is None else submissions
        options = {"previous": previous, "peer_list": PEER_LIST, "cache": self.cache, "durable": durable}
        return draft_roster(self.exchange, WINDOW, submissions, spool=spool or self.spool, **options)

    def publish(self, submissions=None, **options):
        draft = self.draft(submissions, **options)
        publish_roster(self.exchange, draft, self.slot)
        return draft.roster

    def refused(self, reason, family=PermanentError, submissions=None):
        with raising(family, reason):
            self.publish(submissions)

    def empty_cache(self, name="empty"):
        return PayloadCache(self.folder / name, LAYOUT)

    def fetch(self, roster, store=None, cache=None):
        """Fetch the payloads of a roster; the cache that has them."""
        cache = cache or self.empty_cache()
        fetch_payloads(self.subnet.exchange(), roster, store or self.store, cache, seconds=5.0)
        return cache

    def rejected(self, reason, roster, store=None, cache=None):
        with raising(RejectedError, reason):
            self.fetch(roster, store, cache)

    def read(self, cache):
        """The payloads of the authors in a cache."""
        return [cache.read(WINDOW, sha256_hex(payload)) for payload in self.payloads()]

    def payloads(self):
        return [payload_bytes(author, WINDOW) for author in self.authors]


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_a_roster_lists_the_submissions_and_is_published_in_its_slot(scene):
    """The aggregate comes first, and both are on the disk before anything leaves."""
    seen, names = [], [f"aggregate-{WINDOW}.bin", f"roster-{WINDOW}.json"]
    scene.store.before = lambda operation, key: seen.append(sorted(path.name for path in scene.spool.iterdir()))
    assert scene.subnet.clock.now() < scene.slot.first
    submissions = scene.gathered()
    roster = scene.publish(submissions)
    assert all(each == names for each in seen)
    written = [key for operation, key in scene.store.calls if operation.startswith("put")]
    assert written == [aggregate_key(WINDOW), scene.key]
    assert {info.last_modified for info in scene.store.inner.list()} == {scene.slot.first}
    assert [(entry.uid, entry.committed_at, entry.revealed_at) for entry in roster.entries] == [
        (each.uid, 1000 + each.uid, 2000 + each.uid) for each in submissions
    ]
    assert (roster.previous, roster.peer_list, roster.window) == (PREVIOUS, PEER_LIST, WINDOW)
    data = b"".join(scene.payloads())
    assert scene.store.inner.get(aggregate_key(WINDOW), max_bytes=10_000) == data
    assert (roster.aggregate_sha256, roster.aggregate_bytes) == (sha256_hex(data), len(data))
    assert unseal(scene.store.inner.get(scene.key, max_bytes=10_000), Roster).body == roster


@pytest.mark.parametrize("key", [aggregate_key(WINDOW), window_key(Kind.ROSTER, WINDOW, 1)])
@pytest.mark.parametrize("lost", [False, True])
def test_an_interrupted_publication_continues_with_the_same_draft(scene, key, lost):
    fail_once(scene.store, BUSY, "put_if_absent", key=key, lost=lost)
    first = scene.gathered()
    with pytest.raises(TransientError):
        scene.publish(first)
    data = {entry.uid: entry for entry in scene.publish(scene.gathered(scene.subnet.miners, seed=1)).entries}
    assert sorted(data) == [each.uid for each in first]
    assert all(data[each.uid].payload_sha256 == each.manifest.payload_sha256 for each in first)
    assert scene.store.count("put_if_absent") == (2 if lost else 3)


def test_a_repeated_publication_changes_nothing_not_even_after_the_slot(scene):
    first = scene.publish()
    before = list(scene.store.inner.list())
    scene.subnet.clock.sleep_until(scene.slot.last + 100)
    assert scene.publish(scene.gathered(scene.authors[:1]), previous=None) == first
    assert list(scene.store.inner.list()) == before


@pytest.mark.parametrize("begins_in_time", [False, True])
def test_nothing_is_published_after_the_slot(scene, begins_in_time):
    """Nor is a roster for which there is no time left after its aggregate."""

    def delay(operation, key):
        if (operation, key) == ("put_if_absent", aggregate_key(WINDOW)):
            scene.subnet.clock.sleep_until(scene.slot.last + 1)

    if begins_in_time:
        scene.store.after = delay
    else:
        scene.subnet.clock.sleep_until(scene.slot.last + 1)
    scene.refused(Reason.NO_TIME_LEFT)
    assert [info.key for info in scene.store.inner.list()] == [aggregate_key(WINDOW)] * begins_in_time


def test_a_journal_of_another_network_is_left_alone_and_a_damaged_one_an_error(scene):
    journal, submissions = scene.spool / f"roster-{WINDOW}.json", scene.gathered()
    first = scene.publish(submissions)
    journal.write_bytes(first.model_copy(update={"genesis": "00" * 32}).canonical())
    assert scene.publish(submissions) == first
    assert journal.read_bytes() == first.canonical()
    journal.write_bytes(b"{}")
    scene.refused(Reason.BAD_STATE_FILE)


def test_durable_files_reach_the_disk(scene, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    scene.draft(spool=scene.folder / "durable", durable=True)
    assert len(synced) == 4  # two files, and each time their folder


def test_missing_payloads_come_from_the_aggregate_by_range(scene):
    roster, cache, (_, second, _) = scene.publish(), scene.empty_cache(), scene.authors
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
    assert scene.read(cache) == scene.payloads()


def altered(roster, uid, **changes):
    """A roster, as its publisher may sign it, with another entry for a uid."""
    entries = [entry.model_dump() | (changes if entry.uid == uid else {}) for entry in roster.entries]
    total = sum(entry["payload_bytes"] for entry in entries)
    return Roster.model_validate(fields_of(roster, entries=entries, aggregate_bytes=total))


@pytest.mark.parametrize("declared", [LAYOUT.min_payload_bytes - 1, LAYOUT.max_payload_bytes + 1])
def test_a_roster_of_oversized_payloads_is_refused_before_a_byte_is_read(scene, declared):
    store, forged = (
        ScriptedStore(scene.store.inner),
        altered(scene.publish(), scene.authors[2].uid, payload_bytes=declared),
    )
    scene.rejected(Reason.WRONG_SIZE, forged, store)
    assert store.calls == []


def test_an_aggregate_of_other_bytes_is_rejected(scene):
    roster = scene.publish()
    data, first = scene.store.inner.get(aggregate_key(WINDOW), max_bytes=10_000), roster.entries[0].payload_bytes
    for forged, reason in (
        (bytes(len(data)), Reason.WRONG_HASH),
        (data[first:] + data[:first], Reason.WRONG_HASH),
        (data[:-1], Reason.OBJECT_TRUNCATED),
        (b"", Reason.OBJECT_TRUNCATED),
        (None, Reason.OBJECT_MISSING),
    ):
        scene.store.inner.delete([aggregate_key(WINDOW)])
        if forged is not None:
            scene.store.inner.put(aggregate_key(WINDOW), forged)
        scene.rejected(reason, roster, cache=scene.empty_cache(f"empty-{reason}-{len(forged or data)}"))


@pytest.mark.parametrize("is_damaged", [True, False])
def test_payloads_that_an_aggregate_lacks_are_read_from_the_miners(scene, is_damaged):
    """So a bad aggregate, or one that cannot be read now, does not part those who have the payloads from the others."""
    roster, store = scene.publish(), ScriptedStore(scene.store.inner)
    if is_damaged:
        store.inner.put(aggregate_key(WINDOW), bytes(roster.aggregate_bytes))
    else:
        store.before = failing(BUSY)
    for author in scene.authors:
        scene.subnet.put(author, window_key(Kind.GRADIENT, WINDOW, author.uid), payload_bytes(author, WINDOW))
    assert scene.read(scene.fetch(roster, store)) == scene.payloads()


def test_a_full_disk_is_no_verdict_on_a_roster(scene, monkeypatch):
    roster = scene.publish()

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with raising(TransientError, Reason.LOCAL_FILE):
        scene.fetch(roster)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"hotkey": "5" + "1" * 47}, Reason.WRONG_IDENTITY), ({"payload_sha256": "00" * 32}, Reason.WRONG_HASH)],
)
def test_a_roster_with_a_wrong_author_or_hash_is_rejected(scene, changes, reason):
    forged = altered(scene.publish(), scene.authors[0].uid, **changes)
    for cache in (scene.cache, scene.empty_cache()):
        scene.rejected(reason, forged, cache=cache)


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
    roster = scene.publish()
    assert store.head(scene.key).last_modified == scene.slot.first
    assert unseal(store.get(scene.key, max_bytes=10_000), Roster).body == roster


def test_a_publisher_whose_clock_is_too_far_ahead_gives_up_at_once(scene):
    """As one does whose roster came too late for the store."""
    for seconds, reason in ((scene.slot.last + 1 - scene.slot.first, Reason.ROSTER_EARLY), (-100, Reason.ROSTER_LATE)):
        behind(scene, seconds)
        scene.refused(reason, RejectedError)
        assert scene.subnet.clock.now() <= scene.slot.first + 1
