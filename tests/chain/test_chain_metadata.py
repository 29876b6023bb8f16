"""Every name that the chain's code uses stands in the metadata from which the pinned SDK was generated.

Statically, from the source; and below the SDK, from what a chain asks a subnet in memory for. A release of the SDK for
another runtime fails here, and not at a validator's.
"""

import ast
import inspect
from pathlib import Path

import bittensor as bt
import bittensor_core
import pytest
from bittensor._generated import calls, constants, errors, runtime_apis, storage
from bittensor.error_map import DISPATCH_ERRORS
from bittensor.reads.base import list_reads

import templar.chain
from templar.chain import extrinsics
from templar.chain.base import Role
from templar.chain.bittensor import BittensorChain
from templar.chain.clock import SimulatedClock
from tests.support.substrate import KeyPairWallet, MemorySubstrate

NETUID = 3
SEED = bytes(range(32))
FILES = sorted(Path(templar.chain.__file__).parent.glob("*.py"))
READS = {each["name"]: each for each in list_reads()}
POOL = {"Dropped", "FinalityTimeout", "Invalid", "Retracted", "Usurped"}
"""States of the transaction pool, which the SDK makes names of."""


def has(catalogue, pallet, name):
    return hasattr(getattr(catalogue, pallet, None), name)


def texts(nodes, known):
    """The values of literals and of the module's own text constants."""
    return [
        node.value if isinstance(node, ast.Constant) and isinstance(node.value, str)
        else known.get(node.id) if isinstance(node, ast.Name) else None
        for node in nodes
    ]  # fmt: skip


def used(source):
    """What a module names: kind, pallet, name, arguments."""
    tree = ast.parse(source)
    known = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                known[name] = text
    for node in ast.walk(tree):
        match node:
            case ast.Tuple(elts=[_, _] as pair):
                pallet, name = texts(pair, known)
                if pallet is not None and name is not None and hasattr(storage, pallet):
                    yield "storage", pallet, name, ()
            case ast.Call(func=ast.Attribute(attr="constant"), args=[_, _] as pair):
                pallet, name = texts(pair, known)
                yield "constant", str(pallet), str(name), ()
            case ast.Call(func=ast.Attribute(attr="read"), args=[ast.Constant(value=str(name))], keywords=words):
                yield "read", "", name, tuple(word.arg for word in words if word.arg)
            case ast.Call(
                func=ast.Attribute(
                    attr=name,
                    value=ast.Attribute(attr=pallet, value=ast.Attribute(attr="calls", value=ast.Name(id="bt"))),
                ),
                keywords=words,
            ):
                yield "call", pallet, name, tuple(word.arg for word in words if word.arg)


def is_known(kind, pallet, name, arguments):
    match kind:
        case "storage":
            return has(storage, pallet, name)
        case "constant":
            return has(constants, pallet, name)
        case "read":
            return name in READS and set(arguments) <= set(READS[name]["params"])
        case "call":
            call = getattr(getattr(calls, pallet, None), name, None)
            return call is not None and set(arguments) <= set(inspect.signature(call).parameters)
    return has(runtime_apis, pallet, name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_in_the_source_are_those_of_the_runtime(file):
    assert [each for each in used(file.read_text()) if not is_known(*each)] == []


def test_the_source_is_understood():
    found = {each[0] for file in FILES for each in used(file.read_text())}
    assert found == {"storage", "constant", "read", "call"}
    wrong = 'P = "SubtensorModule"\nq((P, "Tempi"), ("System", "Acount"))\nself.constant("Aura", "Slot")\n'
    wrong += (
        'view.read("epochs", netuid=1)\nview.read("epoch_status", uid=1)\nbt.calls.Commitments.set_commitment(id=1)'
    )
    assert [is_known(*each) for each in used(wrong)] == [False] * 6


def test_what_a_chain_asks_for_below_the_sdk_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("BTCLI_TOKEN_SYMBOLS_CACHE", str(tmp_path / "symbols.json"))
    keypair = bittensor_core.Keypair.create_from_seed(SEED)
    clock = SimulatedClock(1_800_000_000.0)
    substrate = MemorySubstrate(clock, netuid=NETUID)
    substrate.register(keypair.ss58_address, stake=10.0, validator_permit=True)
    chain = BittensorChain(
        "local", NETUID, wallet=KeyPairWallet(keypair), substrates=lambda *_: substrate, clock=clock
    )  # fmt: skip
    number = chain.block()
    reads = (chain.head, chain.commitments, chain.weights, chain.weights_schedule, chain.rules, chain.require_fees)
    for read in (*reads, chain.metagraph, lambda: chain.block_time(number), lambda: chain.block_hash(number)):
        read()
    chain.set_commitment("a" * 128)
    chain.set_role(Role.MINER)
    for hides in (False, True):
        substrate.commit_reveal = hides
        chain.set_weights({0: 1.0})
    chain.check_weights({0: 1.0}, sent=number)
    chain.close()

    asked = {tuple(text.split(" ", 1)) for text in substrate.requests if "." in text}
    assert len(asked) > 20
    for kind, name in asked:
        assert is_known("api" if kind == "runtime_call" else "storage", *name.split("."), ()), name
    for sent in substrate.submissions:
        assert set(sent.params) == set(
            inspect.signature(getattr(getattr(calls, sent.module), sent.function)).parameters
        )
    assert {sent.function for sent in substrate.submissions} == {
        "set_commitment", "serve_axon", "set_mechanism_weights", "commit_timelocked_mechanism_weights"
    }  # fmt: skip


def test_names_and_codes_of_errors_are_known():
    known = {each.name for each in errors.ERRORS.values()} | DISPATCH_ERRORS.keys() | POOL
    named = extrinsics._RETRY_LATER | extrinsics._FATE_UNKNOWN | extrinsics._NOT_NOW.keys() | extrinsics._CAUSES.keys()
    assert named - known == set()
    codes = {code.value for code in bt.ErrorCode}
    assert (extrinsics._CAUSES_BY_CODE.keys() | extrinsics._NOT_NOW_CODES) - codes == set()
