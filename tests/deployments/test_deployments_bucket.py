"""`templar bucket ls|purge|access`, and the check of the keys that comes before a registration."""

from dataclasses import replace
from uuid import uuid4

import pytest

from deployments import bucket
from deployments.local.wallets import create_wallet
from deployments.register import checked_neuron
from deployments.s3_endpoint import create_bucket_with_keys
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason
from templar.housekeeping.bucket_cleanup import CleanupReport
from tests.support.commands import write_env
from tests.support.errors import error_of
from tests.support.prepared import PreparedNetwork
from tests.support.servers import store_at

ACCOUNT = uuid4().hex


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    network = PreparedNetwork(tmp_path_factory.mktemp("access"))
    create_wallet(network.plan.wallets, "local", "stranger")
    return network


@pytest.fixture(scope="module")
def keys(moto):
    return create_bucket_with_keys(moto.admin, ACCOUNT)


@pytest.fixture
def call(tmp_path, run_main):
    def call(variables, what="access", *more):
        return run_main(bucket.main, what, "--env-file", write_env(tmp_path / ".env", variables), *more)

    return call


def environment(network, moto, read, write):
    return network.environment_on(moto.admin.endpoint_url, ACCOUNT, read, write)


def objects(moto, keys):
    return [info.key for info in store_at(moto.admin.endpoint_url, keys.bucket, keys.write).list()]


def test_the_right_keys_are_right(network, moto, keys, call):
    status, out, err = call(environment(network, moto, keys.read, keys.write))
    assert (status, err) == (0, "")
    assert "3 keys are as they should be" in out
    assert objects(moto, keys) == []


def test_a_read_key_that_writes_is_told_and_no_secret_with_it(network, moto, keys, call):
    status, out, err = call(environment(network, moto, keys.write, keys.write))
    assert (status, err) == (1, "")
    assert f"[read_key_writes] bucket {ACCOUNT}, own read key: put: is allowed" in out
    assert keys.write.secret_access_key not in out
    assert objects(moto, keys) == []


# Looking into a bucket, and deleting from it.

KEY = "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"
OLD = ["gradient-1-2-v0.2.8.pt", "gradient-1-3-v0.2.8.pt"]


@pytest.fixture
def full(network, moto, keys):
    store = store_at(moto.admin.endpoint_url, keys.bucket, keys.write)
    for key in (*OLD, "notes\u202e.txt"):
        store.put(key, b"12345")
    yield environment(network, moto, keys.read, keys.write)
    store.delete([each.key for each in store.list()])


def test_a_listing_shows_what_a_terminal_can(full, call):
    status, out, err = call(full, "ls", "--prefix", "gradient-")
    assert (status, err) == (0, f"2 objects, 10 bytes in bucket {ACCOUNT}\n")
    assert [line.split()[-1] for line in out.splitlines()] == OLD
    assert call(full, "ls")[1].splitlines()[-1].endswith("  notes\\u202e.txt")
    names = ("TEMPLAR_STORAGE", "R2_GRADIENTS_ACCOUNT_ID", *(f"R2_GRADIENTS_READ_{each}" for each in KEY))
    assert call({name: full[name] for name in names}, "ls") == call(full, "ls"), "the read key is enough"
    assert (
        "R2_DATASET_ACCOUNT_ID is missing" in call({name: full[name] for name in names}, "ls", "--bucket", "dataset")[2]
    )
    page = {name.replace("GRADIENTS", "PAGE"): value for name, value in full.items() if "GRADIENTS" in name}
    elsewhere = full | page | dict.fromkeys(("TEMPLAR_STORAGE", "R2_PAGE_ENDPOINT"), "http://127.0.0.1:1")
    for kind in ("neuron", "page"):
        listed = call(elsewhere, "ls", "--bucket", kind, "--endpoint-url", full["TEMPLAR_STORAGE"])
        assert listed == call(full, "ls")


def test_a_purge_counts_and_deletes_once_the_buckets_name_is_there(full, moto, keys, call, monkeypatch):
    asked = ("purge", "--version", "0.2.8")
    status, out, _ = call(full, *asked)
    assert (status, out.splitlines()[-1]) == (0, f"2 objects of bucket {ACCOUNT} would go; 0 stay for the network")
    for answer, remedy in (((), "--confirm: repeat the bucket's name"), (("--confirm", "other"), repr(ACCOUNT))):
        status, _, err = call(full, *asked, "--delete", *answer)
        assert (status, err[:15]) == (1, "[not_confirmed]")
        assert remedy in err
    assert objects(moto, keys) == [*OLD, "notes\u202e.txt"]
    assert call(full, *asked, "--delete", "--confirm", ACCOUNT)[1].endswith("2 objects were deleted, 0 could not be\n")
    assert objects(moto, keys) == ["notes\u202e.txt"]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: ACCOUNT)
    assert call(full, "purge", "--wipe", "--delete")[0] == 0
    assert objects(moto, keys) == []


def test_what_a_purge_selects_is_asked_for_by_one_option(full, moto, keys, call, monkeypatch):
    asked = []
    monkeypatch.setattr(
        bucket.maintenance, "clean_temporary", lambda *_, **more: asked.append(more) or CleanupReport(1)
    )
    assert call(full, "purge", "--temporary", "6")[0] == 0
    assert asked == [{"hours": 6.0, "dry_run": True, "confirm_bucket": ""}]
    assert call(full, "ls", "--endpoint-url", "")[0] == 2
    for criterion in (("--older-than", "0"), ("--aggregates", "0.2.8"), ("--suffix", ".npy"), ("--prefix", "none")):
        assert call(full, "purge", *criterion, "--delete")[1].startswith("0 objects")
    status, _, err = call(full, "purge", "--older-than", "-1")
    assert (status, "[bad_parameters] hours: -1.0" in err) == (1, True)
    assert [call(full, "purge", *both)[0] for both in ((), ("--wipe", "--suffix", "x"))] == [2, 2]
    assert len(objects(moto, keys)) == 3


# The check that comes before a registration.


def poor(_):
    raise PermanentError(Reason.CANNOT_PAY_FEES, "the coldkey has nothing")


ELSEWHERE = "0123456789abcdef" * 2
OTHER_BUCKET = {"R2_GRADIENTS_ACCOUNT_ID": ELSEWHERE, "R2_GRADIENTS_BUCKET_NAME": ELSEWHERE}
OTHER_DATASET = {"R2_DATASET_ACCOUNT_ID": "elsewhere", "R2_DATASET_BUCKET_NAME": "elsewhere"}
WALLETS = "hotkeys/none: no such hotkey; the wallet holds aggregator, burn, lazy, stranger, validator"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WALLET_HOTKEY": "none"}, WALLETS),
        ({"WALLET_HOTKEY": "stranger"}, "[not_registered] WALLET_HOTKEY: "),
        ({"NETWORK": "ledger:/none.sqlite"}, "NETWORK, NETUID: /none.sqlite: "),
        ({"TEMPLAR_HOME": "/proc/1/none"}, "[local_file] TEMPLAR_HOME: "),
        (OTHER_BUCKET, "[bucket_missing] R2_GRADIENTS_READ_*: "),
        (OTHER_DATASET, "[bucket_missing] R2_DATASET_*: "),
        ({"DATASET_BINS_PATH": "elsewhere"}, "[dataset_missing] DATASET_BINS_PATH: "),
        ({"TEMPLAR_STORAGE": "http://127.0.0.1:1"}, "[store_unreachable] R2_GRADIENTS_READ_*: "),
        ({"TEMPLAR_SINK_GRAFITE": "x"}, "[bad_environment] TEMPLAR_SINK_GRAFITE is no sink's"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(network, changes, message):
    assert message in str(error_of(lambda: checked_neuron(network.environment("lazy") | changes)))


def test_a_coldkey_that_cannot_pay_is_named(network, monkeypatch):
    monkeypatch.setattr(Ledger, "require_fees", poor)
    found = error_of(lambda: checked_neuron(network.environment("lazy")))
    assert str(found) == "[cannot_pay_fees] WALLET_NAME: the coldkey has nothing"


BOTH = "R2_GRADIENTS_READ_*, R2_GRADIENTS_WRITE_*"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("write", "write"), f"[read_key_writes] {BOTH}: bucket "),
        (("read", "read"), f"[write_key_refused] {BOTH}: bucket "),
        (("wrong", "write"), f"[access_denied] R2_GRADIENTS_READ_*: bucket {ACCOUNT}: "),
        (("read", "wrong"), f"[access_denied] R2_GRADIENTS_WRITE_*: bucket {ACCOUNT}: "),
        (("read", "write"), "[dataset_missing] DATASET_BINS_PATH: "),  # the keys are right, and there is no text
    ],
    ids=["write twice", "read twice", "wrong to read", "wrong to write", "right"],
)
def test_wrong_keys_are_refused_before_one_is_published(network, moto, keys, pair, message):
    known = {"read": keys.read, "write": keys.write, "wrong": replace(keys.write, secret_access_key="f" * 64)}
    found = str(error_of(lambda: checked_neuron(environment(network, moto, *(known[each] for each in pair)))))
    assert found.startswith(message)
    assert keys.write.secret_access_key not in found
    assert objects(moto, keys) == []
