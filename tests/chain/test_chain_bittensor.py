"""What only a chain across a network does: refuse in many ways, lose connections, finalize late."""

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import bittensor as bt
import pytest
from websockets.sync.server import serve

from deployments.local.wallets import create_wallet
from templar.chain.base import SubnetRules
from templar.chain.bittensor import BittensorChain, open_substrate, open_wallet
from templar.chain.extrinsics import ExtrinsicLimitedError, ExtrinsicRefusedError
from templar.chain.remote import CallLimits
from templar.errors import PermanentError, Reason, TransientError
from tests.chain.conftest import ADDRESS, NETUID, OTHER, SEED, WALLET
from tests.support.errors import refusal
from tests.support.substrate import SHAPES, MemorySubstrate, Neuron, Submission

# What is sent.


def test_a_commitment_is_one_raw_field_signed_by_the_hotkey_and_final(open_chain, substrate, tmp_path):
    create_wallet(tmp_path, "validator", "hot", seed=SEED)
    chain = open_chain(open_wallet(tmp_path, "validator", "hot"))
    before = chain.block()
    chain.set_commitment("a" * 127 + "~")
    info = {"fields": [[{"Raw128": "0x" + "61" * 127 + "7e"}]]}
    sent = {"netuid": NETUID, "info": info}
    assert substrate.submissions == [Submission("Commitments", "set_commitment", sent, ADDRESS)]
    assert chain.block() > before
    assert chain.commitments() == {ADDRESS: "a" * 127 + "~"}


def test_weights_are_one_call_in_sixteen_bits_of_the_subnets_version_signed_by_the_hotkey(chain, substrate):
    substrate.weights_version = 1017
    chain.set_weights({1: 0.25, 0: 0.5})
    sent = {"netuid": NETUID, "mecid": 0, "dests": [0, 1], "weights": [65535, 32768], "version_key": 1017}
    assert substrate.submissions == [Submission("SubtensorModule", "set_mechanism_weights", sent, ADDRESS)]


def test_on_a_subnet_with_commit_reveal_weights_are_encrypted_and_hidden(chain, substrate):
    assert (chain.weights_schedule().reveal_epochs, chain.weights_schedule().hidden) == (0, {})
    substrate.commit_reveal = True
    substrate.weights_rate_limit = 100
    chain.set_weights({1: 0.25, 0: 0.5})
    assert chain.weights_schedule().reveal_epochs == 1
    assert chain.weights_schedule().hidden == {ADDRESS: (substrate.versions[-1][0],)}
    assert chain.weights() == {}
    (sent,) = substrate.submissions
    assert (sent.function, sent.signer) == ("commit_timelocked_mechanism_weights", ADDRESS)
    assert sent.params.keys() == {"netuid", "mecid", "commit", "reveal_round", "commit_reveal_version"}
    refusal(lambda: chain.set_weights({0: 1.0}), TransientError, Reason.CHAIN_RATE_LIMITED, "Retry in ~")
    substrate.reveal({0: 65535, 1: 32768})
    assert chain.weights_schedule().hidden == {}


def test_epochs_are_what_the_chain_says(chain, substrate):
    """The owner lowers the tempo, or starts an epoch: no formula over the block's number knows of it."""
    substrate.finalize()
    substrate.tempo, substrate.last_epoch = 720, 3
    assert (chain.weights_schedule().next_epoch, chain.weights_schedule().epoch_blocks) == (723, 720)
    substrate.pending_epoch = 400
    assert chain.weights_schedule().next_epoch == 400
    substrate.tempo = 50
    assert (chain.weights_schedule().next_epoch, chain.weights_schedule().epoch_blocks) == (53, 50)


REFUSED = [
    ("no permit", {}, {0: 1.0, 1: 1.0}, Reason.NO_VALIDATOR_PERMIT, "permit"),
    ("uids", {}, {0: 1.0, 5: 1.0, 9: 1.0}, Reason.WEIGHTS_MALFORMED, "uids [5, 9]"),
    ("count", {"MinAllowedWeights": 2}, {1: 1.0}, Reason.WEIGHTS_MALFORMED, "at least 2 weights"),
    ("largest", {"MaxWeightsLimit": 32768}, {0: 1.0, 1: 9.0}, Reason.WEIGHTS_MALFORMED, "uid 1 has 0.9000"),
    ("stake", {"StakeThreshold": 101 * 10**9}, {0: 1.0}, Reason.NOT_ENOUGH_STAKE, "needs 101"),
    ("registration", {}, {0: 1.0}, Reason.NOT_REGISTERED, "not registered"),
]


@pytest.mark.parametrize("hides", [True, False], ids=["commit-reveal", "plain"])
@pytest.mark.parametrize(("name", "rules", "weights", "cause", "words"), REFUSED, ids=[each[0] for each in REFUSED])
def test_weights_that_the_chain_would_drop_at_the_reveal_are_not_committed(
    chain, substrate, *, hides, name, rules, weights, cause, words
):
    """With commit-reveal the chain takes them, and says nothing when it drops them."""
    substrate.commit_reveal = hides
    substrate.settings |= rules
    if name == "no permit":
        substrate.set_stake(ADDRESS, 100.0, validator_permit=False)
    elif name == "registration":
        substrate.deregister(ADDRESS)
    with pytest.raises(ExtrinsicRefusedError) as caught:
        chain.set_weights(weights)
    assert (caught.value.cause, substrate.submissions) == (cause, [])
    assert words in caught.value.message


@pytest.mark.parametrize("exempt", ["itself", "the owner"])
def test_weights_that_the_chain_takes_by_an_exception_are_committed(chain, substrate, exempt):
    substrate.commit_reveal = True
    substrate.settings["MaxWeightsLimit"] = 32768 if exempt == "itself" else 65535
    if exempt == "the owner":
        substrate.settings |= {"SubnetOwnerHotkey": ADDRESS, "StakeThreshold": 10**15}
    substrate.set_stake(ADDRESS, 100.0, validator_permit=False)
    chain.set_weights({0: 1.0} if exempt == "itself" else {0: 1.0, 1: 2.0})
    assert len(substrate.submissions) == 1


def test_a_version_that_was_raised_after_the_commit_is_a_cause(chain, substrate, monkeypatch):
    sent, query = chain.block(), substrate.query

    async def versioned(module, name, params=None, block_hash=None):
        if name == "WeightsVersionKey":
            return 7 if substrate._number(block_hash) <= sent else 8
        return await query(module, name, params, block_hash)

    monkeypatch.setattr(substrate, "query", versioned)
    chain.wait_for_block(sent + 1)
    chain.check_weights({0: 1.0})
    with pytest.raises(ExtrinsicRefusedError, match="from 7 to 8") as caught:
        chain.check_weights({0: 1.0}, sent=sent)
    assert caught.value.cause is Reason.WEIGHTS_VERSION


def test_the_rules_of_the_subnet_are_those_that_owner_and_root_have_set(chain, substrate):
    assert chain.rules() == SubnetRules(435, "Yuma", True, True, False, 0, 50, 65535)
    substrate.commit_reveal, substrate.weights_rate_limit = True, 100
    substrate.settings |= {"SubnetEpochConsensus": {"Null": None}, "SubnetEmissionEnabled": False}
    assert chain.rules() == SubnetRules(435, "Null", True, False, True, 100, 50, 65535)


@pytest.mark.parametrize(("slot", "period", "seconds"), [(12_000, 6_000, 12.0), (None, 6_000, 12.0), (250, 125, 0.25)])
def test_the_block_time_has_a_second_source(slot, period, seconds, monkeypatch):
    """A runtime without Aura has no slot duration, and the SDK knows no other source."""
    substrate = open_substrate("ws://127.0.0.1:1", [])

    async def constant(module, name):
        return {("Aura", "SlotDuration"): slot, ("Timestamp", "MinimumPeriod"): period}[module, name]

    monkeypatch.setattr(substrate, "constant", constant)
    assert asyncio.run(substrate.block_time()) == seconds


def test_one_hotkey_submits_one_extrinsic_at_a_time(chain, substrate):
    chain.block()
    barrier = threading.Barrier(4)

    def submit(number):
        barrier.wait(60)
        chain.set_commitment(f"{number}" * 128)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(submit, range(4)))
    assert len(substrate.submissions) == 4
    assert substrate.most_submissions_at_once == 1


# Refusals, as the chain names them.


TRANSIENT = {
    Reason.CHAIN_RATE_LIMITED: "SettingWeightsTooFast CommittingWeightsTooFast RateLimitExceeded "
    "CommitmentSetRateLimitExceeded SpaceLimitExceeded CommitQueueFull TooManyUnrevealedCommits PriorityTooLow",
    Reason.CHAIN_NOT_NOW: "CallFiltered ColdkeySwapAnnounced ColdkeySwapDisputed CommitRevealDisabled "
    "CommitRevealEnabled DisabledTemporarily InvalidRevealRound BadProof SubtokenDisabled "
    "MultiBlockMigrationsOngoing",
    Reason.CHAIN_FATE_UNKNOWN: "Stale Usurped Dropped FinalityTimeout AlreadyImported AncientBirthBlock "
    "ExhaustsResources Future Invalid Retracted",
}
PERMANENT = {
    Reason.CHAIN_REFUSED: "BadSigner",
    Reason.BAD_ENVIRONMENT: "SubnetNotExists",
    Reason.CANNOT_PAY_FEES: "Payment",
    Reason.NOT_REGISTERED: "HotKeyNotRegisteredInSubNet HotKeyNotRegisteredInNetwork HotKeyAccountNotExists "
    "AccountNotAllowedCommit",
    Reason.NO_VALIDATOR_PERMIT: "NeuronNoValidatorPermit",
    Reason.NOT_ENOUGH_STAKE: "NotEnoughStakeToSetWeights StakeAmountTooLow",
    Reason.WEIGHTS_VERSION: "IncorrectWeightVersionKey IncorrectCommitRevealVersion",
    Reason.WEIGHTS_MALFORMED: "UidVecContainInvalidOne WeightVecLengthIsLow WeightVecNotEqualSize MaxWeightExceeded "
    "UidsLengthExceedUidsInSubNet DuplicateUids InputLengthsUnequal CommitPayloadTooLarge",
}


@pytest.mark.parametrize("is_transient", [True, False])
def test_a_refusal_has_the_reason_of_its_name_and_nothing_is_sent_twice(chain, substrate, is_transient):
    table = TRANSIENT if is_transient else PERMANENT
    for name, reason in ((name, reason) for reason, names in table.items() for name in names.split()):
        known = bt.ChainError("words", name)
        assert known.description or known.code is not bt.ErrorCode.UNKNOWN, name
        substrate.submissions.clear()
        for write in (lambda: chain.set_commitment("a" * 128), lambda: chain.set_weights({0: 1.0})):
            substrate.refuse_next(bt.ChainError(f"words of {name}", name))
            with pytest.raises(TransientError if is_transient else ExtrinsicRefusedError, match=name) as caught:
                write()
            found = (caught.value.reason, getattr(caught.value, "cause", None))
            assert found == ((reason, None) if is_transient else (Reason.CHAIN_REFUSED, reason)), name
            assert caught.value.__suppress_context__, "no traceback of the SDK is part of it"
        assert len(substrate.submissions) == 2


@pytest.mark.parametrize("error", ["SettingWeightsTooFast", None], ids=["chain", "preflight"])
def test_a_limit_on_weights_says_when_it_ends(chain, substrate, error):
    chain.set_weights({0: 1.0})
    last = substrate.versions[-1][0]
    substrate.weights_rate_limit = 100 if error is None else 0
    if error is not None:
        substrate.refuse_next(bt.ChainError("too fast", error))
    with pytest.raises(ExtrinsicLimitedError) as caught:
        chain.set_weights({1: 1.0})
    assert (caught.value.last_block, caught.value.next_block) == (last, last + substrate.weights_rate_limit)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.args, again.last_block, again.next_block) == (caught.value.args, last, caught.value.next_block)


def test_a_limit_that_cannot_be_read_is_a_limit_all_the_same(chain, substrate, monkeypatch):
    def offline(*arguments):
        substrate.offline = True
        return bt.ChainError("too fast", "SettingWeightsTooFast")

    monkeypatch.setattr(substrate, "_dispatch", offline)
    with pytest.raises(ExtrinsicLimitedError) as caught:
        chain.set_weights({0: 1.0})
    assert (caught.value.last_block, caught.value.next_block) == (None, None)


def test_a_refusal_without_a_name_leaves_the_fate_open(chain, substrate):
    substrate.refuse_next(bt.ChainError("Connection dropped while an extrinsic submission was in flight"))
    refusal(lambda: chain.set_commitment("a" * 128), TransientError, Reason.CHAIN_FATE_UNKNOWN, "fate is unknown")
    substrate.refuse_next(bt.ChainError("Invalid Transaction: Custom error: 250"))
    refusal(lambda: chain.set_commitment("a" * 128), PermanentError, Reason.CHAIN_REFUSED, "250")


# Connections that are lost.


def test_a_dead_network_is_transient_after_bounded_attempts_and_comes_back(chain, substrate, clock):
    newest = chain.block()
    substrate.drop_connection()
    substrate.offline = True
    began = clock.now()
    for call in (chain.block, chain.commitments, chain.weights, lambda: chain.set_commitment("a" * 128)):
        refusal(call, TransientError, Reason.CHAIN_UNREACHABLE, "3 times")
    assert 4 * 1.5 <= clock.now() - began <= 4 * 3.0  # pauses of 1 and 2 seconds, at least half of each
    substrate.offline = False
    assert chain.block() >= newest
    assert substrate.submissions == []


@pytest.mark.parametrize("included", [False, True])
def test_writes_survive_a_connection_lost_under_them_and_weights_are_sent_once(chain, substrate, included):
    substrate.exhaust_next_submission(included=included)
    chain.set_commitment("a" * 128)
    assert chain.commitments() == {ADDRESS: "a" * 128}
    substrate.weights_rate_limit = 100
    substrate.exhaust_next_submission(included=included)
    chain.set_weights({0: 1.0})
    assert chain.weights() == {0: {0: 1.0}}
    assert [sent.function for sent in substrate.submissions].count("set_mechanism_weights") == 1


@pytest.mark.parametrize("included", [False, True])
def test_a_connection_cut_while_a_submission_is_watched_leaves_its_fate_open(chain, substrate, included):
    """The SDK reports it as a failed result whose error has no name."""
    for write in (lambda: chain.set_commitment("a" * 128), lambda: chain.set_weights({0: 1.0})):
        substrate.lose_next_submission(included=included)
        refusal(write, TransientError, Reason.CHAIN_FATE_UNKNOWN, "fate is unknown")
    assert chain.commitments() == ({ADDRESS: "a" * 128} if included else {})
    assert chain.weights() == ({0: {0: 1.0}} if included else {})


def test_an_endpoint_that_refuses_traffic_is_not_asked_again_at_once(chain, substrate, monkeypatch, clock):
    async def refuse():
        substrate.requests.append("refused")
        raise bt.RpcPolicyError("HTTP 429", status_code=429, retry_after="30")

    chain.block()
    monkeypatch.setattr(substrate, "finalized_block_number", refuse)
    began = clock.now()
    refusal(chain.block, TransientError, Reason.CHAIN_RATE_LIMITED, "retry after 30")
    assert substrate.requests.count("refused") == 1
    assert clock.now() == began


def test_a_connection_that_opens_half_way_is_closed(chain, substrate, monkeypatch):
    async def refuse(*args, **kwargs):
        raise bt.RpcConnectionError("gone again")

    with monkeypatch.context() as patch:
        patch.setattr(substrate, "query_map", refuse)  # the SDK reads a map to finish its connection
        refusal(chain.block, TransientError, Reason.CHAIN_UNREACHABLE, "gone again")
    assert substrate.connects == substrate.closes == 3
    assert chain.block() > 0
    assert substrate.connects == substrate.closes + 1


# Finality.


def test_an_endpoint_that_is_behind_does_not_turn_time_back(chain, substrate):
    newest = chain.block()
    graph = chain.metagraph()
    substrate.finalized_behind = 1
    assert chain.block() == newest
    assert chain.head() >= newest
    assert chain.metagraph() == graph


def test_waiting_for_a_block_is_not_waiting_for_its_finality(chain, substrate, clock):
    target = chain.head() + 3
    chain.wait_for_block(target, finalized=False)
    assert chain.head() == target
    assert chain.block() == target - substrate.finality_lag
    refusal(lambda: chain.block_time(target), PermanentError, Reason.BLOCK_UNKNOWN, "not final")
    chain.wait_for_block(target)
    assert chain.block_time(target) == substrate.time_of(target)
    assert clock.now() - substrate.time_of(target + substrate.finality_lag) <= 1.0  # the poll


def test_final_blocks_are_asked_for_once_and_stamped_to_the_millisecond(chain, substrate):
    substrate.genesis += 0.123
    number = chain.block()
    first = (chain.block_time(number), chain.block_hash(number), chain.metagraph(number))
    assert first[0] == round(substrate.time_of(number) * 1000) / 1000
    asked = len(substrate.requests)
    assert (chain.block_time(number), chain.block_hash(number), chain.metagraph(number)) == first
    assert len(substrate.requests) == asked


# What is read.


def test_metagraph_and_weights_are_those_of_the_runtime_and_pruned_ones_are_unknown(chain, substrate):
    state = substrate.next_state()
    state.neurons[1] = Neuron(OTHER, 1_500_000_001, False, 0, incentive_u16=13107)
    state.weights = {1: [], 0: [[1, 3], [0, 1]]}
    substrate.finalize()
    one, other = chain.metagraph().neurons
    assert (one.uid, one.hotkey, one.stake, one.validator_permit, one.incentive) == (0, ADDRESS, 100.0, True, 0.0)
    assert (other.uid, other.stake, other.validator_permit, other.incentive) == (1, 1.500000001, False, 0.2)
    assert chain.weights() == {0: {0: 0.25, 1: 0.75}}  # without empty rows
    substrate.state_kept_from = chain.block()
    refusal(lambda: chain.metagraph(chain.block() - 1), PermanentError, Reason.BLOCK_UNKNOWN, "archive")


def test_hash_and_time_of_a_block_need_none_of_its_state(chain, open_chain, substrate):
    substrate.genesis += 0.123
    pruned, number = open_chain(), chain.block() - 1
    whole = (chain.block_time(number), chain.block_hash(number))
    substrate.state_kept_from = number + 1
    assert (pruned.block_time(number), pruned.block_hash(number)) == whole
    substrate.keeps_bodies = False
    assert pruned.block_time(number + 1) == substrate.time_of(number + 1), "the state has it, too"
    refusal(lambda: pruned.block_time(number - 1), PermanentError, Reason.BLOCK_UNKNOWN, "archive")
    assert pruned.block_hash(number - 1) == substrate.hash_of(number - 1)


def test_an_unknown_network_or_subnet_is_named(open_chain):
    refusal(lambda: BittensorChain("nowhere", 1), PermanentError, Reason.BAD_ENVIRONMENT, "nowhere")
    elsewhere = open_chain(WALLET, netuid=77)
    for call in (
        elsewhere.metagraph,
        elsewhere.commitments,
        elsewhere.weights,
        lambda: elsewhere.set_commitment("a" * 128),
        lambda: elsewhere.set_weights({0: 1.0}),
    ):
        refusal(call, PermanentError, Reason.BAD_ENVIRONMENT, "no subnet 77")


def test_a_coldkey_that_cannot_pay_is_named_with_what_it_has(chain, substrate):
    chain.require_fees()
    substrate.free_rao, substrate.fee_rao = 1_000, 140_000
    refusal(chain.require_fees, PermanentError, Reason.CANNOT_PAY_FEES, "0.000001000", "0.000140000", "coldkey 5C4h")


# Endpoints.


@pytest.fixture
def endpoints(clock):
    """Three endpoints of one chain, and a chain that uses them in this order."""
    substrates = {f"ws://{name}:9944": MemorySubstrate(clock, netuid=NETUID) for name in ("one", "two", "three")}
    for substrate in substrates.values():
        substrate.register(ADDRESS)
    limits = CallLimits(attempts=3, connect_seconds=0.2, read_seconds=0.2, backoff_seconds=1.0)
    chain = BittensorChain(
        ", ".join(substrates), NETUID, substrates=lambda url, _: substrates[url], clock=clock, limits=limits
    )
    yield chain, list(substrates.values())
    chain.close()


def connected(substrates):
    return [substrate.connected for substrate in substrates]


def test_endpoints_of_another_chain_or_far_behind_are_left(endpoints, clock, caplog):
    chain, substrates = endpoints
    substrates[1].seed = "another chain"
    substrates[2].stands_still_at = clock.now()
    clock.sleep_until(clock.now() + 1000)
    assert chain.block() > 0
    for substrate in substrates[:2]:
        substrate.drop_connection()
    assert chain.block() > 0
    assert connected(substrates) == [True, False, False]
    for words in ("ws://two:9944: reading", "another chain", "ws://three:9944: reading", "its newest block is"):
        assert words in caplog.text


def test_an_endpoint_whose_final_blocks_are_behind_is_left(endpoints, caplog):
    """What it shows of a block that is final elsewhere may be of a fork."""
    chain, substrates = endpoints
    newest = chain.block()
    substrates[1].finalized_behind = 2
    substrates[0].drop_connection()
    assert chain.block_time(newest) > 0
    assert chain.block() == newest
    assert not substrates[1].connected
    assert f"its newest final block is {newest - 2}, and {newest} is final already" in caplog.text


def test_a_chain_that_stands_still_everywhere_can_be_read(endpoints, clock, caplog):
    chain, substrates = endpoints
    for substrate in substrates:
        substrate.stands_still_at = clock.now()
    clock.sleep_until(clock.now() + 1000)
    assert chain.block() > 0
    assert "as everywhere" in caplog.text


def test_a_head_that_stands_still_while_it_is_waited_for_is_left(endpoints, clock, caplog):
    chain, substrates = endpoints
    target = chain.head() + 5
    substrates[0].stands_still_at = clock.now()
    chain.wait_for_block(target, finalized=False)
    assert connected(substrates) == [False, True, False]
    assert "has been the newest one for" in caplog.text


def test_commitments_of_another_form_are_ignored(chain, substrate):
    chain.set_commitment("a" * 128)
    for fields in (
        SHAPES["CommitmentOf"]["info"]["fields"],  # as recorded: five bytes
        [{"Raw127": "0x" + "61" * 127}],
        [{"BigRaw": "0x" + "61" * 128}],
        [{"Raw128": "0x" + "61" * 128}, {"Raw1": "0x61"}],
        [{"Raw128": "0x" + "61" * 127 + "ff"}],
        [{"Raw128": None}],
        [{"Raw128": "0xzz"}],
        ["None"],
        [],
        None,
    ):
        substrate.next_state().commitments[OTHER] = SHAPES["CommitmentOf"] | {"info": {"fields": fields}}
        substrate.finalize()
        assert chain.commitments() == {ADDRESS: "a" * 128}, fields


def test_an_answer_that_makes_no_sense_is_permanent_and_named(chain, substrate, monkeypatch):
    async def nonsense(*args, **kwargs):
        return {"hotkeys": ["only this"]}

    monkeypatch.setattr(substrate, "runtime_call", nonsense)
    refusal(chain.metagraph, PermanentError, Reason.CHAIN_REFUSED, "the metagraph at block", "cannot make sense")


def test_a_real_endpoint_that_takes_connections_and_says_nothing_is_left(clock, caplog):
    limits = CallLimits(attempts=2, connect_seconds=0.5)
    with serve(lambda socket: socket.recv(), "127.0.0.1", 0) as server:
        listening = threading.Thread(target=server.serve_forever)
        listening.start()
        silent = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        chain = BittensorChain(f"{silent}, ws://127.0.0.1:1", NETUID, clock=clock, limits=limits)
        refusal(chain.block, TransientError, Reason.CHAIN_UNREACHABLE, f"{silent}: ", "no connection within 0.5 s")
        chain.close()
        server.shutdown()
        listening.join()
    assert "chain ws://127.0.0.1:1: " in caplog.text
    assert "Traceback" not in caplog.text
