"""Work beside the windows, as other processes do it: on snapshots and buckets, without the live neuron."""

from dataclasses import replace

import pytest

from templar.agreement.checkpoint import MANIFEST_FILE, list_checkpoints
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import parse_key
from templar.exchange.objects import PlanEntry
from templar.housekeeping import maintenance
from templar.housekeeping.maintenance import clean_bucket, known_mark, publish_newest_checkpoint
from templar.hparams import Data
from templar.neuron.configuration import NeuronConfig
from tests.support.errors import raising

AGGREGATOR = "aggregator-1"


def windows_in(network, name):
    """The windows of the per-window objects in a bucket."""
    keys = (parse_key(key) for key in network.objects(name))
    return {key.window for key in keys if key and key.window is not None and key.kind not in ("peers", "checkpoint")}


def test_copies_that_could_not_be_published_do_not_pile_up(network, monkeypatch):
    network.run([1])
    config = network.config(AGGREGATOR)
    (config.home / "publishing" / "0-older").mkdir(parents=True)
    monkeypatch.setattr(maintenance, "publish_checkpoint", refused)
    with pytest.raises(TransientError):
        publish_newest_checkpoint(config)
    assert [path.name.partition("-")[0] for path in (config.home / "publishing").iterdir()] == ["1"]


def refused(*_, **__):
    raise TransientError(Reason.STORE_BUSY, "no quota")


def test_the_newest_snapshot_is_published_once(network):
    """While the neuron writes the next one, which is not disturbed; its card has the settings of its window."""
    aggregator, opened = network.aggregator, list[Data]()
    changes = {"data.other_dataset": network.world.add_dataset(), "training.inner_steps": 1}
    entry = PlanEntry(number=1, previous=network.world.birth.start.digest, first_window=2, changes=changes)
    for node in network.nodes.values():
        node.state.plan = node.state.plan.after(entry)
    network.run([1, 2])
    config = replace(
        network.config(AGGREGATOR), open_dataset=lambda data: opened.append(data) or aggregator.workload.dataset
    )
    half = aggregator.snapshots.folder(3).with_name(".writing-3-99")
    half.mkdir()
    mark = publish_newest_checkpoint(config)
    assert mark == aggregator.state.mark
    before = network.objects(AGGREGATOR)
    assert publish_newest_checkpoint(config) == mark
    assert network.objects(AGGREGATOR) == before
    assert not (config.home / "publishing").exists()
    assert known_mark(config, config.birth()).window == 2
    assert half.exists()
    card = next(data for key, (_, data) in before.items() if key.endswith("README.md"))
    assert f"| Dataset in window 2 | `{changes['data.other_dataset']}`, ".encode() in card
    assert b"in window 2 up to 1 inner steps and 4 sequences by each miner" in card
    assert [data.other_dataset for data in opened] == [changes["data.other_dataset"]]

    assert {parse_key(key).file for key in before if key.startswith("checkpoint-2-")} == {
        *("config.json", "generation_config.json", "model.safetensors", "README.md", MANIFEST_FILE),
        *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
    }


def test_a_publication_that_failed_goes_on(network, monkeypatch):
    """It needs no dataset: without one its card does not name the sources of the text."""
    network.run([1])

    def away(data):
        raise TransientError(Reason.STORE_UNREACHABLE, "the dataset is away")

    config = replace(network.config(AGGREGATOR), open_dataset=away)
    store, real = config.buckets.own, config.buckets.own.put_if_absent

    def put(key, data):
        if key.endswith("manifest.json"):
            raise TransientError(Reason.STORE_BUSY, "503")
        return real(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_if_absent", put)
        with pytest.raises(TransientError):
            publish_newest_checkpoint(config)
    uid = network.member(AGGREGATOR).uid
    assert list_checkpoints(store, uid) == [0], "without its manifest it does not exist"
    publish_newest_checkpoint(config)
    assert list_checkpoints(store, uid) == [1, 0]


def test_a_hotkey_that_is_not_registered_publishes_nothing(network):
    network.run([1])
    stranger = replace(network.config(AGGREGATOR), signer=network.world.members[0].hotkey)
    network.world.chain.deregister(stranger.signer.address)
    with raising(PermanentError, Reason.NOT_REGISTERED):
        publish_newest_checkpoint(stranger)


def test_what_has_expired_is_deleted_and_nothing_else(old):
    foreign = ["gradient-x-1-v1.bin", "notes/decision-1-1-v1.json", "readme.txt", "gradient-1-3-v999.bin"]
    for key in foreign:
        old.bucket(AGGREGATOR).put(key, b"mine")
    report = clean_bucket(old.config(AGGREGATOR), dry_run=False)
    deleted = {"aggregator": 2, "checkpoint": 2 * 8, "debug": 2, "decision": 2, "proof": 2, "roster": 2}
    assert ({row.kind: row.deleted for row in report.rows}, report.failed) == (deleted, ())
    assert set(foreign) <= set(old.objects(AGGREGATOR))
    old.bucket(AGGREGATOR).delete(foreign)
    assert windows_in(old, AGGREGATOR) == {3, 4, 5, 6}
    assert list_checkpoints(old.aggregator.buckets.own, old.member(AGGREGATOR).uid) == [6, 0], "genesis stays for ever"
    assert [key for key in old.objects(AGGREGATOR) if key.startswith("start_window")]
    for name in old.nodes:
        clean_bucket(old.config(name), dry_run=False)
        assert min(windows_in(old, name)) == 3
    old.run([7])
    assert len(old.roots(7)) == 1


def test_without_a_genesis_or_the_pinned_one_nothing_is_cleaned(network):
    config = network.config(AGGREGATOR)
    with raising(PermanentError, Reason.WRONG_NETWORK):
        clean_bucket(replace(config, pinned_genesis="ab" * 32), dry_run=False)
    network.bucket(AGGREGATOR).delete(network.objects(AGGREGATOR, "start_window"))
    with raising(TransientError, Reason.GENESIS_MISSING):
        clean_bucket(config, dry_run=False)


def test_an_unreachable_store_is_not_taken_for_no_genesis(network):
    config = network.config("validator-2")
    for work in (publish_newest_checkpoint, lambda each: clean_bucket(each, dry_run=True)):
        with network.outage(AGGREGATOR), raising(TransientError, Reason.STORE_UNREACHABLE):
            work(config)


def test_the_genesis_of_the_own_start_window_stays_whatever_network_is_found(network, monkeypatch):
    network.run([1, 2, 3])
    for _ in range(2):
        publish_newest_checkpoint(network.config(AGGREGATOR))
    config = network.config(AGGREGATOR)
    birth = config.birth()
    elsewhere = replace(birth, start=birth.start.model_copy(update={"start_window": 63}))
    monkeypatch.setattr(NeuronConfig, "birth", lambda self: elsewhere)
    before = network.objects(AGGREGATOR, "checkpoint-0-")
    clean_bucket(config, dry_run=False)
    assert before
    assert network.objects(AGGREGATOR, "checkpoint-0-") == before
