import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from templar.agreement.retention import Retention, survey
from templar.agreement.sync_proof import MINER_START, START, debug_values, publish_debug, read_debug
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, parse_current_key, window_key
from templar.exchange.objects import MAX_DEBUG_PARAMETERS, MAX_FLOAT32, Debug, Proof
from templar.exchange.publish import PublishOutcome
from templar.exchange.signed import Sealed, seal, unseal
from templar.hparams import load_hparams
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner
from templar.neuron.validator import Validator
from templar.training.model import parameter_shapes
from tests.support.memory import folder
from tests.support.network import Network
from tests.support.scripted_store import failing
from tests.support.subnet import GENESIS, NETUID, Subnet, fields_of, member, signed_anyhow

__all__ = ["folder"]

WINDOW = 3
ALICE = member(5)
VALUES = {"embed": (0.5, -1.25), "norm": (1.0, 0.0)}


def body(**changes: Any) -> Debug:
    author = {"netuid": NETUID, "genesis": GENESIS, "uid": 5, "hotkey": ALICE.hotkey.address}
    return Debug(**author | {"window": WINDOW, "start": 10, "values": VALUES} | changes)


def parameters(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (40, 16), "norm": (12,), "short": (11,), "scale": (), "head": (16, 40)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


# Which elements.


def test_two_elements_of_each_flattened_parameter_that_has_them() -> None:
    params = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.arange(12.0), "c": torch.arange(11.0)}
    params |= {"pair": torch.tensor([[3.0], [4.0]]), "one": torch.tensor([1.0]), "none": torch.zeros(0)}
    assert debug_values(params, MINER_START) == {"a": (10.0, 11.0), "b": (10.0, 11.0)}
    assert debug_values(params, START) == dict.fromkeys("abc", (0.0, 1.0)) | {"pair": (3.0, 4.0)}
    assert debug_values({"s": torch.tensor(1.0)}, START) == {}


def test_the_layout_in_memory_does_not_matter() -> None:
    params = parameters()
    turned = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in params.items()}
    assert debug_values(turned, MINER_START) == debug_values(params, MINER_START)
    for tensor in turned.values():
        tensor.requires_grad_()
    assert debug_values(turned, MINER_START) == debug_values(params, MINER_START)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [MINER_START, MINER_START + 1])
def test_what_is_not_finite_is_left_out(bad: float, place: int) -> None:
    params = parameters()
    params["head"].view(-1)[place] = bad
    params["embed"].view(-1)[0] = bad
    assert set(debug_values(params, MINER_START)) == {"embed", "norm"}


@pytest.mark.parametrize("name", ["", "x" * 81, "a b", "a\n", "é", "a/b", 'a"'])
def test_a_name_that_is_no_legal_one_is_left_out(name: str) -> None:
    assert set(debug_values({"norm": torch.ones(4), name: torch.ones(4)}, START)) == {"norm"}


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_every_finite_float32_is_read_back_bit_for_bit(one: int, other: int) -> None:
    packed = struct.pack("<II", one, other)
    tensor = torch.frombuffer(bytearray(packed), dtype=torch.float32)
    values = debug_values({"a": tensor}, START)
    assert bool(values) == bool(torch.isfinite(tensor).all())
    read = unseal(seal(body(start=0, values=values), ALICE.hotkey).encode(), Debug).body.values
    assert [struct.pack("<ff", *pair) for pair in read.values()] == [packed] * len(values)


# The object.


def test_a_legal_object_is_read_back_and_names_its_elements() -> None:
    found = unseal(seal(body(), ALICE.hotkey).encode(), Debug).body
    assert found == body()
    assert (found.indices, body(start=0).indices) == ((10, 12), (0, 2))
    assert body(values={}).values == {}


@pytest.mark.parametrize("start", [1, 11, -10, 2**53, 10.0, 0.0, "10", True, False, None, [10], {}])
def test_there_are_two_places_to_begin_at(start: Any) -> None:
    assert reason_of(fields_of(body(), start=start)) is Reason.MALFORMED


@pytest.mark.parametrize(
    "values",
    [None, [], "x", 5, [["a", [1.5, 2.5]]], {"a": 1.5}, {"a": []}, {"a": [1.5]}, {"a": [1.5, 2.5, 3.5]},
     {"a": [1.5, None]}, {"a": [1.5, "2.5"]}, {"a": [1.5, True]}, {"a": [1.5, [2.5]]}, {"a": {"0": 1.5, "1": 2.5}},
     {"a": [1.5, 3.5e38]}, {"a": [-3.5e38, 1.5]}, {"": [1.5, 2.5]}, {"x" * 81: [1.5, 2.5]}, {"a b": [1.5, 2.5]},
     {"a\n": [1.5, 2.5]}, {"é": [1.5, 2.5]}],
)  # fmt: skip
def test_values_are_pairs_of_numbers_by_name(values: Any) -> None:
    assert reason_of(fields_of(body(), values=values)) is Reason.MALFORMED


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1e39"])
def test_a_number_that_no_parameter_can_be_is_malformed(number: bytes) -> None:
    data = seal(body(), ALICE.hotkey).encode()
    assert data.count(b"-1.25") == 1
    with pytest.raises(RejectedError) as caught:
        unseal(data.replace(b"-1.25", number), Debug)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("number", [b"-125e-2", b"-1.250", b"-1.2500000000000000001"])
def test_a_number_is_written_in_one_way(number: bytes) -> None:
    data = seal(body(), ALICE.hotkey).encode()
    with pytest.raises(RejectedError) as caught:
        unseal(data.replace(b"-1.25", number), Debug)
    assert caught.value.reason is Reason.NOT_CANONICAL


def test_the_longest_legal_object_is_not_too_long() -> None:
    names = [f"{index:04d}" + "x" * 76 for index in range(MAX_DEBUG_PARAMETERS + 1)]
    longest = (-2.2250738585072014e-308, -1.1754943508222875e-38)
    assert [len(repr(number)) for number in longest] == [24, 23]
    value = fields_of(body(), values=dict.fromkeys(names[:-1], [longest[0]] * 2), window=2**53, netuid=2**53)
    value |= {"uid": 2**16 - 1, "protocol": "9" * 32}
    data = signed_anyhow(Kind.DEBUG, value, ALICE.hotkey)
    assert len(unseal(data, Debug).body.values) == MAX_DEBUG_PARAMETERS
    assert len(data) + 2 <= Debug.max_bytes  # a hotkey may be two characters longer than ours
    value["values"] = dict.fromkeys(names, (1.5, 2.5))
    assert reason_of(value) is Reason.MALFORMED


def test_the_parameters_of_a_large_model_all_fit() -> None:
    names = parameter_shapes(load_hparams("templar-2.1.3").model)
    assert len(names) > 700
    values = debug_values(dict.fromkeys(names, torch.full((12,), -1.1754943508222875e-38)), MINER_START)
    assert list(values) == sorted(names)
    assert len(seal(body(values=values), ALICE.hotkey).encode()) < Debug.max_bytes / 2


def test_of_more_parameters_the_first_by_name_are_published() -> None:
    many = {f"{index:05d}": torch.ones(2) for index in reversed(range(MAX_DEBUG_PARAMETERS + 100))}
    assert list(debug_values(many, START)) == sorted(many)[:MAX_DEBUG_PARAMETERS]


def test_its_bounds_are_those_of_float32() -> None:
    assert torch.finfo(torch.float32).max == MAX_FLOAT32
    assert body(values={"a": (MAX_FLOAT32, -MAX_FLOAT32)}).values["a"] == (MAX_FLOAT32, -MAX_FLOAT32)


def reason_of(value: Mapping[str, Any]) -> Reason:
    """Why a body is rejected whose author signed it in canonical form."""
    with pytest.raises(RejectedError) as caught:
        unseal(signed_anyhow(Kind.DEBUG, value, ALICE.hotkey), Debug)
    return caught.value.reason


# Publishing and reading.


@pytest.fixture
def subnet(tmp_path: Path) -> Subnet:
    return Subnet(tmp_path, num_miners=2)


def publish(
    subnet: Subnet, params: Mapping[str, Tensor] | None = None, *, role: str = "miner"
) -> PublishOutcome | None:
    params = parameters() if params is None else params
    receipt = publish_debug(subnet.exchange(subnet.miners[0]), params, window=WINDOW, role=role)
    return None if receipt is None else receipt.outcome


def test_it_is_published_once_with_one_put(subnet: Subnet) -> None:
    author, key = subnet.miners[0], window_key(Kind.DEBUG, WINDOW, subnet.miners[0].uid)
    assert read_debug(subnet.exchange(), author.neuron, WINDOW) is None
    calls = subnet.store(author).calls
    calls.clear()
    assert publish(subnet) is PublishOutcome.STORED
    assert calls == [(each, key) for each in ("head", "put_if_absent", "head", "get")]
    calls.clear()
    assert publish(subnet) is PublishOutcome.ALREADY_THERE
    assert calls == [("head", key), ("get", key)]
    found = read_debug(subnet.exchange(), author.neuron, WINDOW)
    assert found is not None
    assert (found.window, found.start, found.values) == (WINDOW, 10, debug_values(parameters(), 10))


@pytest.mark.parametrize("role", ["validator", "aggregator"])
def test_who_does_not_mine_shows_other_elements(subnet: Subnet, role: str) -> None:
    publish(subnet, role=role)
    found = read_debug(subnet.exchange(), subnet.miners[0].neuron, WINDOW)
    assert found is not None
    assert (found.start, found.values) == (0, debug_values(parameters(), 0))
    assert "short" in found.values


def test_what_stands_stays_and_nobody_fails(subnet: Subnet, caplog: pytest.LogCaptureFixture) -> None:
    publish(subnet)
    assert publish(subnet, parameters(1)) is None
    assert "debug values of a state that was left stand" in caplog.text
    found = read_debug(subnet.exchange(), subnet.miners[0].neuron, WINDOW)
    assert found is not None
    assert found.values == debug_values(parameters(), MINER_START)


def test_what_is_no_object_stays_too(subnet: Subnet) -> None:
    author, key = subnet.miners[0], window_key(Kind.DEBUG, WINDOW, subnet.miners[0].uid)
    subnet.store(author).inner.put(key, b"mine")
    assert publish(subnet) is None
    with pytest.raises(RejectedError) as caught:
        read_debug(subnet.exchange(), author.neuron, WINDOW)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_parameters_that_are_not_finite_are_no_failure(subnet: Subnet, bad: float) -> None:
    params = {name: torch.full_like(tensor, bad) for name, tensor in parameters().items()}
    assert publish(subnet, params) is PublishOutcome.STORED
    found = read_debug(subnet.exchange(), subnet.miners[0].neuron, WINDOW)
    assert found is not None
    assert found.values == {}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TransientError(Reason.STORE_BUSY, "for a test"), TransientError),
        (PermanentError(Reason.ACCESS_DENIED, "for a test"), PermanentError),
    ],
)
def test_a_failing_store_is_a_failure_to_try_again(
    subnet: Subnet, error: TransientError | PermanentError, kind: type[Exception]
) -> None:
    store = subnet.store(subnet.miners[0])
    store.before = failing(error)
    with pytest.raises(kind) as caught:
        publish(subnet)
    assert caught.value is error
    store.before = lambda operation, key: None
    assert publish(subnet) is PublishOutcome.STORED


def test_an_answer_that_was_lost_is_no_second_object(subnet: Subnet) -> None:
    store = subnet.store(subnet.miners[0])

    def lost(operation: str, key: str) -> None:
        if operation == "put_if_absent":
            raise TransientError(Reason.STORE_UNREACHABLE, "for a test")

    store.after = lost
    with pytest.raises(TransientError):
        publish(subnet)
    assert publish(subnet) is PublishOutcome.ALREADY_THERE


def put(subnet: Subnet, data: bytes) -> None:
    subnet.store(subnet.miners[1]).inner.put(window_key(Kind.DEBUG, WINDOW, subnet.miners[1].uid), data)


def somebody_elses(subnet: Subnet, found: Sealed[Debug]) -> None:
    put(subnet, found.encode())


def of_another_window(subnet: Subnet, found: Sealed[Debug]) -> None:
    author = subnet.miners[1]
    fields = {"uid": author.uid, "hotkey": author.hotkey.address, "window": WINDOW + 1}
    put(subnet, seal(found.body.model_copy(update=fields), author.hotkey).encode())


def of_another_kind(subnet: Subnet, found: Sealed[Debug]) -> None:
    exchange = subnet.exchange(subnet.miners[1])
    proof = Proof(**exchange.author(WINDOW), window=WINDOW, root="a1" * 32, outer_steps=1, proof="b2" * 32)
    put(subnet, seal(proof, exchange.own_signer).encode())


def too_long(subnet: Subnet, found: Sealed[Debug]) -> None:
    put(subnet, found.encode() + b" " * Debug.max_bytes)


def with_other_values(subnet: Subnet, found: Sealed[Debug]) -> None:
    put(subnet, Sealed(found.body.model_copy(update={"values": VALUES}), found.signature).encode())


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (somebody_elses, Reason.WRONG_IDENTITY),
        (of_another_window, Reason.WRONG_WINDOW),
        (of_another_kind, Reason.MALFORMED),
        (too_long, Reason.WRONG_SIZE),
        (with_other_values, Reason.BAD_SIGNATURE),
    ],
)
def test_what_is_not_legal_is_rejected(
    subnet: Subnet, forge: Callable[[Subnet, Sealed[Debug]], None], reason: Reason
) -> None:
    publish(subnet)
    author, other = subnet.miners
    data = subnet.store(author).inner.get(window_key(Kind.DEBUG, WINDOW, author.uid), max_bytes=Debug.max_bytes)
    forge(subnet, unseal(data, Debug))
    store = subnet.store(other)
    store.calls.clear()
    with pytest.raises(RejectedError) as caught:
        read_debug(subnet.exchange(), other.neuron, WINDOW)
    assert caught.value.reason is reason
    assert (store.count("get") == 0) is (reason is Reason.WRONG_SIZE)


def test_a_failing_store_is_no_absence(subnet: Subnet) -> None:
    subnet.store(subnet.miners[0]).before = failing(TransientError(Reason.STORE_BUSY, "for a test"))
    with pytest.raises(TransientError):
        read_debug(subnet.exchange(), subnet.miners[0].neuron, WINDOW)


def test_it_expires_with_its_window(subnet: Subnet) -> None:
    publish(subnet)
    objects = list(subnet.store(subnet.miners[0]).inner.list("debug-"))
    (key,) = (parse_current_key(info.key) for info in objects)
    assert key is not None
    for age in (0, 1):
        now = WINDOW + subnet.hparams.storage.retention_windows + age
        retention = Retention.of(survey(objects, now), window=now, genesis_windows=(), storage=subnet.hparams.storage)
        assert retention.is_expired(key) is (age == 1)


# What nodes do.


@pytest.fixture
def network(folder: Path) -> Iterator[Network]:
    network = Network(folder)
    yield network
    network.stop()


def shown(network: Network, name: str, window: int) -> Debug | None:
    exchange = network.validator.exchange
    neuron = exchange.metagraph(window).by_hotkey(network.member(name).hotkey.address)
    assert neuron is not None
    return read_debug(exchange, neuron, window)


def test_every_node_shows_its_state_beside_its_proof(network: Network) -> None:
    network.run([1, 2])
    kinds = {Miner: 10, Validator: 0, Aggregator: 0}
    assert {type(node) for node in network.nodes.values()} == set(kinds)
    for name, node in network.nodes.items():
        found = shown(network, name, 2)
        assert found is not None
        assert (found.start, found.window) == (kinds[type(node)], 2)
        assert found.values == debug_values(node.state.params, found.start)
        assert found.values != shown(network, name, 1)
        assert len(network.objects(name, "debug-")) == 2


def test_a_repeated_step_changes_nothing(network: Network) -> None:
    network.run([1])
    before = {name: network.objects(name) for name in network.nodes}
    for node in network.nodes.values():
        assert node.publish_sync_proof(1) is not None
    assert {name: network.objects(name) for name in network.nodes} == before


def test_debug_values_that_stand_keep_nobody_from_its_proof(network: Network) -> None:
    miner = network.miners[0]
    name, signer = network.name(miner), miner.exchange.own_signer
    other = Debug(**miner.exchange.author(1), window=1, start=10, values=VALUES)
    network.bucket(name).put(window_key(Kind.DEBUG, 1, other.uid), seal(other, signer).encode())
    network.run([1])
    assert shown(network, name, 1) == other
    assert network.objects(name, "proof-1-")
    assert network.roots(1) == {miner.state.root}


def test_where_the_proof_of_a_left_state_stands_no_other_values_are_shown(network: Network) -> None:
    network.run([1])
    miner = network.miners[0]
    name, exchange = network.name(miner), miner.exchange
    left = Proof(**exchange.author(1), window=1, root="ab" * 32, outer_steps=1, proof="cd" * 32)
    network.bucket(name).delete([*network.objects(name, "debug-1-"), *network.objects(name, "proof-1-")])
    network.bucket(name).put(window_key(Kind.PROOF, 1, left.uid), seal(left, exchange.own_signer).encode())
    assert miner.publish_sync_proof(1) is None
    assert network.objects(name, "debug-") == {}


def evidence(network: Network, window: int) -> Any:
    """What the validator measured and concluded, without the signature, which differs every time."""
    ((_, data),) = network.objects(network.name(network.validator), f"evidence-{window}-").values()
    return json.loads(data)["body"]


def test_nothing_is_decided_by_them(folder: Path) -> None:
    found = []
    for damage in ("none", "gone", "nonsense"):
        (folder / damage).mkdir()
        network = Network(folder / damage)
        network.run([1])
        for name in network.nodes:
            (key,) = network.objects(name, "debug-1-")
            if damage != "none":
                network.bucket(name).delete([key])
            if damage == "nonsense":
                network.bucket(name).put(key, b"nonsense")
        network.run([2])
        found.append((network.roots(2), evidence(network, 2)))
        network.stop()
    assert len(found[0][0]) == 1
    assert found == [found[0]] * 3
