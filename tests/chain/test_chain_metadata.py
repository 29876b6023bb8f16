"""Every name that a chain asks a subnet in memory for stands in the metadata from which the pinned SDK was generated.

A release of the SDK for another runtime fails here, and not at a validator's.
"""

import inspect

import bittensor as bt
import pytest
from bittensor._generated import calls, constants, errors, runtime_apis, storage
from bittensor.error_map import DISPATCH_ERRORS

from templar.chain import extrinsics
from templar.chain.base import Role
from templar.chain.extrinsics import ExtrinsicLimitedError

POOL = {"Dropped", "FinalityTimeout", "Invalid", "Retracted", "Usurped"}
"""States of the transaction pool, which the SDK makes names of."""


def has(catalogue, pallet, name):
    return hasattr(getattr(catalogue, pallet, None), name)


def test_what_a_chain_asks_for_below_the_sdk_is_known(chain, substrate):
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
    substrate.weights_rate_limit = 100  # whose end the chain is asked for then
    with pytest.raises(ExtrinsicLimitedError):
        chain.set_weights({0: 1.0})

    asked = {tuple(text.split(" ", 1)) for text in substrate.requests if "." in text}
    assert len(asked) > 20
    for kind, name in asked:
        assert has(runtime_apis if kind == "runtime_call" else storage, *name.split(".")), name
    assert has(constants, "Timestamp", "MinimumPeriod"), "the time of a block, where a runtime has no Aura"
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
