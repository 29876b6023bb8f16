"""`templar access`, and the check that comes before a registration."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pydantic import SecretStr

from blocks import BucketCredentials, Neuron, NeuronBucket, StorageEndpoint
from deployments import check_access
from deployments.register import require_reachable
from deployments.s3_endpoint import AccessKey, BucketKeys, create_bucket_with_keys
from templar.errors import PermanentError, Reason
from tests.support.commands import Call, write_env
from tests.support.errors import raising
from tests.support.prepared import PreparedNetwork
from tests.support.servers import MotoEndpoint, store_at

ACCOUNT = uuid4().hex


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> PreparedNetwork:
    return PreparedNetwork(tmp_path_factory.mktemp("access"))


@pytest.fixture(scope="module")
def keys(moto: MotoEndpoint) -> BucketKeys:
    return create_bucket_with_keys(moto.admin, ACCOUNT)


@pytest.fixture
def call(tmp_path: Path, run_main: Any) -> Call:
    """Calls the command with these variables."""
    return lambda variables: run_main(check_access.main, "--env-file", write_env(tmp_path / ".env", variables))


def environment(network: PreparedNetwork, moto: MotoEndpoint, read: AccessKey, write: AccessKey) -> dict[str, str]:
    """A miner's environment whose buckets are on the endpoint; the dataset is in its own."""
    values = network.environment("lazy") | {
        "TEMPLAR_STORAGE": moto.admin.endpoint_url,
        "R2_GRADIENTS_ACCOUNT_ID": ACCOUNT,
        "R2_GRADIENTS_BUCKET_NAME": ACCOUNT,
        "R2_DATASET_ACCOUNT_ID": ACCOUNT,
        "R2_DATASET_BUCKET_NAME": ACCOUNT,
    }
    for name, key in (("GRADIENTS_READ", read), ("GRADIENTS_WRITE", write), ("DATASET_READ", read)):
        values[f"R2_{name}_ACCESS_KEY_ID"] = key.access_key_id
        values[f"R2_{name}_SECRET_ACCESS_KEY"] = key.secret_access_key
    return values


def objects(moto: MotoEndpoint, keys: BucketKeys) -> list[str]:
    return [info.key for info in store_at(moto.admin.endpoint_url, keys.bucket, keys.write).list()]


def test_the_right_keys_are_right(network: PreparedNetwork, moto: MotoEndpoint, keys: BucketKeys, call: Call) -> None:
    status, out, err = call(environment(network, moto, keys.read, keys.write))
    assert (status, err) == (0, "")
    assert "3 keys are as they should be" in out
    assert objects(moto, keys) == []


def test_a_read_key_that_writes_is_told_and_no_secret_with_it(
    network: PreparedNetwork, moto: MotoEndpoint, keys: BucketKeys, call: Call
) -> None:
    status, out, err = call(environment(network, moto, keys.write, keys.write))
    assert (status, err) == (1, "")
    assert f"[read_key_writes] bucket {ACCOUNT}, own read key: put: is allowed" in out
    assert keys.write.secret_access_key not in out
    assert objects(moto, keys) == []


def with_keys(network: PreparedNetwork, moto: MotoEndpoint, read: AccessKey, write: AccessKey) -> Neuron:
    """The network's lazy miner, with a bucket on the endpoint."""

    def block(key: AccessKey) -> BucketCredentials:
        return BucketCredentials(access_key_id=key.access_key_id, secret_access_key=SecretStr(key.secret_access_key))

    endpoint = StorageEndpoint(url=moto.admin.endpoint_url)
    bucket = NeuronBucket(endpoint=endpoint, account_id=ACCOUNT, read=block(read), write=block(write))
    return network.block("lazy").model_copy(update={"bucket": bucket})


class TestBeforeRegistration:
    def test_the_right_keys_pass(self, network: PreparedNetwork, moto: MotoEndpoint, keys: BucketKeys) -> None:
        require_reachable(with_keys(network, moto, keys.read, keys.write))
        assert objects(moto, keys) == []

    @pytest.mark.parametrize(
        ("both", "reason"), [("write", Reason.READ_KEY_WRITES), ("read", Reason.WRITE_KEY_REFUSED)]
    )
    def test_wrong_keys_are_refused_before_one_is_published(
        self, network: PreparedNetwork, moto: MotoEndpoint, keys: BucketKeys, both: str, reason: Reason
    ) -> None:
        with raising(PermanentError, reason, "R2_GRADIENTS_READ_*, R2_GRADIENTS_WRITE_*: bucket ") as caught:
            require_reachable(with_keys(network, moto, getattr(keys, both), getattr(keys, both)))
        assert keys.write.secret_access_key not in str(caught.value)
        assert objects(moto, keys) == []
