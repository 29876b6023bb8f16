"""The environment of a neuron: what is wrong with it is said by name, all at once, and without a secret."""

import json
import os
import re
from pathlib import Path

import pytest
from dotenv import dotenv_values

from blocks import Neuron
from blocks.chain import PASSWORD, PASSWORD_FILE
from blocks.environment import (
    BUCKET_LIST,
    DATASET_VARIABLES,
    PAGE_VARIABLES,
    STORAGE_VARIABLES,
    SUCCESSORS,
    neuron_from_environment,
    upload_from_environment,
)
from templar.chain.hotkey import Password
from templar.errors import PermanentError, Reason
from templar.hparams import PRODUCTION_TRAINER, TrainerSettings
from tests.support.errors import raising
from tests.support.servers import REPOSITORY

ACCOUNT = "0123456789abcdef0123456789abcdef"
GOOD = {
    "NETWORK": "ledger:/srv/ledger.sqlite",
    "NETUID": "3",
    "WALLET_PATH": "/srv/wallets",
    "WALLET_NAME": "cold",
    "WALLET_HOTKEY": "hot",
    "TEMPLAR_ROLE": "miner",
    "TEMPLAR_HOME": "/srv/neuron",
    "TEMPLAR_PRESET": "local",
    "TEMPLAR_STORAGE": "http://127.0.0.1:9000",
    "R2_GRADIENTS_ACCOUNT_ID": ACCOUNT,
    "R2_GRADIENTS_BUCKET_NAME": ACCOUNT,
    "R2_GRADIENTS_READ_ACCESS_KEY_ID": "read-id",
    "R2_GRADIENTS_READ_SECRET_ACCESS_KEY": "hush-read",
    "R2_GRADIENTS_WRITE_ACCESS_KEY_ID": "write-id",
    "R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY": "hush-write",
    "R2_DATASET_ACCOUNT_ID": "data-account",
    "R2_DATASET_BUCKET_NAME": "data-bucket",
    "R2_DATASET_READ_ACCESS_KEY_ID": "data-id",
    "R2_DATASET_READ_SECRET_ACCESS_KEY": "hush-data",
    "DATASET_BINS_PATH": "text",
}
TRAINER = {
    "TEMPLAR_DEVICE": "cuda:1",
    "TEMPLAR_THREADS": "6",
    "TEMPLAR_PRECISION": "bfloat16",
    "TEMPLAR_MICRO_BATCH": "4",
    "TEMPLAR_OPTIMIZER": "muon",
    "TEMPLAR_COMPILE": "on",
    "TEMPLAR_CHECKPOINT_LAYERS": "2",
    "TEMPLAR_RANKS": "2",
    "TEMPLAR_HOSTS": "4",
    "TEMPLAR_RENDEZVOUS": "10.0.0.1:29500",
    "TEMPLAR_SHARDING": "sharded",
}
REQUIRED = sorted(
    GOOD.keys()
    - {"NETWORK", "WALLET_PATH", "TEMPLAR_ROLE", "TEMPLAR_HOME", "TEMPLAR_PRESET", "TEMPLAR_STORAGE"}
    - {"R2_GRADIENTS_BUCKET_NAME", "R2_DATASET_BUCKET_NAME", "DATASET_BINS_PATH"}
)


def problems(**changes):
    """The message about an environment that differs from the good one; None leaves a variable out."""
    environment = {name: value for name, value in (GOOD | changes).items() if value is not None}
    with raising(PermanentError, Reason.BAD_ENVIRONMENT) as caught:
        neuron_from_environment(environment)
    message = str(caught.value)
    assert message.endswith("set them in the environment or in .env (see .env.example)")
    assert "hush" not in message
    assert "\n" not in message
    return message


def listed(name, **changes):
    key = {"access_key_id": "id", "secret_access_key": f"hush-{name}"}
    return {"account_id": name, "name": name, "credentials": {"read": key}} | changes


def test_everything_reaches_the_block():
    neuron = neuron_from_environment(GOOD)
    assert (neuron.role, neuron.home, neuron.preset) == ("miner", "/srv/neuron", "local")
    assert (neuron.subnet.network, neuron.subnet.netuid) == ("ledger:/srv/ledger.sqlite", 3)
    assert (neuron.wallet.path, neuron.wallet.name, neuron.wallet.hotkey) == ("/srv/wallets", "cold", "hot")
    assert (neuron.bucket.account_id, neuron.bucket.read.access_key_id) == (ACCOUNT, "read-id")
    assert neuron.bucket.write.secret_access_key.get_secret_value() == "hush-write"
    (bucket,) = neuron.dataset.buckets.get_secret_value()
    assert (bucket.account_id, bucket.bucket, bucket.read.access_key_id) == ("data-account", "data-bucket", "data-id")
    assert neuron.dataset.prefix == "text"
    assert neuron.bucket.endpoint.url == neuron.dataset.endpoint.url == "http://127.0.0.1:9000"


def test_optional_variables_have_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    neuron = neuron_from_environment({name: GOOD[name] for name in REQUIRED})
    assert (neuron.role, neuron.preset, neuron.genesis) == ("miner", "local", "")
    assert neuron.subnet.network == "finney"
    assert neuron.home == str(tmp_path / ".templar")
    assert neuron.hparams_path == str(Path.cwd() / "hparams.json")
    assert neuron.bucket.endpoint.url == "r2"
    assert neuron.dataset.buckets.get_secret_value()[0].bucket == "data-account"


def test_names_and_paths_are_taken_as_they_stand():
    odd = {"WALLET_NAME": "tail ", "WALLET_HOTKEY": " head", "WALLET_PATH": "/srv/a #1 ", "TEMPLAR_HOME": "/srv/b "}
    neuron = neuron_from_environment(GOOD | odd)
    assert (neuron.wallet.name, neuron.wallet.hotkey) == ("tail ", " head")
    assert (neuron.wallet.path, neuron.home) == ("/srv/a #1 ", "/srv/b ")


def test_numbers_and_paths_of_a_host():
    host = {"TEMPLAR_STORAGE_READ_TIMEOUT_SECONDS": "2.5", "TEMPLAR_STORAGE_MAX_ATTEMPTS": "1"}
    neuron = neuron_from_environment(GOOD | host | {"TEMPLAR_HOME": "state/neuron", "TEMPLAR_GENESIS": "ab" * 32})
    endpoint = neuron.bucket.endpoint
    assert (endpoint.read_timeout_seconds, endpoint.max_attempts) == (2.5, 1)
    assert neuron.home == str(Path.cwd() / "state" / "neuron")  # a worker has another folder
    assert neuron.genesis == "ab" * 32


def test_the_dataset_may_be_at_another_vendor():
    there = {
        "R2_DATASET_ENDPOINT": "https://s3.example",
        "R2_DATASET_REGION": "eu-1",
        "R2_DATASET_ADDRESSING": "virtual",
    }
    there |= {"TEMPLAR_STORAGE_MAX_ATTEMPTS": "7"}
    neuron = neuron_from_environment(GOOD | there)
    ours, theirs = neuron.bucket.endpoint, neuron.dataset.endpoint
    assert (ours.url, ours.region, ours.addressing) == ("http://127.0.0.1:9000", "auto", "path")
    assert (theirs.url, theirs.region, theirs.addressing) == ("https://s3.example", "eu-1", "virtual")
    assert theirs.max_attempts == 7
    key = {"R2_DATASET_WRITE_ACCESS_KEY_ID": "id", "R2_DATASET_WRITE_SECRET_ACCESS_KEY": "hush"}
    assert upload_from_environment(GOOD | there | key)[0] == theirs
    assert neuron_from_environment(GOOD).dataset.endpoint == neuron_from_environment(GOOD).bucket.endpoint


def test_variables_of_the_reference_are_named_with_what_has_their_place(caplog):
    neuron_from_environment(GOOD | dict.fromkeys(SUCCESSORS, "hush"))
    named = {name: ours for name, ours in SUCCESSORS.items() if ours not in GOOD}
    assert [record.message for record in caplog.records] == [
        f"{name} is not read: what it was for is {ours} here" for name, ours in named.items()
    ]


def test_the_device_and_how_to_train_on_it():
    assert neuron_from_environment(GOOD).trainer == PRODUCTION_TRAINER
    chosen = neuron_from_environment(GOOD | TRAINER).trainer
    assert chosen == TrainerSettings(
        device="cuda:1",
        threads=6,
        precision="bfloat16",
        micro_batch=4,
        compile_layers=True,
        checkpoint_layers=2,
        optimizer="muon",
        ranks=2,
        hosts=4,
        rendezvous="10.0.0.1:29500",
        sharding="sharded",
        repeatable=False,
        train_ahead=True,
    )
    assert neuron_from_environment(GOOD | {"TEMPLAR_INNER_SNAPSHOT_SECONDS": "90"}).trainer.inner_snapshot_seconds == 90
    exact = {"TEMPLAR_DEVICE": "cpu", "TEMPLAR_THREADS": "1", "TEMPLAR_PRECISION": "float32"}
    exact["TEMPLAR_INNER_SNAPSHOT_SECONDS"] = "0"
    assert neuron_from_environment(GOOD | exact).trainer == TrainerSettings()
    assert neuron_from_environment(GOOD | exact | {"TEMPLAR_RANKS": "2"}).trainer == TrainerSettings(
        ranks=2, repeatable=False, train_ahead=True
    )
    assert not neuron_from_environment(GOOD | {"TEMPLAR_TRAIN_AHEAD": "off"}).trainer.train_ahead
    assert neuron_from_environment(GOOD | {"TEMPLAR_RANKS": "auto"}).trainer.ranks == "auto"
    words = {"TEMPLAR_THREADS": "auto", "TEMPLAR_MICRO_BATCH": "auto", "TEMPLAR_CHECKPOINT_LAYERS": "off"}
    assert neuron_from_environment(GOOD | words).trainer == PRODUCTION_TRAINER.model_copy(
        update={"micro_batch": "auto"}
    )


def test_an_aggregator_has_its_own_bucket():
    own = {name.replace("GRADIENTS", "AGGREGATOR"): value for name, value in GOOD.items() if "GRADIENTS" in name}
    others = {name: value for name, value in GOOD.items() if "GRADIENTS" not in name}
    neuron = neuron_from_environment(others | own | {"TEMPLAR_ROLE": "aggregator"})
    assert neuron.bucket.account_id == ACCOUNT
    assert "R2_AGGREGATOR_ACCOUNT_ID is missing" in problems(TEMPLAR_ROLE="aggregator")


def test_every_missing_variable_is_named_at_once():
    for environment in ({}, dict.fromkeys(GOOD, "  ")):
        with pytest.raises(PermanentError) as caught:
            neuron_from_environment(environment)
        assert set(re.findall(r"(\w+) is missing", str(caught.value))) == set(REQUIRED)
    message = problems(NETUID="three", WALLET_NAME=None, TEMPLAR_STORAGE="ftp://x", R2_GRADIENTS_BUCKET_NAME="other")
    for part in ("NETUID must be", "WALLET_NAME is missing", "TEMPLAR_STORAGE is refused", "R2_GRADIENTS_BUCKET_NAME"):
        assert part in message


SEVERAL = {"TEMPLAR_HOSTS": "2", "TEMPLAR_RENDEZVOUS": "10.0.0.1:29500"}
SIZE = "a whole number of at least 1"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"NETWORK": ""}, "NETWORK is empty: name the network"),
        ({"NETWORK": "  "}, "NETWORK is empty: name the network"),
        ({"NETWORK": "ledger:relative"}, "NETWORK is refused: a ledger is ledger:/path"),
        ({"NETUID": "three"}, "NETUID must be a whole number"),
        ({"TEMPLAR_HOME": "~nobody-here/x"}, "TEMPLAR_HOME is '~nobody-here/x', and no such home is known: write an "),
        ({"TEMPLAR_STORAGE": "s3://KEY:hush@host"}, "TEMPLAR_STORAGE is refused: a storage's url must be r2, http(s)"),
        *(
            ({"TEMPLAR_STORAGE": f"https://host.example:9000{path}"}, "TEMPLAR_STORAGE is refused: a storage's url ")
            for path in ("/bucket", "/bucket/", "//", "/#bucket", "/?a=b")
        ),
        ({"TEMPLAR_STORAGE_ADDRESSING": "host"}, "TEMPLAR_STORAGE_ADDRESSING is 'host': set path or virtual"),
        ({"R2_DATASET_ENDPOINT": "s3.example"}, "R2_DATASET_ENDPOINT is refused: a storage's url must be r2"),
        ({"R2_DATASET_REGION": "eu-1"}, "R2_DATASET_REGION is set, and R2_DATASET_ENDPOINT is not: set that, too"),
        ({"TEMPLAR_STORAGE_READ_TIMEOUT_SECONDS": "soon"}, "TEMPLAR_STORAGE_READ_TIMEOUT_SECONDS must be a number"),
        (
            {"R2_GRADIENTS_ACCOUNT_ID": "Not_An_Account", "R2_GRADIENTS_BUCKET_NAME": None},
            "R2_GRADIENTS_ACCOUNT_ID is refused: an account id is 3 to 32",
        ),
        ({"R2_GRADIENTS_BUCKET_NAME": "another"}, "R2_GRADIENTS_BUCKET_NAME must be that of R2_GRADIENTS_ACCOUNT_ID"),
        ({"R2_GRADIENTS_READ_ACCESS_KEY_ID": "k" * 33}, "R2_GRADIENTS_READ_ACCESS_KEY_ID cannot be committed on chain"),
        (
            {"R2_GRADIENTS_READ_SECRET_ACCESS_KEY": "hush hush"},
            "R2_GRADIENTS_READ_SECRET_ACCESS_KEY cannot be committed on chain",
        ),
        ({BUCKET_LIST: "hush"}, f"{BUCKET_LIST} is not a JSON list of the form "),
        ({"TEMPLAR_DEVICE": "gpu"}, "TEMPLAR_DEVICE is 'gpu': set auto, cpu, cuda or cuda:N"),
        ({"TEMPLAR_THREADS": "0"}, f"TEMPLAR_THREADS is '0': set auto or {SIZE}"),
        ({"TEMPLAR_PRECISION": "float16"}, "TEMPLAR_PRECISION is 'float16': set auto, float32 or bfloat16"),
        ({"TEMPLAR_MICRO_BATCH": "some"}, f"TEMPLAR_MICRO_BATCH is 'some': set preset, auto or {SIZE}"),
        ({"TEMPLAR_COMPILE": "yes"}, "TEMPLAR_COMPILE is 'yes': set on or off"),
        ({"TEMPLAR_RANKS": "0"}, f"TEMPLAR_RANKS is '0': set auto or {SIZE}"),
        ({"TEMPLAR_HOSTS": "0"}, "TEMPLAR_HOSTS is 0: set 1 for this host alone, or their number"),
        ({"TEMPLAR_HOSTS": "2"}, "TEMPLAR_RENDEZVOUS is '' with TEMPLAR_HOSTS 2: set ADDRESS:PORT"),
        ({"TEMPLAR_ROLE": "validator", **SEVERAL}, "TEMPLAR_HOSTS is 2, and the role is validator"),
        ({"TEMPLAR_RENDEZVOUS": "10.0.0.1:29500"}, "TEMPLAR_RENDEZVOUS is '10.0.0.1:29500' with TEMPLAR_HOSTS 1: set "),
        ({"TEMPLAR_RENDEZVOUS": "29500"}, "TEMPLAR_RENDEZVOUS is '29500' with TEMPLAR_HOSTS 1: set ADDRESS:PORT"),
        ({"TEMPLAR_SHARDING": "all"}, "TEMPLAR_SHARDING is 'all': set auto, replicated or sharded"),
        ({"TEMPLAR_CHECKPOINT_LAYERS": "-1"}, f"TEMPLAR_CHECKPOINT_LAYERS is '-1': set off or {SIZE}"),
        ({"TEMPLAR_INNER_SNAPSHOT_SECONDS": "often"}, "TEMPLAR_INNER_SNAPSHOT_SECONDS must be a number"),
        ({"TEMPLAR_INNER_SNAPSHOT_SECONDS": "-1"}, "TEMPLAR_INNER_SNAPSHOT_SECONDS is -1.0: set seconds, or 0"),
        ({"TEMPLAR_INNER_SNAPSHOT_SECONDS": "nan"}, "TEMPLAR_INNER_SNAPSHOT_SECONDS is nan: set seconds, or 0"),
        (
            {"TEMPLAR_RANKS": "2", "TEMPLAR_INNER_SNAPSHOT_SECONDS": "90"},
            "TEMPLAR_INNER_SNAPSHOT_SECONDS is 90.0: set 0, for several ranks keep no progress",
        ),
    ],
)
def test_what_is_refused_is_named_with_its_remedy(changes, said):
    assert problems(**changes).startswith(f"[bad_environment] {said}")


def test_a_list_of_buckets_stands_for_the_single_bucket():
    single = {name: value for name, value in GOOD.items() if not name.startswith("R2_DATASET")}
    text = json.dumps([listed("data-one"), listed("data-two", comment="ignored")])
    buckets = neuron_from_environment(single | {BUCKET_LIST: text}).dataset.buckets.get_secret_value()
    names = [(bucket.account_id, bucket.bucket) for bucket in buckets]
    assert names == [("data-one", "data-one"), ("data-two", "data-two")]
    assert buckets[1].read.secret_access_key.get_secret_value() == "hush-data-two"
    malformed = json.dumps([listed("one"), listed("two", account_id=None)])
    assert "1.account_id is refused" in problems(**{BUCKET_LIST: malformed})


def test_the_example_lists_every_variable_that_is_read():
    text = (REPOSITORY / ".env.example").read_text()
    numbers = ("TEMPLAR_HPARAMS", "TEMPLAR_GENESIS", "TEMPLAR_STORAGE_MAX_ATTEMPTS")
    for name in (*GOOD, *numbers, BUCKET_LIST, *STORAGE_VARIABLES, *DATASET_VARIABLES, *PAGE_VARIABLES, *TRAINER):
        assert re.search(rf"^#?{name}=", text, re.MULTILINE), name


def test_the_filled_in_example_makes_a_neuron(tmp_path):
    lines = []
    for line in (REPOSITORY / ".env.example").read_text().splitlines():
        name, equals, value = line.partition("=")
        is_empty = equals and not name.startswith("#") and not value.partition("#")[0].strip()
        lines.append(f"{name}={GOOD[name]}" if is_empty else line)
    env_file = tmp_path / ".env"
    env_file.write_text(os.linesep.join(lines))
    values = {name: value for name, value in dotenv_values(env_file).items() if value is not None}
    neuron = neuron_from_environment(values)
    assert isinstance(neuron, Neuron)
    assert (neuron.preset, neuron.subnet.netuid, neuron.bucket.endpoint.url) == ("150M", 3, "r2")
    assert neuron.hparams().windows.block_seconds == 12.0


def test_the_password_of_a_hotkey_reaches_its_wallet_and_stands_in_no_block():
    given = neuron_from_environment(GOOD | {PASSWORD: " hush "}).wallet
    assert given.password() == Password(PASSWORD, " hush ")
    assert "hush" not in given.model_dump_json() + repr(given)
    named = neuron_from_environment(GOOD | {PASSWORD_FILE: "~/word"}).wallet
    assert named.password_file == str(Path("~/word").expanduser())
