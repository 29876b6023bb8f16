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
from tests.support.subnet import PER_WINDOW

NOW, GENESIS, RETENTION, KEPT = 100, 4, 20, 2
OLDEST = NOW - RETENTION
STORAGE = load_hparams(path=Path(__file__).parents[2] / "hparams.json").storage.model_copy(
    update={"retention_windows": RETENTION, "checkpoints_kept": KEPT}
)
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


def expired(keys, storage):
    """The keys of a bucket whose retention is over."""
    found = survey([ObjectInfo(key, 1, 0) for key in keys], NOW)
    retention = Retention.of(found, window=NOW, genesis_windows={GENESIS}, storage=storage)
    return {each for each in keys if (key := parse_current_key(each)) and retention.is_expired(key)}


windows = st.one_of(st.integers(0, NOW + 5), st.integers(OLDEST - 2, OLDEST + 2))
uids = st.sampled_from([1, 11])
keys = st.one_of(
    st.builds(lambda kind, window, uid: str(ObjectKey(kind, window, uid)), st.sampled_from(PER_WINDOW), windows, uids),
    st.builds(lambda window: str(ObjectKey(Kind.AGGREGATE, window)), windows),
    st.builds(peers_key, windows),
    st.builds(checkpoint_key, windows, uids, st.sampled_from(["config.json", EVALUATION_FILE, MANIFEST_FILE])),
    st.builds(checkpoint_key, windows, uids, st.just(MANIFEST_FILE)),
    st.builds(
        lambda kind, window, version: str(ObjectKey(kind, window, 1, version)),
        st.sampled_from(PER_WINDOW),
        windows,
        st.sampled_from(["0.2.8", "0.2.82", "1"]),
    ),
    st.sampled_from([START_WINDOW_KEY, *FOREIGN]),
)
buckets = st.sets(keys, max_size=25)


@given(buckets, st.sampled_from([0, 20]), st.sampled_from([None, 10]))
@settings(max_examples=400)
def test_expired_objects_and_no_others_expire(bucket, age, keeper):
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
            kept = {GENESIS, *finished[-KEPT:], *(window for window in finished if window >= NOW - age)}
            if keeper is not None:  # finished windows rise: the first of each span stays
                kept |= set({window // keeper: window for window in reversed(finished)}.values())
            is_kept = key.window in kept or key.file == EVALUATION_FILE
            return bool(finished) and key.window < finished[-1] and not is_kept
        if key.kind is Kind.PRIVATE:
            return bool(backups) and key.window < backups[-1] and key.window not in backups[-BACKUPS_KEPT:]
        return key.window < OLDEST and (key.kind is not Kind.PEERS or key.window != max(in_effect))

    storage = STORAGE.model_copy(update={"checkpoint_age_windows": age, "checkpoint_keeper_windows": keeper})
    assert expired(bucket, storage) == {key for key, found in ours.items() if is_expired(found)}
