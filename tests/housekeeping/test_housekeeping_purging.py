"""Purges and temporary clean-ups of the buckets of a running network."""

import time
from pathlib import Path
from uuid import uuid4

from deployments.s3_endpoint import create_bucket_with_keys
from templar import PROTOCOL_VERSION
from templar.agreement.checkpoint import EVALUATION_FILE, list_checkpoints
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import START_WINDOW_KEY, checkpoint_key
from templar.housekeeping.bucket_cleanup import Criterion, Mode
from templar.housekeeping.maintenance import Target, clean_temporary, publish_newest_checkpoint, purge_bucket
from templar.store import directory
from templar.store.directory import INCOMING
from tests.store.conftest import s3_store
from tests.support.errors import raising
from tests.support.network import tiny

AGGREGATOR = "aggregator-1"


def target(network, **changes):
    return Target(network.bucket(AGGREGATOR), is_own=True, **changes)


def purge(network, criterion, at=None, *, dry_run=False, confirm=None):
    config, at = network.config(AGGREGATOR), at or target(network)
    return purge_bucket(
        at,
        config.chain,
        network.hparams,
        criterion,
        dry_run=dry_run,
        confirm_bucket=at.store.name if confirm is None else confirm,
    )


def test_without_the_buckets_name_nothing_is_even_read(old):
    before = old.objects(AGGREGATOR)
    with old.outage(AGGREGATOR), raising(PermanentError, Reason.NOT_CONFIRMED, repr(old.member(AGGREGATOR).account_id)):
        purge(old, Criterion(Mode.WIPE), confirm="BUCKET")
    assert old.objects(AGGREGATOR) == before


def test_a_network_continues_after_any_purge(build):
    storage = {"checkpoint_frequency": 2, "checkpoints_kept": 1, "retention_windows": 3}
    network = build(tiny(storage=storage))
    network.run([1, 2, 3, 4, 5])
    publish_newest_checkpoint(network.config(AGGREGATOR))
    alive = {key for key in network.objects(AGGREGATOR) if key.split("-")[1:2] in (["2"], ["3"], ["4"], ["5"])}
    for criterion in (
        Criterion(Mode.VERSION, version=PROTOCOL_VERSION),
        Criterion(Mode.OLDER_THAN, hours=0.0),
        Criterion(Mode.PREFIX, prefix="c"),
        Criterion(Mode.SUFFIX, suffix=".json"),
    ):
        purge(network, criterion)
        left = network.objects(AGGREGATOR)
        assert alive <= set(left)
        assert START_WINDOW_KEY in left
        assert list_checkpoints(network.bucket(AGGREGATOR), network.member(AGGREGATOR).uid) == [5, 0]
    network.restart(network.miners[0])  # it needs start window and decisions
    network.run([6, 7])
    assert len(network.roots(7)) == 1
    purge(network, Criterion(Mode.WIPE))
    assert list(network.bucket(AGGREGATOR).list()) == []


def test_an_unreadable_start_window_keeps_every_checkpoint(old):
    store = old.bucket(AGGREGATOR)
    start = store.get(START_WINDOW_KEY, max_bytes=1 << 20)
    store.put(START_WINDOW_KEY, b"damaged")
    before = old.objects(AGGREGATOR, "checkpoint-")
    purge(old, Criterion(Mode.PREFIX, prefix="checkpoint-"))
    assert old.objects(AGGREGATOR, "checkpoint-") == before
    store.put(START_WINDOW_KEY, start)


def test_a_dataset_in_the_same_bucket_stays(old):
    store = old.bucket(AGGREGATOR)
    store.put("data/old.npy", b"1")
    purge(old, Criterion(Mode.SUFFIX, suffix=".npy"), target(old, kept_prefixes=("data/",)))
    assert store.head("data/old.npy") is not None
    purge(old, Criterion(Mode.SUFFIX, suffix=".npy"))
    assert store.head("data/old.npy") is None


def test_a_bucket_that_does_not_answer_is_not_an_empty_one(old):
    with old.outage(AGGREGATOR), raising(TransientError, Reason.STORE_UNREACHABLE):
        purge(old, Criterion(Mode.PREFIX, prefix="checkpoint-"))


# Temporary things.


def test_abandoned_objects_go_and_running_uploads_stay(old, monkeypatch):
    at = target(old)
    store, root = old.bucket(AGGREGATOR), Path(old.bucket(AGGREGATOR)._root)
    half = checkpoint_key(1, 9, "config.json")
    measured = checkpoint_key(1, 9, EVALUATION_FILE)  # of a checkpoint that has expired
    for key in ("access-check-0123456789abcdef", half, measured):
        store.put(key, b"12345")
    (root / INCOMING / "dead").write_bytes(b"x" * 100)
    chain, hparams = old.config(AGGREGATOR).chain, old.hparams
    before = set(old.objects(AGGREGATOR))
    assert clean_temporary(at, chain, hparams, hours=0, dry_run=False).rows == ()
    old.clock.sleep_until(old.clock.now() + 3000)
    store.put("newest", b"1")
    later = time.time() + 3000
    monkeypatch.setattr(directory.time, "time", lambda: later)
    dry = clean_temporary(at, chain, hparams, hours=0.5, dry_run=True)
    assert {row.kind: (row.found, row.num_bytes, row.deleted) for row in dry.rows} == {
        "probe": (1, 5, 0),
        "unfinished checkpoint": (1, 5, 0),
        "unfinished upload": (1, 100, 0),
    }
    done = clean_temporary(at, chain, hparams, hours=0.5, dry_run=False)
    assert (done.total("deleted"), done.failed, done.unseen) == (3, (), None)
    assert before - set(old.objects(AGGREGATOR)) == {"access-check-0123456789abcdef", half}
    store.delete([measured])
    assert not (root / INCOMING / "dead").exists()
    assert clean_temporary(at, chain, hparams, hours=0.5, dry_run=False).rows == ()


def test_a_write_key_that_may_not_list_uploads_is_no_failure(old, moto):
    keys = create_bucket_with_keys(moto.admin, uuid4().hex)
    at = Target(s3_store(keys.bucket, moto.admin.endpoint_url, keys.read))
    chain = old.config(AGGREGATOR).chain
    found = clean_temporary(at, chain, old.hparams, hours=1, dry_run=False, confirm_bucket=keys.bucket)
    assert (found.unseen, found.rows) == (Reason.ACCESS_DENIED, ())
