"""Blocks of storage: which store an address opens, and with which key."""

import hashlib

import pytest
from pydantic import SecretStr, ValidationError

from blocks import BucketCredentials, Dataset, DatasetBucket, NeuronBucket, StorageEndpoint
from templar.data.assignment import Assignment
from templar.data.dataset import PagedTraining
from templar.data.shards.shard_writer import build_shards
from templar.data.tokenizer import load_tokenizer
from templar.datasets.page_writer import upload_dataset
from templar.errors import PermanentError, Reason, TransientError
from templar.hparams import load_hparams
from templar.store.address import BucketAddress
from templar.store.directory import DirectoryStore
from templar.store.s3 import S3Store
from tests.support.datasets import PREFIX, numbered_documents, small_dataset
from tests.support.errors import raising
from tests.support.neuron_block import key
from tests.support.scripted_server import Reply, scripted_server

READ, WRITE = key("read"), key("write")
ACCOUNT = "0123456789abcdef0123456789abcdef"
HPARAMS = load_hparams("simulation", overrides={"data": {"rows_per_page": 4, "sequence_length": 16}})


def directory_endpoint(root):
    return StorageEndpoint(url=root.as_uri())


class TestEndpoint:
    def test_r2_has_an_endpoint_per_account(self):
        store = StorageEndpoint().open("bucket", ACCOUNT, READ, writable=False)
        assert isinstance(store, S3Store)
        assert repr(store) == f"S3Store('bucket', endpoint_url='https://{ACCOUNT}.r2.cloudflarestorage.com')"

    def test_another_endpoint_is_asked_with_the_key_and_never_told_the_secret(self):
        head = Reply(headers={"Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"})
        with scripted_server(lambda request: head if request.method == "HEAD" else Reply(status=503)) as server:
            endpoint = StorageEndpoint(url=server.endpoint_url, read_timeout_seconds=1.5, max_attempts=2)
            store = endpoint.open("bucket", ACCOUNT, READ, writable=False)
            assert isinstance(store, S3Store)
            assert store._settings.read_timeout_seconds == 1.5
            assert store.head("key") is not None
            with pytest.raises(TransientError, match="store_busy"):
                store.get("key", max_bytes=1)
            store.close()
        assert [request.method for request in server.requests] == ["HEAD", "GET", "GET"]
        assert server.requests[0].path == "/bucket/key"
        assert "Credential=id-read/" in server.requests[0].headers["Authorization"]
        assert "hush" not in str(server.requests)

    def test_a_folder_keeps_buckets_as_folders(self, tmp_path):
        root = tmp_path / "with space"
        (root / "some-account").mkdir(parents=True)
        endpoint = directory_endpoint(root)
        writer = endpoint.open("some-account", ACCOUNT, READ, writable=True)
        assert isinstance(writer, DirectoryStore)
        writer.put("key", b"1")
        assert (root / "some-account" / "key").read_bytes() == b"1"
        committed = endpoint.open_reader(BucketAddress("some-account", "ID", "SECRET"))
        for reader in (endpoint.open("some-account", ACCOUNT, READ, writable=False), committed):
            assert reader.get("key", max_bytes=1) == b"1"
            with raising(PermanentError, Reason.ACCESS_DENIED):
                reader.put("key", b"2")  # type: ignore[attr-defined]

    def test_a_malformed_endpoint_is_refused(self):
        for url in ("127.0.0.1:9000", "s3://KEY:hush@bucket", "http://", "file://folder"):
            with pytest.raises(ValidationError, match="must be r2, ") as caught:
                StorageEndpoint(url=url)
            assert "hush" not in caught.value.errors()[0]["msg"]


class TestNeuronBucket:
    def test_it_is_written_with_one_key_and_announced_with_the_other(self):
        etag = hashlib.md5(b"1", usedforsecurity=False).hexdigest()
        with scripted_server(lambda _: Reply(headers={"ETag": f'"{etag}"'})) as server:
            bucket = NeuronBucket(
                endpoint=StorageEndpoint(url=server.endpoint_url), account_id=ACCOUNT, read=READ, write=WRITE
            ).open()
            bucket.store.put("key", b"1")
            bucket.store.close()
        assert bucket.address == BucketAddress(ACCOUNT, "id-read", "hush-read")
        (request,) = server.requests
        assert request.path == f"/{ACCOUNT}/key"
        assert "Credential=id-write/" in request.headers["Authorization"]

    def test_a_read_key_that_fits_no_commitment_is_refused(self):
        long = BucketCredentials(access_key_id="K" * 33, secret_access_key=SecretStr("s"))
        bucket = NeuronBucket(endpoint=StorageEndpoint(), account_id=ACCOUNT, read=long, write=WRITE)
        with raising(PermanentError, Reason.COMMITMENT_MALFORMED, "access_key_id"):
            bucket.open()


class TestDataset:
    @pytest.fixture
    def root(self, tmp_path):
        """Two buckets with the same dataset."""
        for name in ("data-one", "data-two"):
            (tmp_path / name).mkdir()
            small_dataset(tmp_path / f"built-{name}", DirectoryStore(tmp_path / name))
        return tmp_path

    def dataset(self, root, *names):
        buckets = [DatasetBucket(account_id=name, bucket=name, read=READ) for name in names]
        return Dataset(endpoint=directory_endpoint(root), buckets=buckets, prefix=PREFIX)

    def pages(self, root):
        training = self.dataset(root, "data-one", "data-two").open(HPARAMS, root / "home")
        assert isinstance(training, PagedTraining)
        return training.pages

    def test_every_bucket_is_read_from_and_held_out_text_is_another(self, root):
        dataset = self.dataset(root, "data-one")
        tokenizer = load_tokenizer("embedded", embedded=dataset.open(HPARAMS, root / "home").tokenizer_json())
        held_out = dataset.held_out(HPARAMS, root / "home", tokenizer, 2)
        assert held_out.shape == (2, 16)
        assert "document" in tokenizer.decode(held_out[0])
        texts = dataset.held_out_texts(HPARAMS, root / "home", tokenizer, 3)
        assert len(texts) == 3
        assert tokenizer.decode(held_out[0]).startswith(texts[0][:20])
        with raising(PermanentError, Reason.DATASET_MISSING, "elsewhere"):
            dataset.model_copy(update={"prefix": "elsewhere"}).open(HPARAMS, root / "home")
        pages = self.pages(root)
        assert pages.num_pages > 2
        assert {page.config for page in pages.read_pages(range(pages.num_pages))} == {"alpha", "beta"}
        for file in root.glob("data-*/**/*.parquet"):
            file.unlink()
        with pytest.raises(PermanentError, match="is not in data-one, data-two"):
            self.pages(root).read_page(0)

    def test_shards_are_read_like_pages(self, root):
        documents = numbered_documents("alpha", num_documents=10, num_lines=13)
        build_shards(documents, root / "shards", vocab_size=300, sequence_length=16, samples_per_shard=20)
        upload_dataset(root / "shards", DirectoryStore(root / "data-two"), "shards")
        buckets = [DatasetBucket(account_id="data-two", bucket="data-two", read=READ)]
        dataset = Dataset(endpoint=directory_endpoint(root), buckets=buckets, prefix="shards")
        hparams = load_hparams("simulation-shards", overrides={"data": {"sequence_length": 16}})
        training = dataset.open(hparams, root / "home")
        tokenizer = load_tokenizer("embedded", embedded=training.tokenizer_json())
        training.check(tokenizer)
        sequences = training.read(0, Assignment(1, 3, (1, 0), "ab" * 32), tokenizer).sequences
        held_out = dataset.held_out(hparams, root / "home", tokenizer, 4)
        assert (sequences.shape, held_out.shape) == ((8, 16), (4, 16))
        for each in (sequences, held_out):
            assert "alpha document" in tokenizer.decode(each.reshape(-1))
        texts = dataset.held_out_texts(hparams, root / "home", tokenizer, 4)
        assert len(texts) == 4
        assert tokenizer.decode(held_out[0]).startswith(texts[0])
        assert dataset.shards(hparams, root / "home", hparams.data).num_shards > 1
