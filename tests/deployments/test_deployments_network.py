"""`templar network init`: everything is checked before anything is written, and twice is once."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deployments import network as command
from templar.agreement import genesis
from templar.agreement.genesis import find_birth
from templar.chain.base import SubnetRules
from templar.chain.ledger import Ledger
from templar.errors import Reason, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.object_keys import START_WINDOW_KEY
from templar.hparams import load_hparams
from templar.store.directory import DirectoryStore
from tests.support.commands import Call, write_env
from tests.support.prepared import PRESET, PreparedNetwork

FOUNDER = "aggregator"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> PreparedNetwork:
    """A subnet with members, and no network yet."""
    return PreparedNetwork(tmp_path_factory.mktemp("founded")).forget(FOUNDER)


@pytest.fixture
def call(network: PreparedNetwork, tmp_path: Path, run_main: Call) -> Callable[..., tuple[int, str, str]]:
    def main(*options: str, name: str = FOUNDER, **changes: str) -> tuple[int, str, str]:
        file = write_env(tmp_path / ".env", network.environment(name) | {"TEMPLAR_HOME": str(tmp_path)} | changes)
        return partial(run_main, command.main, "--env-file", file)(*options)

    return main


def keys(network: PreparedNetwork) -> list[tuple[str, int]]:
    return [(info.key, info.last_modified) for info in DirectoryStore(network.bucket(FOUNDER)).list()]


def test_a_dry_run_says_what_would_start_and_writes_nothing(network: PreparedNetwork, call: Any) -> None:
    status, out, err = call("--dry-run")
    assert (status, err) == (0, "")
    assert "uid 1 would start a network on subnet 1: first window " in out
    assert out.endswith("nothing was written\n")
    assert keys(network) == []


def test_a_subnet_with_room_for_one_validator_is_refused(
    network: PreparedNetwork, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "rules", lambda _: SubnetRules(435, "Null", True, True, False, 0, 50, 65535))
    status, out, err = call("--dry-run")
    assert (status, out) == (1, "")
    assert "pays by Null consensus" in err


def test_a_failure_on_the_way_is_gone_on_with(
    network: PreparedNetwork, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise TransientError(Reason.STORE_UNREACHABLE, "the bucket does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(genesis, "publish_body", fail)
        status, _, err = call("--opens-in", "5")
    assert (status, f"[{Reason.STORE_UNREACHABLE}]" in err) == (1, True)
    assert START_WINDOW_KEY not in dict(keys(network))

    status, out, err = call("--opens-in", "5", "--json")
    assert (status, err) == (0, "")
    record = json.loads(out)
    assert (record["uid"], record["is_new"], record["written"]) == (1, True, True)
    block = network.block("lazy")
    chain = block.subnet.open(None)
    birth = find_birth(chain, Buckets(chain, block.bucket.endpoint.open_reader), network.hparams)
    assert (birth.network.genesis, birth.start.start_window) == (record["genesis"], record["start_window"])
    assert record["opens_at"] > chain.clock.now()


def test_a_network_is_started_once(network: PreparedNetwork, call: Any) -> None:
    before = keys(network)
    status, out, err = call()
    assert (status, err) == (0, "")
    assert "uid 1 has started a network" in out
    assert keys(network) == before


def test_other_numbers_are_another_network(network: PreparedNetwork, call: Any, tmp_path: Path) -> None:
    presets = json.loads(network.plan.hparams_path.read_text())
    presets[PRESET]["training"] = {"outer_learning_rate": 0.5}
    (tmp_path / "hparams.json").write_text(json.dumps(presets))
    assert load_hparams(PRESET, path=tmp_path / "hparams.json").digest != network.hparams.digest
    status, _, err = call(TEMPLAR_HPARAMS=str(tmp_path / "hparams.json"))
    assert status == 1
    assert "with other hyper-parameters, text, tokenizer or first parameters" in err


def test_nobody_else_starts_a_second_network(network: PreparedNetwork, call: Any) -> None:
    status, _, err = call(name="validator")
    assert status == 1
    assert "uid 1 has started the network " in err
    assert "join it with `templar neuron start`" in err
    assert START_WINDOW_KEY not in [info.key for info in DirectoryStore(network.bucket("validator")).list()]


def test_a_hotkey_without_permit_starts_nothing(call: Any) -> None:
    status, _, err = call(name="lazy")
    assert (status, "has no validator permit" in err) == (1, True)


def test_a_bucket_that_cannot_be_read_may_hold_a_network(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise TransientError(Reason.STORE_UNREACHABLE, "it does not answer")

    monkeypatch.setattr(command, "read_start", fail)
    status, _, err = call(name="validator")
    assert (status, "whether uid 1 has started a network cannot be read now" in err) == (1, True)
