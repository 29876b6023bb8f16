"""Which bucket a clean-up is about, and which keys a check is about."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from blocks import BucketCredentials, Dataset, DatasetBucket, Neuron, NeuronBucket, StorageEndpoint, Subnet, Wallet
from blocks.buckets import BucketRequest, open_target
from blocks.keyring import credentials_of
from templar.errors import PermanentError, Reason
from templar.store.s3 import S3Store
from tests.support.prefect_server import RunningPrefectServer

ENVIRONMENT = {
    f"R2_{name}_{field}": f"{name.lower()}-{value}"
    for name in ("GRADIENTS", "AGGREGATOR", "DATASET")
    for field, value in (
        ("ACCOUNT_ID", "account"),
        ("BUCKET_NAME", "bucket"),
        ("WRITE_ACCESS_KEY_ID", "key"),
        ("WRITE_SECRET_ACCESS_KEY", "hush"),
    )
}


def key(word: str) -> BucketCredentials:
    return BucketCredentials(access_key_id=f"id-{word}", secret_access_key=SecretStr(f"hush-{word}"))


def neuron(
    url: str = "http://127.0.0.1:9000", *, places: tuple[str, ...] = ("data-1",), prefix: str = "text"
) -> Neuron:
    endpoint = StorageEndpoint(url=url)
    buckets: Any = [DatasetBucket(account_id=place, bucket=place, read=key(place)) for place in places]
    return Neuron(
        role="miner",
        home="/srv/neuron",
        preset="150M",
        subnet=Subnet(network="ledger:/srv/ledger.sqlite", netuid=3),
        wallet=Wallet(path="/srv/wallets", name="cold", hotkey="hot"),
        bucket=NeuronBucket(endpoint=endpoint, account_id="own-account", read=key("read"), write=key("write")),
        dataset=Dataset(endpoint=endpoint, buckets=buckets, prefix=prefix),
    )


def opened(request: BucketRequest, block: Neuron | None = None, **changes: str) -> tuple[str, str]:
    """The bucket, and the id of the key that opens it."""
    target = open_target(block or neuron(), request, ENVIRONMENT | changes)
    assert isinstance(target.store, S3Store)
    return target.store.name, target.store._access_key_id


def test_each_bucket_is_opened_with_the_key_that_writes_it() -> None:
    assert opened(BucketRequest()) == ("own-account", "id-write")
    for choice in ("gradients", "aggregator", "dataset"):
        assert opened(BucketRequest(choice)) == (f"{choice}-bucket", f"{choice}-key")
    assert opened(BucketRequest("gradients"), R2_GRADIENTS_BUCKET_NAME="")[0] == "gradients-account"
    assert open_target(neuron(), BucketRequest(), {}).is_own
    assert not open_target(neuron(), BucketRequest("gradients"), ENVIRONMENT).is_own


def test_missing_and_malformed_variables_are_named_without_a_secret() -> None:
    prefix = "R2_AGGREGATOR"
    with pytest.raises(PermanentError) as caught:
        opened(BucketRequest("aggregator"), **{f"{prefix}_ACCOUNT_ID": "", f"{prefix}_WRITE_ACCESS_KEY_ID": ""})
    assert caught.value.reason is Reason.BAD_ENVIRONMENT
    assert f"{prefix}_ACCOUNT_ID is missing; {prefix}_WRITE_ACCESS_KEY_ID is missing" in str(caught.value)
    assert "hush" not in str(caught.value)
    with pytest.raises(PermanentError, match="R2_GRADIENTS_ACCOUNT_ID is not 3 to 32"):
        opened(BucketRequest("gradients"), R2_GRADIENTS_ACCOUNT_ID="../x")
    with pytest.raises(PermanentError, match="R2_DATASET_WRITE_SECRET_ACCESS_KEY is missing"):
        credentials_of(neuron(), {"R2_DATASET_WRITE_ACCESS_KEY_ID": "id"})


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (BucketRequest("account"), "account, credentials: "),
        (BucketRequest("account", account="some-account"), "account, credentials: "),
        (BucketRequest("neuron", account="some-account"), "account, bucket_name: bucket 'neuron' does not take them"),
        (BucketRequest("dataset", bucket="some-bucket"), "account, bucket_name: bucket 'dataset' does not take them"),
    ],
)
def test_a_request_with_missing_or_superfluous_parameters_is_refused(request_: BucketRequest, word: str) -> None:
    with pytest.raises(PermanentError) as caught:
        opened(request_)
    assert caught.value.reason is Reason.BAD_PARAMETERS
    assert word in str(caught.value)


def test_the_dataset_in_the_neurons_bucket_is_kept_unless_it_is_chosen() -> None:
    block = neuron(places=("data-1", "own-account"))
    assert open_target(block, BucketRequest(), {}).kept_prefixes == ("text/",)
    assert open_target(neuron(), BucketRequest(), {}).kept_prefixes == ()
    same = ENVIRONMENT | {"R2_DATASET_ACCOUNT_ID": "own-account", "R2_DATASET_BUCKET_NAME": "own-account"}
    assert open_target(block, BucketRequest("dataset"), same).kept_prefixes == ()
    assert open_target(block, BucketRequest("gradients"), ENVIRONMENT).kept_prefixes == ()


@pytest.mark.parametrize(("prefix", "kept"), [("/text", "text/"), ("/a/b//", "a/b/"), ("/", "")])
def test_slashes_around_the_datasets_folder_are_ignored(prefix: str, kept: str) -> None:
    block = neuron(places=("own-account",), prefix=prefix)
    assert open_target(block, BucketRequest(), {}).kept_prefixes == (kept,)
    (found,) = [each for bucket in credentials_of(block, {}) for each in bucket if each.name == "dataset read key"]
    assert found.folder == kept


@pytest.mark.parametrize(("url", "kept"), [("http://127.0.0.1:9000", ("text/",)), ("r2", ())])
def test_only_r2_tells_buckets_apart_by_account(url: str, kept: tuple[str, ...]) -> None:
    block = neuron(url)
    place = DatasetBucket(account_id="another", bucket="own-account", read=key("another"))
    dataset = Dataset(endpoint=block.dataset.endpoint, buckets=[place], prefix="text")  # type: ignore[arg-type]
    block = block.model_copy(update={"dataset": dataset})
    assert open_target(block, BucketRequest(), {}).kept_prefixes == kept


@pytest.mark.usefixtures("prefect_api")
class TestSavedCredentials:
    def test_a_saved_key_opens_an_account_and_replaces_the_own_one(self, prefect_server: RunningPrefectServer) -> None:
        del prefect_server
        key("saved").save("cleaner", overwrite=True)
        assert opened(BucketRequest("account", "some-account", credentials="cleaner")) == ("some-account", "id-saved")
        request = BucketRequest("account", "some-account", "some-bucket", "cleaner")
        assert opened(request) == ("some-bucket", "id-saved")
        for choice in ("neuron", "gradients", "dataset"):
            assert opened(BucketRequest(choice, credentials="cleaner"))[1] == "id-saved"  # type: ignore[arg-type]
        with pytest.raises(PermanentError, match="bucket-credentials block 'nobodys': there is none") as caught:
            opened(BucketRequest(credentials="nobodys"))
        assert caught.value.reason is Reason.BAD_ENVIRONMENT


# Keys to check.


def keys_of(block: Neuron, environment: dict[str, str]) -> list[list[tuple[str, str, bool]]]:
    return [
        [(each.name, each.store.name, each.writes) for each in bucket] for bucket in credentials_of(block, environment)
    ]


def test_a_neurons_own_keys_and_that_of_its_dataset(tmp_path: Path) -> None:
    dataset = keys_of(neuron(places=("data-1", "data-2")), {})[1:]
    assert dataset == [[("dataset read key 1", "data-1", False)], [("dataset read key 2", "data-2", False)]]
    assert keys_of(neuron(), {}) == [
        [("own read key", "own-account", False), ("own write key", "own-account", True)],
        [("dataset read key", "data-1", False)],
    ]
    for url, is_enforced in (("http://127.0.0.1:9000", True), (tmp_path.as_uri(), False)):
        found = [each.enforced for bucket in credentials_of(neuron(url), {}) for each in bucket]
        assert found == [is_enforced] * 3


@pytest.mark.parametrize(
    ("account", "expected"),
    [
        ("", [[("dataset read key", "data-1", False), ("dataset write key", "data-1", True)]]),
        ("data-1", [[("dataset read key", "data-1", False), ("dataset write key", "data-1", True)]]),
        ("data-9", [[("dataset read key", "data-1", False)], [("dataset write key", "data-9", True)]]),
    ],
)
def test_the_datasets_write_key_belongs_to_its_bucket(account: str, expected: Any) -> None:
    environment = {
        "R2_DATASET_ACCOUNT_ID": account,
        "R2_DATASET_WRITE_ACCESS_KEY_ID": "id",
        "R2_DATASET_WRITE_SECRET_ACCESS_KEY": "hush",
    }
    assert keys_of(neuron(), environment)[1:] == expected
