"""Parameter digests and state roots, computed again from their description in docs/protocol.md 10."""

import hashlib
import json

import torch

from templar.agreement.state import genesis_root, next_root, null_root, parameters_digest

PARAMS = {"b": torch.tensor([[1.0, -2.0], [0.5, 3.25]]), "a": torch.tensor(7.0)}


def plain_hash(value: dict) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def plain_leaf(name: str, shape: list[int], data: bytes) -> str:
    header = {"domain": "templar/tensor/1", "dtype": "float32", "name": name, "shape": shape}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\n" + data).hexdigest()


def test_the_digest_is_that_of_the_protocol() -> None:
    leaves = [
        plain_leaf("a", [], bytes.fromhex("0000e040")),
        plain_leaf("b", [2, 2], bytes.fromhex("0000803f000000c00000003f00005040")),
    ]
    assert parameters_digest(PARAMS) == plain_hash({"domain": "templar/parameters/1", "leaves": leaves})


def test_roots_are_those_of_the_protocol() -> None:
    digest = parameters_digest(PARAMS)
    genesis = genesis_root(3, digest)
    assert genesis == plain_hash({"domain": "templar/root/genesis/1", "netuid": 3, "parameters": digest})
    after = next_root(genesis, 17, 1, digest)
    expected = {"outer_steps": 1, "parameters": digest, "previous": genesis, "window": 17}
    assert after == plain_hash({"domain": "templar/root/next/1", **expected})
    null = {"parameters": digest, "previous": after, "window": 18}
    assert null_root(after, 18, digest) == plain_hash({"domain": "templar/root/null/1", **null})


def test_the_digest_sees_every_bit_and_name() -> None:
    digest = parameters_digest(PARAMS)
    changes = [
        {"b": PARAMS["b"]},
        PARAMS | {"c": torch.zeros(1)},
        PARAMS | {"a": torch.tensor([7.0])},
        PARAMS | {"a": torch.tensor(7.0, dtype=torch.float64)},
        PARAMS | {"a": torch.tensor(7.0, dtype=torch.bfloat16)},
        PARAMS | {"b": PARAMS["b"].t().contiguous()},
        PARAMS | {"b": PARAMS["b"].nextafter(torch.tensor(9.0))},
        {"a": PARAMS["b"], "b": PARAMS["a"]},
    ]
    assert len({digest, *map(parameters_digest, changes)}) == len(changes) + 1
    assert parameters_digest({"z": torch.tensor(0.0)}) != parameters_digest({"z": torch.tensor(-0.0)})


def test_the_digest_does_not_depend_on_how_a_tensor_lies_in_memory() -> None:
    transposed = PARAMS["b"].t().contiguous().t()
    assert not transposed.is_contiguous()
    sliced = torch.cat([PARAMS["b"], PARAMS["b"]])[2:].requires_grad_()
    for other in (transposed, sliced):
        assert parameters_digest({"b": other, "a": PARAMS["a"]}) == parameters_digest(PARAMS)
