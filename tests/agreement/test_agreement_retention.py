from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar import PROTOCOL_VERSION
from templar.agreement.checkpoint import MANIFEST_FILE
from templar.exchange.object_keys import (
    START_WINDOW_KEY,
    Kind,
    ObjectKey,
    checkpoint_key,
    parse_key,
    peers_key,
    window_key,
)
from templar.hparams import Storage, load_hparams
from templar.store.base import ObjectInfo
from tests.support.expired import expired_objects

NOW, GENESIS, RETENTION, KEPT = 100, 4, 20, 2
OLDEST = NOW - RETENTION
STORAGE: Storage = load_hparams(path=Path(__file__).parents[2] / "hparams.json").storage.model_copy(
    update={"retention_windows": RETENTION, "checkpoints_kept": KEPT}
)
PER_WINDOW = [
    kind
    for kind in Kind
    if kind not in (Kind.CHECKPOINT, Kind.PEERS, Kind.AGGREGATE)
    if (key := parse_key(str(ObjectKey(kind, 1, 1)))) is not None and key.window is not None
]
OURS = f"-v{PROTOCOL_VERSION}"
FOREIGN = [
    "",
    "gradient",
    "gradient-1-2.bin",
    "text/_metadata.yaml",
    f"checkpoint-1-2{OURS}",
    "peers-1.json",
    "notes.txt",
]


def expired(keys: Iterable[str], *, now: int = NOW, storage: Storage = STORAGE) -> list[str]:
    objects = [ObjectInfo(key, 1, 0) for key in keys]
    found = expired_objects(objects, current_window=now, genesis_windows={GENESIS}, storage=storage)
    assert found == [info for info in objects if info in found]  # in the listing's order
    return [info.key for info in found]


def complete(window: int, uid: int = 1) -> list[str]:
    return [checkpoint_key(window, uid, name) for name in ("config.json", MANIFEST_FILE, "model.safetensors")]


def unfinished(window: int, uid: int = 1) -> list[str]:
    return [checkpoint_key(window, uid, "config.json")]


# Objects of windows.


@pytest.mark.parametrize("kind", [Kind.GRADIENT, Kind.EVIDENCE, Kind.AGGREGATE])
def test_an_object_lives_for_the_retention(kind: Kind) -> None:
    uid = None if kind is Kind.AGGREGATE else 1
    keys = [str(ObjectKey(kind, window, uid)) for window in (0, OLDEST - 1, OLDEST, NOW, NOW + 1, NOW + 10_000)]
    assert expired(keys) == keys[:2]


def test_foreign_keys_never_expire() -> None:
    others = [
        window_key(Kind.GRADIENT, 0, 1).replace(OURS, f"-v{version}") for version in ("0.2.8", "0.2.82", "1", "22")
    ]
    others += [key.replace(OURS, "-v1") for key in complete(10)] + [
        peers_key(3).replace(f"_v{PROTOCOL_VERSION}", "_v0.2.82")
    ]
    assert expired([*FOREIGN, *others], now=10**9) == []


# Checkpoints.


def test_the_newest_checkpoints_and_genesis_stay() -> None:
    old, newest = [*complete(10), *complete(50)], [*complete(90), *complete(99)]
    assert expired([*complete(GENESIS), *old, *newest]) == old


def test_checkpoints_stay_beyond_the_retention_while_there_is_no_newer_one() -> None:
    assert expired([*complete(10), *complete(11)]) == []


def test_a_checkpoint_that_is_being_written_stays() -> None:
    assert expired([*complete(90), *complete(95), *unfinished(99)]) == []
    assert expired(unfinished(99)) == []


def test_a_checkpoint_that_was_never_finished_goes_when_a_newer_one_is_there() -> None:
    assert expired([*unfinished(80), *complete(90), *unfinished(91), *complete(95)]) == [
        *unfinished(80),
        *unfinished(91),
    ]


def test_a_checkpoint_of_a_window_to_come_stays_and_counts_for_nothing() -> None:
    far = [key for window in (NOW + 1, 50_000, 50_001) for key in complete(window)]
    live = [*complete(NOW - 2), *complete(NOW - 1), *unfinished(NOW)]
    assert expired([*live, *far]) == []
    assert expired([*complete(GENESIS), *complete(10), *live, *far]) == complete(10)
    assert expired([*complete(10), checkpoint_key(50_000, 1, MANIFEST_FILE)]) == []


# Peer lists.


def test_the_newest_peer_list_in_effect_stays_however_old() -> None:
    keys = [peers_key(first) for first in (3, 7, 9)]
    assert expired(keys) == keys[:2]


def test_a_list_that_is_not_in_effect_yet_does_not_replace_the_one_that_is() -> None:
    keys = [peers_key(first) for first in (7, 9, NOW + 1)]
    assert expired(keys) == [peers_key(7)]
    assert expired(keys, now=NOW + 1) == [peers_key(7), peers_key(9)]


# For any bucket.

windows = st.one_of(st.integers(0, NOW + 5), st.integers(OLDEST - 2, OLDEST + 2))
uids = st.sampled_from([1, 11])
keys = st.one_of(
    st.builds(lambda kind, window, uid: str(ObjectKey(kind, window, uid)), st.sampled_from(PER_WINDOW), windows, uids),
    st.builds(lambda window: str(ObjectKey(Kind.AGGREGATE, window)), windows),
    st.builds(peers_key, windows),
    st.builds(checkpoint_key, windows, uids, st.sampled_from(["config.json", MANIFEST_FILE])),
    st.builds(
        lambda kind, window, version: str(ObjectKey(kind, window, 1, version)),
        st.sampled_from(PER_WINDOW),
        windows,
        st.sampled_from(["0.2.8", "0.2.82", "1"]),
    ),
    st.sampled_from([START_WINDOW_KEY, *FOREIGN]),
)
buckets = st.sets(keys, max_size=25)


@given(buckets)
@settings(max_examples=100)
def test_needed_objects_never_expire(bucket: set[str]) -> None:
    gone = set(expired(sorted(bucket)))
    parsed = {key: found for key in bucket if (found := parse_key(key)) is not None}
    ours = {key: found for key, found in parsed.items() if found.version == PROTOCOL_VERSION}
    assert gone <= set(ours)
    assert START_WINDOW_KEY not in gone
    for key in gone:
        window = ours[key].window
        assert window is not None
        if ours[key].kind is Kind.CHECKPOINT:
            assert window != GENESIS
            assert window < NOW
        else:
            assert window < OLDEST
    manifests = {found.window for found in ours.values() if found.file == MANIFEST_FILE and found.window is not None}
    for window in sorted(window for window in manifests if window <= NOW)[-KEPT:]:
        assert not {key for key in gone if ours[key].kind is Kind.CHECKPOINT and ours[key].window == window}
    effective = {found.window for found in ours.values() if found.kind is Kind.PEERS and (found.window or 0) <= NOW}
    if effective:
        assert peers_key(max(window for window in effective if window is not None)) not in gone


@given(buckets)
@settings(max_examples=100)
def test_all_other_objects_expire(bucket: set[str]) -> None:
    kept = bucket - set(expired(sorted(bucket)))
    found = [key for text in kept if (key := parse_key(text)) is not None and key.version == PROTOCOL_VERSION]
    assert not [key for key in found if key.kind in (*PER_WINDOW, Kind.AGGREGATE) and (key.window or 0) < OLDEST]
    assert len([key for key in found if key.kind is Kind.PEERS and (key.window or 0) < OLDEST]) <= 1
    complete_ones = {
        key.window for key in found if key.file == MANIFEST_FILE and key.window not in (GENESIS, NOW) and key.window
    }
    assert len([window for window in complete_ones if window < NOW]) <= KEPT
