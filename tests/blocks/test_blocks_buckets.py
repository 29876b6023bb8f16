"""Which bucket a clean-up is about, and which keys a check is about."""

import pytest

from blocks import Dataset, DatasetBucket, StorageEndpoint
from blocks.buckets import BucketRequest, credentials_of, names_page, open_for_reading, open_target, page_bucket
from templar.errors import PermanentError, Reason
from templar.store.s3 import S3Store
from tests.support.errors import raising
from tests.support.neuron_block import key, neuron_block

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


def opened(request, block=None, **changes):
    """The bucket, and the id of the key that opens it."""
    target = open_target(block or neuron_block(), request, ENVIRONMENT | changes)
    assert isinstance(target.store, S3Store)
    return target.store.name, target.store._access_key_id


def test_each_bucket_is_opened_with_the_key_that_writes_it():
    assert opened(BucketRequest()) == ("own-account", "id-write")
    for choice in ("gradients", "aggregator", "dataset"):
        assert opened(BucketRequest(choice)) == (f"{choice}-bucket", f"{choice}-key")
    assert opened(BucketRequest("gradients"), R2_GRADIENTS_BUCKET_NAME="")[0] == "gradients-account"
    listed = {"R2_DATASET_ACCOUNT_ID": "", "R2_DATASET_BUCKET_NAME": ""}  # the neuron's list of buckets alone
    assert opened(BucketRequest("dataset"), **listed) == ("data-1", "dataset-key")
    assert open_target(neuron_block(), BucketRequest(), {}).is_own
    assert not open_target(neuron_block(), BucketRequest("gradients"), ENVIRONMENT).is_own


def test_missing_and_malformed_variables_are_named_without_a_secret():
    prefix = "R2_AGGREGATOR"
    with raising(
        PermanentError,
        Reason.BAD_ENVIRONMENT,
        f"{prefix}_ACCOUNT_ID is missing; {prefix}_WRITE_ACCESS_KEY_ID is missing",
    ) as caught:
        opened(BucketRequest("aggregator"), **{f"{prefix}_ACCOUNT_ID": "", f"{prefix}_WRITE_ACCESS_KEY_ID": ""})
    assert "hush" not in str(caught.value)
    with pytest.raises(PermanentError, match="R2_GRADIENTS_ACCOUNT_ID is not 3 to 32"):
        opened(BucketRequest("gradients"), R2_GRADIENTS_ACCOUNT_ID="../x")
    with pytest.raises(PermanentError, match="R2_DATASET_WRITE_SECRET_ACCESS_KEY is missing"):
        credentials_of(neuron_block(), {"R2_DATASET_WRITE_ACCESS_KEY_ID": "id"})


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (BucketRequest("account", account="some-account"), "account, credentials: "),
        (BucketRequest("neuron", account="some-account"), "account, bucket_name: bucket 'neuron' does not take them"),
    ],
)
def test_a_request_with_missing_or_superfluous_parameters_is_refused(request_, word):
    with raising(PermanentError, Reason.BAD_PARAMETERS, word):
        opened(request_)


def test_the_dataset_in_the_neurons_bucket_is_kept_unless_it_is_chosen():
    block = neuron_block(places=("data-1", "own-account"))
    assert open_target(block, BucketRequest(), {}).kept_prefixes == ("text/",)
    assert open_target(neuron_block(), BucketRequest(), {}).kept_prefixes == ()
    same = ENVIRONMENT | {"R2_DATASET_ACCOUNT_ID": "own-account", "R2_DATASET_BUCKET_NAME": "own-account"}
    assert open_target(block, BucketRequest("dataset"), same).kept_prefixes == ()
    assert open_target(block, BucketRequest("gradients"), ENVIRONMENT).kept_prefixes == ()


@pytest.mark.parametrize(("prefix", "kept"), [("/text", "text/"), ("/a/b//", "a/b/"), ("/", "")])
def test_slashes_around_the_datasets_folder_are_ignored(prefix, kept):
    block = neuron_block(places=("own-account",), prefix=prefix)
    assert open_target(block, BucketRequest(), {}).kept_prefixes == (kept,)
    (found,) = [each for bucket in credentials_of(block, {}) for each in bucket if each.name == "dataset read key"]
    assert found.folder == kept


@pytest.mark.parametrize(("url", "kept"), [("http://127.0.0.1:9000", ("text/",)), ("r2", ())])
def test_only_r2_tells_buckets_apart_by_account(url, kept):
    block = neuron_block(url)
    place = DatasetBucket(account_id="another", bucket="own-account", read=key("another"))
    dataset = Dataset(endpoint=block.dataset.endpoint, buckets=[place], prefix="text")  # type: ignore[arg-type]
    block = block.model_copy(update={"dataset": dataset})
    assert open_target(block, BucketRequest(), {}).kept_prefixes == kept
    alias = dataset.model_copy(update={"endpoint": StorageEndpoint(url="http://127.0.0.1:9000/")})
    assert open_target(block.model_copy(update={"dataset": alias}), BucketRequest(), {}).kept_prefixes == ("text/",)


def test_a_saved_key_opens_an_account_and_replaces_the_own_one(prefect_api):
    del prefect_api
    key("saved").save("cleaner", overwrite=True)
    assert opened(BucketRequest("account", "some-account", credentials="cleaner")) == ("some-account", "id-saved")
    request = BucketRequest("account", "some-account", "some-bucket", "cleaner")
    assert opened(request) == ("some-bucket", "id-saved")
    for choice in ("neuron", "gradients", "dataset"):
        assert opened(BucketRequest(choice, credentials="cleaner"))[1] == "id-saved"  # type: ignore[arg-type]
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, "bucket-credentials block 'nobodys': there is none"):
        opened(BucketRequest(credentials="nobodys"))


PAGE = {
    "R2_PAGE_ACCOUNT_ID": "page-account",
    "R2_PAGE_BUCKET_NAME": "page-bucket",
    "R2_PAGE_WRITE_ACCESS_KEY_ID": "page-key",
    "R2_PAGE_WRITE_SECRET_ACCESS_KEY": "hush",
}


def test_the_page_has_a_bucket_of_its_own_where_one_is_named():
    assert opened(BucketRequest("page"), **PAGE) == ("page-bucket", "page-key")
    assert open_for_reading("page", {**PAGE, "TEMPLAR_STORAGE": "http://127.0.0.1:9000"}).name == "page-bucket"
    assert names_page(PAGE)
    assert not names_page({**dict.fromkeys(PAGE, " "), "R2_GRADIENTS_ACCOUNT_ID": "mine"})
    network, other = StorageEndpoint(url="http://127.0.0.1:9000"), "https://pages.example.com"
    for more, url in (({}, network.url), ({"R2_PAGE_ENDPOINT": other}, other)):
        store = page_bucket(network, PAGE | more)
        assert isinstance(store, S3Store)
        assert store._endpoint_url == url


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"R2_PAGE_BUCKET_NAME": ""}, "R2_PAGE_BUCKET_NAME is missing: set them in the environment or in .env"),
        ({"R2_PAGE_WRITE_SECRET_ACCESS_KEY": ""}, "R2_PAGE_WRITE_SECRET_ACCESS_KEY is missing"),
        ({"R2_PAGE_ACCOUNT_ID": "../x"}, "R2_PAGE_ACCOUNT_ID is not 3 to 32"),
        ({"R2_PAGE_REGION": "eu"}, "R2_PAGE_REGION is set, and R2_PAGE_ENDPOINT is not"),
    ],
)
def test_a_page_that_is_half_named_is_refused(changes, problem):
    for work in (
        lambda environment: page_bucket(neuron_block().bucket.endpoint, environment),
        lambda environment: open_target(neuron_block(), BucketRequest("page"), environment),
        lambda environment: credentials_of(neuron_block(), environment),
    ):
        with raising(PermanentError, Reason.BAD_ENVIRONMENT, problem) as caught:
            work(PAGE | changes)
        assert "hush" not in caught.value.message


# Keys to check.


def keys_of(block, environment):
    return [
        [(each.name, each.store.name, each.writes) for each in bucket] for bucket in credentials_of(block, environment)
    ]


def test_a_neurons_own_keys_and_that_of_its_dataset(tmp_path):
    dataset = keys_of(neuron_block(places=("data-1", "data-2")), {})[1:]
    assert dataset == [[("dataset read key 1", "data-1", False)], [("dataset read key 2", "data-2", False)]]
    assert keys_of(neuron_block(), {}) == [
        [("own read key", "own-account", False), ("own write key", "own-account", True)],
        [("dataset read key", "data-1", False)],
    ]
    for url, is_enforced in (("http://127.0.0.1:9000", True), (tmp_path.as_uri(), False)):
        found = [each.enforced for bucket in credentials_of(neuron_block(url), {}) for each in bucket]
        assert found == [is_enforced] * 3


def test_the_pages_key_is_checked_apart_from_the_others():
    assert keys_of(neuron_block(), PAGE)[2:] == [[("page write key", "page-bucket", True)]]


@pytest.mark.parametrize(
    ("account", "expected"),
    [
        ("data-1", [[("dataset read key", "data-1", False), ("dataset write key", "data-1", True)]]),
        ("data-9", [[("dataset read key", "data-1", False)], [("dataset write key", "data-9", True)]]),
    ],
)
def test_the_datasets_write_key_belongs_to_its_bucket(account, expected):
    environment = {
        "R2_DATASET_ACCOUNT_ID": account,
        "R2_DATASET_WRITE_ACCESS_KEY_ID": "id",
        "R2_DATASET_WRITE_SECRET_ACCESS_KEY": "hush",
    }
    assert keys_of(neuron_block(), environment)[1:] == expected
