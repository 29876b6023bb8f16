"""What Prefect expects of every block, and what this project adds: no secret is ever shown."""

import json
import subprocess
import sys
from typing import Any

import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites import BlockStandardTestSuite

import blocks
from blocks import Neuron
from tests.support.neuron_block import neuron_block
from tests.support.servers import REPOSITORY

BLOCKS: list[type[Block]] = [getattr(blocks, name) for name in blocks.__all__]
MARKS = ("block_type_slug", "_block_document_id", "_block_document_name", "_is_anonymous")
HEAVY = ("torch", "boto3", "pyarrow", "bittensor", "transformers")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
class TestStandards(BlockStandardTestSuite):
    test_has_a_valid_image = None  # logos come from the network

    @pytest.fixture
    def block(self, block):
        return block


def test_loading_blocks_and_worker_loads_nothing_heavy():
    code = f"import sys, blocks, deployments.worker; print([name for name in {HEAVY} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_schema_of_a_block_class_is_generated_once():
    schemas = [block.model_json_schema() for block in BLOCKS]
    assert [schema["title"] for schema in schemas] == [block.__name__ for block in BLOCKS]
    assert all(block.model_json_schema() is schema for block, schema in zip(BLOCKS, schemas, strict=True))


def neuron():
    return neuron_block(
        places=("data-0", "data-1"), role="validator", hparams_path="/srv/hparams.json", genesis="ab" * 32
    )


def load(name):
    loaded = Neuron.load(name)
    assert isinstance(loaded, Neuron)
    return loaded


def everything(block):
    """All that a neuron is made of, secrets in clear, without the marks of blocks that were loaded."""

    def bare(value):
        if isinstance(value, dict):
            return {key: bare(item) for key, item in value.items() if key not in MARKS}
        return [bare(item) for item in value] if isinstance(value, list) else value

    return bare(block.model_dump(mode="json", context={"include_secrets": True}))


def test_no_secret_is_shown():
    assert not any("hush" in shown for shown in (repr(neuron()), str(neuron()), neuron().model_dump_json()))


def documents_called(client, kind, name):
    documents: list[dict[str, Any]] = client.request("POST", "/block_documents/filter", json={}).json()
    return [each for each in documents if (each["block_type"]["slug"], each["name"]) == (kind, name)]


@pytest.mark.usefixtures("prefect_api")
class TestOnTheServer:
    def test_a_server_of_this_environment_knows_every_block(self, prefect_server):
        names = {block.get_block_type_slug(): block.get_block_type_name() for block in BLOCKS}
        assert names["bucket-credentials"] == "Bucket Credentials"
        assert set(names) == {
            *("bucket-credentials", "dataset", "dataset-bucket", "neuron", "neuron-bucket"),
            *("storage-endpoint", "subnet", "wallet"),
        }
        with prefect_server.client() as client:
            for block in BLOCKS:
                known = client.read_block_type_by_slug(block.get_block_type_slug())
                assert known.name == names[known.slug]
                assert known.description == block.get_description()

    def test_a_neuron_refers_to_its_parts_and_can_be_changed_on_the_server(self, prefect_server):
        """The UI shows an inlined block as `None`, and does not save a document that has one."""
        for _ in range(2):
            neuron().save_with_parts("whole")
        with prefect_server.client() as client:
            (document,) = documents_called(client, "neuron", "whole")
            parts = document["block_document_references"]
            assert {part: reference["block_document"]["name"] for part, reference in parts.items()} == {
                part: f"whole-{part}" for part in ("subnet", "wallet", "bucket", "dataset")
            }
            (bucket,) = documents_called(client, "neuron-bucket", "whole-bucket")
            assert set(bucket["block_document_references"]) == {"endpoint", "read", "write"}

            # As the UI saves it: references for its parts, all other fields as they were shown, one of them changed.
            references = {
                part: {"$ref": {"block_document_id": reference["block_document"]["id"]}}
                for part, reference in parts.items()
            }
            changed = {"block_schema_id": document["block_schema_id"], "data": document["data"] | references}
            changed["data"]["home"] = "/srv/moved"
            client.request("PATCH", f"/block_documents/{document['id']}", json=changed | {"merge_existing_data": False})
        assert everything(load("whole")) == everything(neuron().model_copy(update={"home": "/srv/moved"}))

    def test_a_loaded_neuron_can_be_saved_again_and_under_another_name(self):
        neuron().save_with_parts("first")
        loaded = load("first")
        other = loaded.model_copy(update={"subnet": loaded.subnet.model_copy(update={"netuid": 77})})
        for _ in range(2):
            other.save_with_parts("second")
        again = load("first")
        assert everything(again) == everything(neuron())
        assert json.dumps(everything(again)).count("hush-") == 4
        assert load("second").subnet.netuid == 77
        again.save("first", overwrite=True)
        assert everything(load("first")) == everything(neuron())

    def test_the_server_shows_no_secret_unless_it_is_asked_for_one(self, prefect_server):
        block = neuron()
        block.save("shown", overwrite=True)
        block.dataset.save("shown", overwrite=True)
        block.bucket.save("shown", overwrite=True)
        block.dataset.buckets.get_secret_value()[0].save("shown", overwrite=True)
        with prefect_server.client() as client:
            documents = client.request("POST", "/block_documents/filter", json={}).json()
            assert {document["block_type"]["slug"] for document in documents if document["name"] == "shown"} == {
                "neuron",
                "neuron-bucket",
                "dataset",
                "dataset-bucket",
            }
            assert "hush" not in json.dumps(documents)
            full = client.request("POST", "/block_documents/filter", json={"include_secrets": True}).json()
        assert "hush-data-1" in json.dumps(full)
