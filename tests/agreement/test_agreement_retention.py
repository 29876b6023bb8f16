from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from templar import PROTOCOL_VERSION
from templar.agreement.checkpoint import EVALUATION_FILE, MANIFEST_FILE
from templar.agreement.retention import BACKUPS_KEPT, Retention, survey
from templar.exchange.object_keys import (
    START_WINDOW_KEY,
    Kind,
    ObjectKey,
    checkpoint_key,
    parse_current_key,
    parse_key,
    peers_key,
)
from templar.hparams import load_hparams
from templar.store.base import ObjectInfo

NOW, GENESIS, RETENTION, KEPT = 100, 4, 20, 2
OLDEST = NOW - RETENTION
STORAGE = load_hparams(path=Path(__file__).parents[2] / "hparams.json").storage.model_copy(
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


def expired(keys, *, now=NOW, storage=STORAGE):
    """The keys of a bucket whose retention is over."""
    keys = list(keys)
    found = survey([ObjectInfo(key, 1, 0) for key in keys], now)
    retention = Retention.of(found, window=now, genesis_windows={GENESIS}, storage=storage)
    return [each for each in keys if (key := parse_current_key(each)) and retention.is_expired(key)]


def complete(window, uid=1):
    return [checkpoint_key(window, uid, name) for name in ("config.json", MANIFEST_FILE, "model.safetensors")]


def test_a_checkpoint_of_a_window_to_come_stays_and_counts_for_nothing():
    far = [key for window in (NOW + 1, 50_000, 50_001) for key in complete(window)]
    live = [*complete(NOW - 2), *complete(NOW - 1), checkpoint_key(NOW, 1, "config.json")]
    assert expired([*live, *far]) == []
    assert expired([*complete(GENESIS), *complete(10), *live, *far]) == complete(10)
    assert expired([*complete(10), *complete(11), checkpoint_key(50_000, 1, MANIFEST_FILE)]) == []


def test_young_checkpoints_and_the_first_in_every_so_many_windows_stay():
    made = [12, 19, 30, 31, 38, 55, 80, 88, 95]
    keys = [key for window in made for key in complete(window)]
    storage = STORAGE.model_copy(update={"checkpoint_age_windows": 20})
    assert expired(keys, storage=storage) == [key for window in made[:6] for key in complete(window)]
    storage = STORAGE.model_copy(update={"checkpoint_keeper_windows": 10})
    gone = expired(keys, storage=storage)
    assert gone == [key for window in (19, 31, 38) for key in complete(window)]
    left = [key for key in keys if key not in gone]
    assert expired([*left, *complete(150), *complete(151)], now=200, storage=storage) == complete(88)


windows = st.one_of(st.integers(0, NOW + 5), st.integers(OLDEST - 2, OLDEST + 2))
uids = st.sampled_from([1, 11])
keys = st.one_of(
    st.builds(lambda kind, window, uid: str(ObjectKey(kind, window, uid)), st.sampled_from(PER_WINDOW), windows, uids),
    st.builds(lambda window: str(ObjectKey(Kind.AGGREGATE, window)), windows),
    st.builds(peers_key, windows),
    st.builds(checkpoint_key, windows, uids, st.sampled_from(["config.json", EVALUATION_FILE, MANIFEST_FILE])),
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
@settings(max_examples=400)
def test_expired_objects_and_no_others_expire(bucket):
    """Objects of a window live for the retention; checkpoints, backups and peer lists until newer ones replace them."""
    parsed = {key: found for key in bucket if (found := parse_key(key)) is not None}
    ours = {
        key: found for key, found in parsed.items() if found.version == PROTOCOL_VERSION and found.window is not None
    }
    finished = sorted({found.window for found in ours.values() if found.file == MANIFEST_FILE and found.window <= NOW})
    backups = sorted({found.window for found in ours.values() if found.kind is Kind.PRIVATE and found.window <= NOW})
    in_effect = [found.window for found in ours.values() if found.kind is Kind.PEERS and found.window <= NOW]

    def is_expired(key):
        if key.kind is Kind.CHECKPOINT:
            is_kept = key.window in {GENESIS, *finished[-KEPT:]} or key.file == EVALUATION_FILE
            return bool(finished) and key.window < finished[-1] and not is_kept
        if key.kind is Kind.PRIVATE:
            return bool(backups) and key.window < backups[-1] and key.window not in backups[-BACKUPS_KEPT:]
        return key.window < OLDEST and (key.kind is not Kind.PEERS or key.window != max(in_effect))

    assert set(expired(sorted(bucket))) == {key for key, found in ours.items() if is_expired(found)}
