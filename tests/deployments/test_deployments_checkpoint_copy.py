"""`templar model fetch` and `templar network init` from `s3://BUCKET/FOLDER`: a copied checkpoint on real storage."""

import json
from pathlib import Path
from uuid import uuid4

import pytest

from deployments import model, network
from deployments.s3_endpoint import create_bucket_with_keys
from templar.agreement.checkpoint import MANIFEST_FILE
from templar.agreement.model_folder import CONFIG_FILE, read_weights
from templar.agreement.state import genesis_root, parameters_digest
from templar.errors import Reason
from templar.exchange.object_keys import Kind, ObjectKey
from templar.housekeeping.maintenance import publish_newest_checkpoint
from templar.training.model import WEIGHTS_FILE
from tests.support.audited import VALIDATOR, run_alone
from tests.support.commands import write_env
from tests.support.prepared import PreparedNetwork
from tests.support.servers import store_at

BUCKET, FOLDER = "copies", "the/checkpoint"
COPY = f"s3://{BUCKET}/{FOLDER}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network that has published checkpoints of its genesis and of its second window."""
    trained = PreparedNetwork(tmp_path_factory.mktemp("trained"), deciding="validator")
    run_alone(trained, 2)
    publish_newest_checkpoint(trained.at("validator", trained.first_window + 2).config("validator"), preset="test")
    return trained


@pytest.fixture(scope="module")
def bucket(moto):
    return create_bucket_with_keys(moto.admin, f"{BUCKET}-{uuid4().hex[:8]}")


@pytest.fixture
def copies(moto, bucket):
    """The bucket, with a key that writes; no test leaves anything there."""
    store = store_at(moto.admin.endpoint_url, bucket.bucket, bucket.write)
    yield store
    store.delete([info.key for info in store.list()])


@pytest.fixture
def source(trained, copies):
    """Copies the checkpoint of a window, by default of the newest one; the address of the copy."""

    def copy(window=None):
        at = trained.first_window + 1 if window is None else window
        owner, uid = ("validator", VALIDATOR) if window is None else ("aggregator", 1)
        folder = trained.bucket(owner) / str(ObjectKey(Kind.CHECKPOINT, at, uid))
        for path in folder.iterdir():
            copies.put_file(f"{FOLDER}/{path.name}", path)
        return f"s3://{copies.name}/{FOLDER}"

    return copy


@pytest.fixture
def keys(moto, bucket):
    return {
        "R2_MODEL_ENDPOINT": moto.admin.endpoint_url,
        "R2_MODEL_READ_ACCESS_KEY_ID": bucket.read.access_key_id,
        "R2_MODEL_READ_SECRET_ACCESS_KEY": bucket.read.secret_access_key,
    }


@pytest.fixture
def fetch(trained, tmp_path, run_main, keys):
    """`templar model fetch` as a reader of a network, by default of the trained one; status, output and errors."""

    def call(*options, of=trained, **changes):
        block = of.at("lazy", of.first_window + 3)
        public = dict(line.split("=", 1) for line in of.plan.network_env.read_text().splitlines())
        public |= {"NETWORK": block.subnet.network, "TEMPLAR_HOME": str(tmp_path / "home")} | keys | changes
        return run_main(model.main, "fetch", "--env-file", write_env(tmp_path / "reader.env", public), *options)

    return call


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A subnet of another network's members, with the preset of the first."""
    return PreparedNetwork(tmp_path_factory.mktemp("other"), training={"outer_learning_rate": 0.5})


@pytest.fixture
def init(other, tmp_path, run_main, keys):
    def call(*options, **changes):
        other.forget("aggregator")
        values = other.environment("aggregator") | {"TEMPLAR_HOME": str(tmp_path / "founder")} | keys | changes
        return run_main(network.main, "--env-file", write_env(tmp_path / "founder.env", values), "--dry-run", *options)

    return call


def test_a_copy_of_a_proven_state_is_fetched_and_a_second_call_finds_it(trained, source, copies, fetch):
    copy, window = source(), trained.first_window + 1
    status, out, err = fetch("--from", copy)
    assert (status, f"model of window {window}, 0 outer steps, root " in err) == (0, True)
    kept = Path(out.strip())
    data = copies.get(f"{FOLDER}/{WEIGHTS_FILE}", max_bytes=1 << 24)
    assert (kept / WEIGHTS_FILE).read_bytes() == data
    copies.delete([f"{FOLDER}/{WEIGHTS_FILE}"])
    assert fetch("--from", copy)[:2] == (0, out)


def test_so_is_that_of_the_genesis(trained, source, fetch):
    status, _, err = fetch("--from", source(trained.first_window - 1))
    assert (status, f"model of window {trained.first_window - 1}, " in err) == (0, True), err


def test_a_network_begins_with_a_copy(trained, source, copies, init, tmp_path):
    status, out, err = init("--json", "--from", f"{source()}/")
    assert (status, err) == (0, "")
    (tmp_path / WEIGHTS_FILE).write_bytes(copies.get(f"{FOLDER}/{WEIGHTS_FILE}", max_bytes=1 << 24))
    weights = read_weights(tmp_path, trained.hparams.model)
    assert json.loads(out)["root"] == genesis_root(1, parameters_digest(weights))


def flipped(store, name):
    key = f"{FOLDER}/{name}"
    data = bytearray(store.get(key, max_bytes=1 << 24))
    data[-9] = ord("1") if data[-9] == ord("0") else ord("0")  # a signature stays made of hexadecimal digits
    store.put(key, bytes(data))


@pytest.mark.parametrize("file", [WEIGHTS_FILE, "tokenizer.json", CONFIG_FILE, MANIFEST_FILE])
def test_a_damaged_file_is_refused_with_bucket_key_and_remedy(source, copies, init, fetch, file):
    """The configuration of a copy is not read to fetch the model: it is written anew."""
    copy = source()
    flipped(copies, file)
    for call in (init, fetch) if file != CONFIG_FILE else (init,):
        status, out, err = call("--from", copy)
        assert (status > 0, out) == (True, "")
        said = err.splitlines()[-1]
        assert said.startswith((f"[{Reason.CHECKPOINT_BROKEN}] {copy}", f"[{Reason.BAD_SIGNATURE}] {copy}")), said
        assert file in said
        assert said.endswith("copy the file again")


def test_a_copy_without_a_file_or_a_manifest_is_refused(source, copies, init, fetch):
    copy = source()
    copies.delete([f"{FOLDER}/{WEIGHTS_FILE}"])
    status, _, err = fetch("--from", copy)
    assert (status, f"[{Reason.CHECKPOINT_BROKEN}] {copy}: {FOLDER}/{WEIGHTS_FILE}: " in err) == (2, True), err
    copies.delete([f"{FOLDER}/{MANIFEST_FILE}"])
    for call in (init, fetch):
        status, _, err = call("--from", copy)
        said = err.splitlines()[-1]
        assert said.startswith(f"[{Reason.OBJECT_MISSING}] {copy}: there is no {MANIFEST_FILE}: name the folder")


def test_a_checkpoint_of_another_network_is_no_model_of_this_one(source, fetch, other, tmp_path):
    status, _, err = fetch("--from", source(), of=PreparedNetwork(tmp_path, training={"outer_learning_rate": 0.4}))
    assert (status, f"[{Reason.WRONG_NETWORK}] " in err, "name one of this network" in err) == (2, True, True)


def test_a_state_that_no_quorum_proved_is_refused(trained, source, fetch, monkeypatch):
    monkeypatch.setattr("templar.agreement.proven_state.proven_state", lambda *_: None)
    status, _, err = fetch("--from", source())
    assert (status, f"[{Reason.ROOT_DIFFERS}] no quorum of stake proves a state of window" in err) == (2, True)
    monkeypatch.setattr("templar.agreement.proven_state.proven_state", lambda *_: ("f" * 64, 0))
    status, _, err = fetch("--from", source())
    assert (status, "and a quorum proved ffffffffffff; name another checkpoint" in err) == (2, True)


@pytest.mark.parametrize(
    ("address", "changes", "words"),
    [
        ("s3://copies", {}, "[bad_parameters] --from s3://copies: write s3://BUCKET/FOLDER"),
        ("s3://copies/a/../b", {}, "[bad_parameters] --from s3://copies/a/../b: write s3://BUCKET/FOLDER"),
        (COPY, {"R2_MODEL_READ_SECRET_ACCESS_KEY": ""}, "[bad_environment] R2_MODEL_READ_SECRET_ACCESS_KEY is missing"),
        (
            COPY,
            {"R2_MODEL_ENDPOINT": "", "R2_MODEL_REGION": "x"},
            "[bad_environment] R2_MODEL_REGION is set, and R2_MODEL",
        ),
        ("s3://nobody/folder", {}, "[access_denied] "),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_remedy(init, fetch, address, changes, words):
    for call in (init, fetch):
        status, out, err = call("--from", address, **changes)
        assert (status > 0, out) == (True, "")
        said = err.splitlines()[-1]
        assert words in said
        assert address.removeprefix("s3://").partition("/")[0] in said or "R2_MODEL" in said


def test_a_folder_has_one_window(source, fetch):
    status, _, err = fetch("--from", source(), "--window", "3")
    assert (status, "[bad_parameters] --window, --from: " in err) == (2, True)
