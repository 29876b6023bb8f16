"""A subnet in memory, below the real SDK: it answers in the shapes that a real runtime was recorded with.

`bt.Subtensor(substrate=...)` composes, plans and decodes against it as against a websocket. It records every extrinsic,
applies it under the chain's own rules, and lets the simulated clock run until the extrinsic is final.
"""

import asyncio
import copy
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bittensor as bt

SHAPES = json.loads((Path(__file__).parent / "chain_shapes.json").read_text())
COLUMNS = {
    "coldkeys": "5C4hrfjw9DjXZTzV3MwzrrAr9P1MJhSrvWGWqi1eSuyUpnhM",
    "identities": None,
    "active": True,
    **dict.fromkeys(["pruning_score", "emission", "dividends", "consensus", "trust", "rank", "tao_stake"], 0),
}
"""Per-neuron columns of the metagraph that say nothing here."""


@dataclass
class KeyPairWallet:
    hotkey: Any

    @property
    def coldkey(self):
        return self.hotkey

    coldkeypub = hotkeypub = coldkey


@dataclass
class Neuron:
    hotkey: str
    stake_rao: int
    permit: bool
    registered_at: int
    incentive_u16: int = 0
    last_update: int = 0
    axon: dict[str, int] = field(default_factory=lambda: dict(SHAPES["metagraph_raw"]["axons"][0]))


@dataclass
class State:
    neurons: list[Neuron | None] = field(default_factory=list)
    commitments: dict[str, dict[str, Any]] = field(default_factory=dict)
    weights: dict[int, list[list[int]]] = field(default_factory=dict)
    hidden: list[tuple[str, int, str, int]] = field(default_factory=list)
    """Hotkey, block, ciphertext and round of each commit that is not revealed."""

    def uid(self, hotkey):
        return next((uid for uid, neuron in enumerate(self.neurons) if neuron and neuron.hotkey == hotkey), None)


@dataclass(frozen=True)
class Submission:
    module: str
    function: str
    params: dict[str, Any]
    signer: str


@dataclass(frozen=True)
class ComposedCall:
    call_module: str
    call_function: str
    params: dict[str, Any]


class MemorySubstrate:
    """Implements what the SDK needs of `bt.Substrate`.

    Blocks come by the clock; the newest `finality_lag` of them are not final. `offline`, `stands_still_at`,
    `drop_connection`, `refuse_next`, `lose_next_submission` and `exhaust_next_submission` break it in the ways that a
    network breaks (`failures` of the recorded shapes).
    """

    def __init__(self, clock, *, netuid, block_seconds=12.0, finality_lag=2):
        self.clock = clock
        self.netuid = netuid
        self.block_seconds = block_seconds
        self.finality_lag = finality_lag
        self.weights_rate_limit = 0
        self.commit_reveal = False
        self.tempo: int = SHAPES["metagraph_raw"]["tempo"]
        self.last_epoch: int | None = None
        """Block of the last epoch; by default they come every `tempo` blocks."""
        self.pending_epoch = 0
        self.settings: dict[str, Any] = {
            "StakeThreshold": 0,
            "SubnetOwnerHotkey": COLUMNS["coldkeys"],
            "SubnetEpochConsensus": "Yuma",
            "SubtokenEnabled": True,
            "SubnetEmissionEnabled": True,
            "ServingRateLimit": 50,
            "MinAllowedWeights": SHAPES["metagraph_raw"]["min_allowed_weights"],
            "MaxWeightsLimit": SHAPES["metagraph_raw"]["max_weights_limit"],
        }
        """What owner and root have set, by the storage item in the pallet SubtensorModule."""
        self.weights_version = 0
        self.free_rao, self.fee_rao = 10**9, 0
        self.seed = "memory substrate"
        self.stands_still_at: float | None = None
        self.keeps_bodies = True
        self.genesis = clock.now() - finality_lag * block_seconds
        self.versions: list[tuple[int, State]] = [(0, State())]
        self.submissions: list[Submission] = []
        self.requests: list[str] = []
        self.connects = 0
        self.closes = 0
        self.connected = False
        self.offline = False
        self.finalized_behind = 0
        self.state_kept_from = 0
        self._refusal: Exception | bt.ChainError | None = None
        self._lose: str | None = None
        self._submitting = 0
        self.most_submissions_at_once = 0
        self._numbers: dict[str, int] = {}

    # What tests do to it.

    def drop_connection(self):
        """The websocket dies: everything fails until somebody connects again."""
        self.connected = False

    def refuse_next(self, error):
        self._refusal = error

    def lose_next_submission(self, *, included):
        """The connection dies while the next extrinsic is watched, before or after the chain took it."""
        self._lose = "after" if included else "before"

    def exhaust_next_submission(self, *, included):
        """The same, and no endpoint answers any more."""
        self._lose = "after for good" if included else "before for good"

    def head_number(self):
        now = self.clock.now() if self.stands_still_at is None else min(self.stands_still_at, self.clock.now())
        return int((now - self.genesis) / self.block_seconds + 1e-9)

    def time_of(self, number):
        return self.genesis + number * self.block_seconds

    def hash_of(self, number):
        hash_ = "0x" + hashlib.sha256(f"{self.seed} {number}".encode()).hexdigest()
        self._numbers[hash_] = number
        return hash_

    def state_at(self, number):
        return next(state for since, state in reversed(self.versions) if since <= number)

    def next_state(self):
        """A copy of the newest state, to be changed; it is that of the next block."""
        number = self.head_number() + 1
        state = copy.deepcopy(self.versions[-1][1])
        self.versions.append((number, state))
        return state

    def reveal(self, weights=None, *, uid=0, before=None):
        """Reveal all commits, or those before a block: the last one set these 16-bit weights; None drops them."""
        state = self.next_state()
        state.hidden = [commit for commit in state.hidden if before is not None and commit[1] >= before]
        if weights is not None:
            state.weights[uid] = [list(pair) for pair in weights.items()]
        self.finalize()

    def finalize(self):
        """Let the clock run until the newest change is final."""
        self.clock.sleep_until(self.time_of(self.versions[-1][0] + self.finality_lag))

    def register(self, hotkey, *, stake=0.0, validator_permit=False):
        neuron = Neuron(hotkey, round(stake * 1e9), validator_permit, self.head_number() + 1)
        state = self.next_state()
        if None in state.neurons:
            uid = state.neurons.index(None)
            state.neurons[uid] = neuron
        else:
            uid = len(state.neurons)
            state.neurons.append(neuron)
        self.finalize()
        return uid

    def deregister(self, hotkey):
        state = self.next_state()
        uid = state.uid(hotkey)
        assert uid is not None
        state.neurons[uid] = None
        state.weights.pop(uid, None)
        self.finalize()

    def set_stake(self, hotkey, stake, *, validator_permit=None):
        neuron = self._neuron(self.next_state(), hotkey)
        assert neuron is not None
        neuron.stake_rao = round(stake * 1e9)
        neuron.permit = neuron.permit if validator_permit is None else validator_permit
        self.finalize()

    # What the SDK asks of it.

    def balance(self, rao, netuid=0):
        return bt.Balance(rao, netuid)

    async def connect(self):
        if self.offline:
            raise bt.RpcConnectionError("could not connect to any endpoint: refused")
        self.connects += not self.connected
        self.connected = True

    async def close(self):
        self.closes += self.connected
        self.connected = False

    async def _request(self, name):
        self.requests.append(name)
        if self.offline or not self.connected:
            raise bt.RpcConnectionError("RPC request failed after exhausting endpoint retries")

    async def block_number(self):
        await self._request("block_number")
        return self.head_number()

    async def finalized_block_number(self):
        await self._request("finalized_block_number")
        return self.head_number() - self.finality_lag - self.finalized_behind

    async def block_hash(self, block=None):
        await self._request("block_hash")
        number = self.head_number() if block is None else block
        if not 0 <= number <= self.head_number():
            raise bt.ChainError(f"no block at height {number}")
        return self.hash_of(number)

    async def block_time(self):
        await self._request("block_time")
        return self.block_seconds

    async def spec_version(self):
        await self._request("spec_version")
        return 435

    async def stored_block(self, block_hash):
        await self._request("stored_block")
        number = self._numbers[block_hash]
        milliseconds = round(self.time_of(number) * 1000).to_bytes(6, "little")
        inherent = "0x280402000b" + milliseconds.hex()
        return {"header": {"number": hex(number)}, "extrinsics": [inherent]} if self.keeps_bodies else None

    async def query(self, module, storage_function, params=None, block_hash=None):
        await self._request(f"query {module}.{storage_function}")
        number = self._number(block_hash)
        state = self.state_at(number)
        arguments = params or []
        values = {
            "Timestamp.Now": lambda: round(self.time_of(number) * 1000),
            "SubtensorModule.Uids": lambda: state.uid(arguments[1]),
            "SubtensorModule.LastUpdate": lambda: [neuron.last_update if neuron else 0 for neuron in state.neurons],
            "SubtensorModule.NetworksAdded": lambda: arguments[0] == self.netuid,
            "SubtensorModule.Owner": lambda: COLUMNS["coldkeys"],
            "SubtensorModule.WeightsVersionKey": lambda: self.weights_version,
            "System.Account": lambda: {"data": {"free": self.free_rao}},
            "SubtensorModule.WeightsSetRateLimit": lambda: self.weights_rate_limit,
            "SubtensorModule.CommitRevealWeightsEnabled": lambda: self.commit_reveal,
            "SubtensorModule.RevealPeriodEpochs": lambda: SHAPES["metagraph_raw"]["commit_reveal_period"],
            "SubtensorModule.Tempo": lambda: self.tempo,
            "SubtensorModule.LastEpochBlock": lambda: self._last_epoch(number),
            "SubtensorModule.PendingEpochAt": lambda: self.pending_epoch,
            "SubtensorModule.SubnetEpochIndex": lambda: number // self.tempo,
            "SubtensorModule.BlocksSinceLastStep": lambda: number - self._last_epoch(number),
            "SubtensorModule.ValidatorPermit": lambda: [bool(each and each.permit) for each in state.neurons],
        }
        if module == "SubtensorModule" and storage_function in self.settings:
            return self.settings[storage_function]
        return values[f"{module}.{storage_function}"]()

    def _last_epoch(self, number):
        return number // self.tempo * self.tempo if self.last_epoch is None else self.last_epoch

    async def query_map(self, module, storage_function, params=None, block_hash=None):
        await self._request(f"query_map {module}.{storage_function}")
        state = self.state_at(self._number(block_hash))
        match f"{module}.{storage_function}":
            case "SubtensorModule.TokenSymbol":
                return [(self.netuid, "0x" + SHAPES["metagraph_raw"]["symbol"].encode().hex())]
            case "Commitments.CommitmentOf":
                return list(copy.deepcopy(state.commitments).items())
            case "SubtensorModule.TimelockedWeightCommits":
                epochs = {block // self.tempo: [] for _, block, _, _ in state.hidden}  # type: dict[int, list[Any]]
                for commit in state.hidden:
                    epochs[commit[1] // self.tempo].append(commit)
                return list(epochs.items())
            case "SubtensorModule.Weights":
                return list(copy.deepcopy(state.weights).items())
        raise AssertionError(f"nobody taught this chain {module}.{storage_function}")

    async def query_batch(self, module, storage_function, param_sets, block_hash=None):
        return [await self.query(module, storage_function, params, block_hash) for params in param_sets]

    async def runtime_call(self, api, method, params, block_hash=None):
        await self._request(f"runtime_call {api}.{method}")
        number = self._number(block_hash)
        if method == "get_next_epoch_start_block":
            following = self._last_epoch(number) + self.tempo
            return min(following, self.pending_epoch) if self.pending_epoch else following
        assert (api, method) == ("SubnetInfoRuntimeApi", "get_metagraph")
        if params[0] != self.netuid:
            return None
        neurons = [neuron or Neuron("5C4hrfjw9DjXZTzV3MwzrrAr9P1MJhSrvWGWqi1eSuyUpnhM", 0, False, 0)
                   for neuron in self.state_at(number).neurons]  # fmt: skip
        return copy.deepcopy(SHAPES["metagraph_raw"]) | {
            "netuid": self.netuid,
            "block": number,
            "num_uids": len(neurons),
            "hotkeys": [neuron.hotkey for neuron in neurons],
            "validator_permit": [neuron.permit for neuron in neurons],
            "last_update": [neuron.last_update for neuron in neurons],
            "axons": [neuron.axon for neuron in neurons],
            "block_at_registration": [neuron.registered_at for neuron in neurons],
            "incentives": [neuron.incentive_u16 for neuron in neurons],
            "alpha_stake": [neuron.stake_rao for neuron in neurons],
            "total_stake": [neuron.stake_rao for neuron in neurons],
            **{name: [value] * len(neurons) for name, value in COLUMNS.items()},
        }

    async def compose(self, call):
        await self._request("compose")
        module, function, params = call
        return ComposedCall(module, function, dict(params))

    async def estimate_fee(self, call, keypair):
        await self._request("estimate_fee")
        return bt.Balance(self.fee_rao)

    async def submit(
        self, call, keypair, *, nonce=None, period=None, wait_for_inclusion=True, wait_for_finalization=True
    ):
        await self._request("submit")
        assert wait_for_inclusion, "an outcome that nobody waits for is not known"
        self._submitting += 1
        self.most_submissions_at_once = max(self.most_submissions_at_once, self._submitting)
        await asyncio.sleep(0.001)  # lets another one in, if nobody keeps it out
        self._submitting -= 1
        lose, self._lose = self._lose, None
        if lose is not None and lose.startswith("before"):
            return self._lost(for_good=lose.endswith("for good"))
        self.submissions.append(Submission(call.call_module, call.call_function, call.params, keypair.ss58_address))
        error, self._refusal = self._refusal, None
        error = error or self._dispatch(call, keypair.ss58_address)
        if lose is not None:
            self.finalize()
            return self._lost(for_good=lose.endswith("for good"))
        if error is not None:
            return bt.ExtrinsicResult(success=False, message=str(error), error=error)
        included = self.versions[-1][0]
        self.clock.sleep_until(self.time_of(included + (self.finality_lag if wait_for_finalization else 0)))
        return bt.ExtrinsicResult(
            success=True, message="Success", block_hash=self.hash_of(included), events=SHAPES["events"]
        )

    def _lost(self, *, for_good):
        self.drop_connection()
        if for_good:
            raise bt.RpcConnectionError("RPC request failed after exhausting endpoint retries")
        error = bt.ChainError("Connection lost while waiting for a subscription response")
        return bt.ExtrinsicResult(success=False, message=error.message, error=error)

    # The chain's rules.

    def _dispatch(self, call, signer):
        newest = self.versions[-1][1]
        uid = newest.uid(signer)
        params = call.params
        assert params["netuid"] == self.netuid
        match call.call_module, call.call_function:
            case "Commitments", "set_commitment":
                return self._commit(signer, uid, params["info"])
            case "SubtensorModule", "serve_axon":
                return self._serve(signer, uid, {name: value for name, value in params.items() if name != "netuid"})
        return self._weigh(call, signer, uid)

    def _weigh(self, call, signer, uid):
        newest, params = self.versions[-1][1], call.params
        verb = "commit_timelocked_mechanism_weights" if self.commit_reveal else "set_mechanism_weights"
        assert (call.call_module, call.call_function) == ("SubtensorModule", verb)
        neuron = None if uid is None else newest.neurons[uid]
        if neuron is None:
            return bt.ChainError("The hotkey is not registered.", "HotKeyNotRegisteredInSubNet")
        if not neuron.permit and not self.commit_reveal:  # a commit is looked at when it is revealed
            return bt.ChainError("The caller lacks a permit.", "NeuronNoValidatorPermit")
        if params.get("version_key", self.weights_version) < self.weights_version:
            return bt.ChainError("Weights of an older version.", "IncorrectWeightVersionKey")
        dests = params.get("dests", [])
        if any(dest >= len(newest.neurons) or newest.neurons[dest] is None for dest in dests):
            return bt.ChainError("A uid is not there.", "UidVecContainInvalidOne")
        state = self.next_state()
        assert uid is not None
        if self.commit_reveal:
            commit = params["commit"]
            text = commit if isinstance(commit, str) else "0x" + bytes(commit).hex()
            state.hidden.append((signer, self.versions[-1][0], text, params["reveal_round"]))
        else:
            state.weights[uid] = [list(pair) for pair in zip(dests, params["weights"], strict=True)]
        changed = self._neuron(state, signer)
        assert changed is not None
        changed.last_update = self.versions[-1][0]
        return None

    def _commit(self, signer, uid, info):
        ((one,),) = info["fields"]
        ((variant, value),) = one.items()
        assert variant == f"Raw{len(bytes.fromhex(value.removeprefix('0x')))}", "the runtime has no such variant"
        if uid is None:
            return bt.ChainError("Account is not allowed to make commitments.", "AccountNotAllowedCommit")
        state = self.next_state()
        state.commitments[signer] = SHAPES["CommitmentOf"] | {
            "block": self.versions[-1][0],
            "info": {"fields": [{variant: value}]},
        }
        return None

    def _serve(self, signer, uid, axon):
        recorded = SHAPES["metagraph_raw"]["axons"][0]
        assert axon.keys() == recorded.keys() - {"block"}, "the runtime has no such call"
        assert axon["port"], "the runtime refuses port 0"
        assert axon["ip_type"] in (4, 6)
        if uid is None:
            return bt.ChainError("The hotkey is not registered.", "HotKeyNotRegisteredInNetwork")
        changed = self._neuron(self.next_state(), signer)
        assert changed is not None
        changed.axon = {"block": self.versions[-1][0], **axon}
        return None

    def _neuron(self, state, hotkey):
        uid = state.uid(hotkey)
        return None if uid is None else state.neurons[uid]

    def _number(self, block_hash):
        number = self.head_number() if block_hash is None else self._numbers[block_hash]
        if number < self.state_kept_from:
            raise bt.ChainError(
                f"State discarded for {block_hash}. This indicates the block is too old, and you should instead make "
                "this request using an archive node."
            )
        return number
