from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from templar.adversary.chains import SkewedChain
from templar.agreement.roster import draft_roster, publish_roster
from templar.agreement.slots import PassedOver, await_roster
from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import Roster
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.signed import Sealed, check_signature, seal
from templar.interrupt import StoppedError
from templar.store.base import ObjectStore
from templar.timeline import WindowTimes
from tests.support.errors import raising
from tests.support.scripted_store import ScriptedStore, failing, once
from tests.support.subnet import LAYOUT, RULES, Member, Subnet, fields_of, gathered, signed_anyhow

WINDOW = 3
BUSY = TransientError(Reason.STORE_BUSY, "for a test")


class Scene:
    """A window that has closed; three validators may publish, the fourth has no rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.subnet = Subnet(folder, stakes=(100.0, 50.0, 20.0, 10.0), num_miners=3)
        self.clock = self.subnet.clock
        self.times: WindowTimes = self.subnet.times(WINDOW)
        self.caches = 0

    def again(self) -> "Scene":
        """The same window once more, with nothing published yet."""
        folder = self.folder / "again"
        folder.mkdir()
        return Scene(folder)

    def publisher(self, rank: int) -> Member:
        return self.subnet.validators[rank]

    def store(self, rank: int) -> ScriptedStore:
        return self.subnet.store(self.publisher(rank))

    def key(self, rank: int) -> str:
        return window_key(Kind.ROSTER, WINDOW, self.publisher(rank).uid)

    def cache(self) -> PayloadCache:
        self.caches += 1
        return PayloadCache(self.folder / f"payloads-{self.caches}", LAYOUT)

    def publish(self, rank: int, authors: Sequence[Member] | None = None, *, slot: int | None = None) -> Roster:
        """Publish with all that belongs to it, in the slot of the rank unless another one is given."""
        cache = self.cache()
        submissions = gathered(cache, self.subnet.miners if authors is None else authors, WINDOW)
        exchange = self.subnet.exchange(self.publisher(rank))
        draft = draft_roster(
            exchange,
            WINDOW,
            submissions,
            previous=None,
            peer_list=None,
            cache=cache,
            spool=self.folder / f"spool-{rank}",
            durable=False,
        )
        publish_roster(exchange, draft, self.times.roster_slot(rank if slot is None else slot))
        return draft.roster

    def put(self, rank: int, roster: Roster, aggregate: bytes | None = None) -> None:
        """Store a roster now, as its publisher may sign it."""
        if aggregate is not None:
            self.store(rank).inner.put(aggregate_key(WINDOW), aggregate)
        self.store(rank).inner.put(self.key(rank), seal(roster, self.publisher(rank).hotkey).encode())

    def wait(
        self,
        reader: Member | None = None,
        publish_own: Callable[[int], None] | None = None,
        views: dict[str, ObjectStore] | None = None,
    ) -> Sealed[Roster] | None:
        exchange = self.subnet.exchange(reader, views)
        self.reader_cache = self.cache()
        return await_roster(exchange, self.times, cache=self.reader_cache, publish_own=publish_own)

    def together(self, *publishers: Callable[[], object], reader: Callable[[], object] | None = None) -> object:
        """The reader waits while the publishers act; what it found."""
        found: list[object] = []
        self.clock.run([*publishers, lambda: found.append((reader or self.wait)())])
        return found[0]

    def at(self, moment: float, act: Callable[[], object]) -> Callable[[], None]:
        def later() -> None:
            self.clock.sleep_until(moment)
            act()

        return later

    def slot(self, rank: int) -> tuple[int, int]:
        interval = self.times.roster_slot(rank)
        return interval.first, interval.last


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def body_of(found: object) -> tuple[int, Roster]:
    """Rank and roster: the first rank has uid 1."""
    assert isinstance(found, Sealed)
    return found.body.uid - 1, found.body


# Ranks and slots.


def test_its_payloads_are_in_the_cache(scene: Scene) -> None:
    _, roster = body_of(scene.together(lambda: scene.publish(0)))
    assert len(roster.entries) == 3
    for entry in roster.entries:
        assert sha256_hex(scene.reader_cache.read(WINDOW, entry.payload_sha256)) == entry.payload_sha256


@pytest.mark.parametrize("rank", [1, 2])
def test_a_later_rank_takes_over(scene: Scene, rank: int) -> None:
    assert body_of(scene.together(lambda: scene.publish(rank)))[0] == rank
    first, last = scene.slot(rank)
    assert first <= scene.clock.now() <= last


def test_the_lowest_rank_that_counts_is_applied(scene: Scene) -> None:
    found = scene.together(lambda: scene.publish(2), lambda: scene.publish(1, scene.subnet.miners[:1]))
    assert body_of(found)[0] == 1


def test_a_validator_without_a_rank_decides_nothing(scene: Scene) -> None:
    scene.publish(3, slot=2)
    assert scene.wait() is None


def test_without_any_roster_the_window_is_null_after_the_last_slot(scene: Scene) -> None:
    assert scene.wait() is None
    assert scene.clock.now() == scene.times.null_after + 1 == scene.times.settles + 3 * RULES.roster_slot_seconds + 1


def test_a_rejected_roster_is_kept_with_the_reason(scene: Scene) -> None:
    passed: list[PassedOver] = []
    rejected: list[Roster] = []

    def check(roster: Roster) -> None:
        if not rejected:
            rejected.append(roster)
            raise RejectedError(Reason.BAD_SIGNATURE, "for a test")

    def wait() -> Sealed[Roster] | None:
        return await_roster(
            scene.subnet.exchange(), scene.times, cache=scene.cache(), check=check, on_passed_over=passed.append
        )

    found = scene.together(lambda: scene.publish(0), lambda: scene.publish(1), reader=wait)
    assert body_of(found)[0] == 1
    assert [(each.uid, each.reason) for each in passed] == [(scene.publisher(0).uid, Reason.BAD_SIGNATURE)]
    assert passed[0].sealed is not None
    assert passed[0].sealed.body == rejected[0]
    check_signature(passed[0].sealed)


@pytest.mark.parametrize("seconds", [30.0, -30.0])
def test_a_wrong_clock_makes_no_window_null(scene: Scene, seconds: float) -> None:
    """Half a minute ahead, every slot seems to be over when the first one begins."""
    exchange = scene.subnet.exchange()
    skewed = replace(exchange, chain=SkewedChain(exchange.chain, seconds))

    def wait() -> Sealed[Roster] | None:
        return await_roster(skewed, scene.times, cache=scene.cache())

    found = scene.together(lambda: scene.publish(2), reader=wait)
    assert body_of(found)[0] == 2


def test_a_network_with_fewer_validators_than_ranks_waits_for_all_slots(tmp_path: Path) -> None:
    subnet = Subnet(tmp_path, stakes=(100.0,), num_miners=1)
    times = subnet.times(WINDOW)
    assert await_roster(subnet.exchange(), times, cache=PayloadCache(tmp_path, LAYOUT)) is None
    assert subnet.clock.now() == times.null_after + 1


def test_an_empty_roster_is_a_decision(scene: Scene) -> None:
    rank, roster = body_of(scene.together(lambda: scene.publish(0, [])))
    assert (rank, roster.entries) == (0, ())
    assert scene.clock.now() <= scene.slot(0)[1]


# To the second (docs/protocol.md 8).


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("offset", "counts"), [(-0.001, False), (0.0, True), (3.999, True), (4.0, False)])
def test_a_roster_counts_in_its_slot(scene: Scene, rank: int, offset: float, counts: bool) -> None:
    roster = scene.publish(rank)
    aggregate = scene.store(rank).inner.get(aggregate_key(WINDOW), max_bytes=10_000)
    late = scene.again()
    found = late.together(late.at(late.slot(rank)[0] + offset, lambda: late.put(rank, roster, aggregate)))
    assert (found is not None) is counts
    late.clock.sleep_until(late.times.null_after + 1000)
    assert (late.wait() is not None) is counts


@pytest.mark.parametrize("change", [lambda data: None, lambda data: data[:-1], lambda data: data + b"\0"])
def test_an_aggregate_that_is_missing_or_of_another_size_does_not_count(
    scene: Scene, change: Callable[[bytes], bytes | None]
) -> None:
    scene.publish(0)
    store, key = scene.store(0).inner, aggregate_key(WINDOW)
    data = change(store.get(key, max_bytes=10_000))
    if data is None:
        store.delete([key])
    else:
        store.put(key, data)
    assert body_of(scene.together(lambda: scene.publish(1)))[0] == 1


# What does not count is passed over.


@pytest.mark.parametrize(
    "changes", [{"window": WINDOW - 1}, {"genesis": "00" * 32}, {"uid": 99}, {"aggregate_bytes": 1}]
)
def test_an_illegal_roster_does_not_count(scene: Scene, changes: dict[str, object]) -> None:
    roster = fields_of(scene.publish(0)) | changes
    scene.store(0).inner.put(scene.key(0), signed_anyhow(Kind.ROSTER, roster, scene.publisher(0).hotkey))
    assert body_of(scene.together(lambda: scene.publish(1)))[0] == 1


# A roster that is exchanged.


@pytest.mark.parametrize("part", ["aggregate", "roster"])
def test_what_is_replaced_after_its_slot_does_not_count(scene: Scene, part: str) -> None:
    roster, store = scene.publish(0), scene.store(0).inner
    scene.clock.sleep_until(scene.slot(0)[1] + 1)
    if part == "roster":
        scene.put(0, roster)
    else:
        store.put(aggregate_key(WINDOW), store.get(aggregate_key(WINDOW), max_bytes=10_000))
    assert scene.wait() is None


def test_a_roster_replaced_while_it_is_read_does_not_count(scene: Scene) -> None:
    other = scene.publish(0, scene.subnet.miners[:1])
    scene.store(0).inner.delete([scene.key(0)])
    for file in (scene.folder / "spool-0").iterdir():
        file.unlink()
    scene.store(0).inner.delete([aggregate_key(WINDOW)])
    scene.publish(0)
    view = ScriptedStore(scene.store(0).inner)
    view.before = once("get", scene.key(0), lambda: scene.put(0, other))
    assert scene.wait(views={scene.publisher(0).account: view}) is None


# A failing store is no verdict.


@pytest.mark.parametrize(("operation", "rank"), [("head", 1), ("get", 0), ("get_range", 0)])
def test_a_store_that_recovers_is_read_even_after_the_slot(scene: Scene, operation: str, rank: int) -> None:
    scene.publish(rank)
    view = ScriptedStore(scene.store(rank).inner)

    def fail(called: str, key: str) -> None:
        if called == operation and scene.clock.now() < scene.slot(rank)[1] + 3:
            raise BUSY

    view.before = fail
    assert body_of(scene.wait(views={scene.publisher(rank).account: view}))[0] == rank


@pytest.mark.parametrize("operation", ["head", "get", "get_range"])
def test_a_store_that_keeps_failing_makes_no_null_window(scene: Scene, operation: str) -> None:
    scene.publish(0)
    scene.publish(1)
    view = ScriptedStore(scene.store(0).inner)
    view.before = failing(BUSY, operation)
    with raising(TransientError, Reason.ROSTER_MISSING, f"uid {scene.publisher(0).uid}"):
        scene.wait(views={scene.publisher(0).account: view})
    assert scene.clock.now() <= scene.slot(0)[1] + 1 + 2 * RULES.roster_slot_seconds


def test_a_publisher_whose_bucket_refuses_reads_is_passed_over(scene: Scene) -> None:
    scene.publish(1)
    view = ScriptedStore(scene.store(0).inner)
    view.before = failing(PermanentError(Reason.BUCKET_MISSING, "for a test"))
    assert body_of(scene.wait(views={scene.publisher(0).account: view}))[0] == 1


def test_polling_is_bounded(scene: Scene) -> None:
    scene.wait()
    for rank in range(3):
        assert 8 <= scene.store(rank).count("head", scene.key(rank)) <= 10


# The own slot.


def test_the_own_roster_is_published_in_the_own_slot(scene: Scene) -> None:
    ranks: list[int] = []

    def publish(rank: int) -> None:
        ranks.append(rank)
        scene.publish(rank)

    found = scene.wait(scene.publisher(1), publish)
    assert body_of(found)[0] == 1
    assert ranks == [1]
    info = scene.store(1).inner.head(scene.key(1))
    assert info.last_modified == scene.slot(1)[0]


def test_a_miner_publishes_no_roster(scene: Scene) -> None:
    ranks: list[int] = []
    assert scene.wait(scene.subnet.miners[0], ranks.append) is None
    assert scene.wait(scene.publisher(3), ranks.append) is None
    assert ranks == []


@pytest.mark.parametrize("reason", [Reason.NO_TIME_LEFT, Reason.OBJECT_DIFFERS])
def test_a_late_publisher_continues_as_a_reader(scene: Scene, reason: Reason) -> None:
    def publish(rank: int) -> None:
        raise PermanentError(reason, f"for a test of rank {rank}")

    earlier = scene.publish(0)  # before the process was killed
    assert body_of(scene.wait(scene.publisher(0), publish)) == (0, earlier)


def test_a_publisher_that_cannot_publish_leaves_it_to_the_next_rank(scene: Scene) -> None:
    def publish(rank: int) -> None:
        raise PermanentError(Reason.NO_TIME_LEFT, f"for a test of rank {rank}")

    found = scene.together(lambda: scene.publish(1), reader=lambda: scene.wait(scene.publisher(0), publish))
    assert body_of(found)[0] == 1


@pytest.mark.parametrize("error", [BUSY, StoppedError("for a test")])
def test_a_transient_failure_to_publish_is_raised(scene: Scene, error: Exception) -> None:
    def publish(rank: int) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        scene.wait(scene.publisher(0), publish)
    assert caught.value is error


# All nodes together.


def test_all_readers_and_publishers_agree(scene: Scene) -> None:
    found: list[Sealed[Roster] | None] = []

    def live(each: Member, delay: float) -> Callable[[], None]:
        def act() -> None:
            scene.clock.sleep_until(scene.times.settles + delay)
            rank = scene.subnet.validators.index(each) if each.permit else None
            publish = None if rank is None else scene.publish
            found.append(scene.wait(each, publish))  # type: ignore[arg-type]

        return act

    # The first publisher is down; the second comes up in the middle of its slot.
    second = live(scene.publisher(1), RULES.roster_slot_seconds + 2.5)
    scene.clock.run([second, live(scene.publisher(2), 0), *(live(miner, 0.3) for miner in scene.subnet.miners)])
    assert {body_of(each)[0] for each in found} == {1}
    assert len({body_of(each)[1].digest for each in found}) == 1
