"""The real chain: a Bittensor subnet through SDK 11.

Everything is read from finalized blocks, and a write returns once it is final, so that it can be read back. No type or
exception of the SDK leaves this module.

Endpoints are an ordered list. One that does not answer, refuses traffic, serves another chain or is far behind is left
for the next one, which stays in use until it fails in turn.
"""

import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import bittensor as bt
from bittensor import settings as bt_settings

from templar.chain.base import Clock, Metagraph, NeuronInfo, Role, SubnetRules, WeightsSchedule
from templar.chain.clock import SystemClock
from templar.chain.extrinsics import (
    ExtrinsicLimitedError,
    announced_role,
    check_commitment,
    commitment_info,
    commitment_text,
    inherent_time,
    quantise_weights,
    read_rules,
    read_schedule,
    refusal,
    require_accepted,
    role_record,
)
from templar.chain.hotkey import Hotkey, Password, load_hotkey
from templar.chain.remote import (
    STANDSTILL_BLOCKS,
    CallLimits,
    Connection,
    ConnectionLostError,
    EndpointRefusesError,
    FinalizedChain,
    public_address,
)
from templar.errors import PermanentError, Reason, TransientError

log = logging.getLogger(__name__)

_SUBTENSOR = "SubtensorModule"
# Words of the SDK's errors.
_PRUNED = "State discarded"
_NO_BLOCK = "no block at height"

T = TypeVar("T")


class _Substrate(bt.RpcSubstrate):
    """Chain access through one endpoint, with the blocks as they are stored."""

    async def block_time(self) -> float:
        """Seconds per block: of Aura, or of a runtime without it twice the least time between two blocks."""
        if self._block_time is None:
            slot = await self.constant("Aura", "SlotDuration")
            period = 2 * int(await self.constant("Timestamp", "MinimumPeriod")) if slot is None else int(slot)
            self._block_time = period / 1000
        return self._block_time

    async def stored_block(self, block_hash: str) -> dict[str, Any] | None:
        """A block's header and its extrinsics in hex, which needs none of its state; None if it is not there."""
        found: dict[str, Any] | None = await self._read(
            lambda raw: raw._session.request("chain_getBlock", [block_hash])
        )
        return None if found is None else found["block"]


def open_substrate(endpoint: str, archives: Sequence[str]) -> _Substrate:
    """Chain access through one endpoint; `archives` are asked for state that it has pruned."""
    return _Substrate(endpoint, fallback_endpoints=[], archive_endpoints=list(archives))


@dataclass(frozen=True)
class _Link:
    """One connection: the SDK's client and the chain access below it, which alone returns block hashes."""

    client: bt.Client
    substrate: _Substrate


class BittensorChain(FinalizedChain):
    """A subnet of Bittensor; implements `templar.chain.base.Chain`. Safe under threads.

    Args:
        network: A network's name (`finney`, `test`, `local`) or a `ws://` or `wss://` endpoint, or several of them in
            the order in which they are used, separated by commas. A name stands for all of its known endpoints.
        netuid: The subnet.
        archives: Endpoints, separated by commas, that are asked for state that others have pruned; those that are
            known of a named network are used besides.
        wallet: Its hotkey commits and sets weights; None for a reader. See `open_wallet`.
        substrates: Opens the chain access through an endpoint, given the archives as well.
        clock: Clock of waits and pauses; the machine's clock by default.
        limits: Of each call.

    Raises:
        PermanentError: `bad_environment`; there is no such network.
    """

    def __init__(
        self,
        network: str,
        netuid: int,
        *,
        archives: str = "",
        wallet: bt.KeyedWallet | None = None,
        substrates: Callable[[str, Sequence[str]], Any] = open_substrate,
        clock: Clock | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        self._endpoints, known_archives, self._genesis = _resolve(network)
        self._archives = _distinct([*_resolve(archives)[0], *known_archives] if archives else known_archives)
        self._left = 0  # how often an endpoint was left: says which one is the current one
        self._behind: set[str] = set()  # endpoints that were far behind, until one is not
        self._netuid = netuid
        self._wallet = wallet
        self._substrates = substrates
        self._limits = limits or CallLimits()
        super().__init__(clock or SystemClock())
        self._connection = Connection(
            f"chain {public_address(self._endpoint)}",
            self._connect,
            lambda link: link.client.close(),
            leave=self._next_endpoint,
            clock=self._clock,
            limits=replace(self._limits, attempts=max(self._limits.attempts, 1 + len(self._endpoints))),
        )
        self._submitting = threading.Lock()
        self._block_seconds: float | None = None

    @property
    def netuid(self) -> int:
        """The subnet."""
        return self._netuid

    @property
    def block_seconds(self) -> float:
        """Seconds between two blocks, by the chain's runtime; read once."""
        if self._block_seconds is None:
            self._block_seconds = self._read("the block time", lambda link: link.client.block_time())
        return self._block_seconds

    def close(self) -> None:
        """Close the connection. The chain can be used again afterwards."""
        self._connection.close()

    def _read_finalized(self) -> int:
        return self._read("the newest finalized block", lambda link: link.client.finalized_block())

    def _read_head(self) -> int:
        return self._read("the newest block", lambda link: link.client.block())

    def _read_hash(self, number: int) -> str:
        return self._read(f"the hash of block {number}", lambda link: link.substrate.block_hash(number))

    def _read_time(self, number: int, *, finalized: bool) -> float:
        async def read(link: _Link) -> float:
            # A block outlives its state, and its first extrinsic sets the time.
            block = await link.substrate.stored_block(await link.substrate.block_hash(number))
            time = None if block is None else inherent_time(block["extrinsics"])
            return int(await link.client.query(("Timestamp", "Now"), block=number)) / 1000 if time is None else time

        return self._read(f"the time of block {number}", read, _read_error if finalized else _head_error)

    def _leave_endpoint(self, reason: str) -> None:
        self._connection.leave(reason)

    def _read_metagraph(self, number: int) -> Metagraph:
        async def read(link: _Link) -> tuple[bt.Metagraph | None, dict[str, str]]:
            graph = await link.client.subnets.metagraph(self._netuid, block=number, commitments=False)
            return graph, await self._commitments_at(link, number)

        graph, commitments = self._read(f"the metagraph at block {number}", read)
        if graph is None:
            raise PermanentError(Reason.BAD_ENVIRONMENT, f"netuid: there is no subnet {self._netuid} at block {number}")
        neurons = tuple(
            NeuronInfo(
                neuron.uid,
                neuron.hotkey,
                neuron.total_stake.amount,
                neuron.validator_permit,
                neuron.incentive,
                commitments.get(neuron.hotkey),
                announced_role(graph.raw["axons"][neuron.uid]),
                int(graph.raw["block_at_registration"][neuron.uid]),
            )
            for neuron in graph.neurons
        )
        return Metagraph(number, neurons)

    def commitments(self) -> dict[str, str]:
        """Each hotkey's newest commitment; commitments of another form are ignored."""
        number = self.block()
        return self._read("the commitments", lambda link: self._commitments_at(link, number))

    async def _commitments_at(self, link: _Link, number: int) -> dict[str, str]:
        rows = await link.client.query_map(("Commitments", "CommitmentOf"), [self._netuid], block=number)
        found = {str(hotkey): commitment_text(record) for hotkey, record in rows}
        return {hotkey: text for hotkey, text in found.items() if text is not None}

    def set_commitment(self, data: str) -> None:
        """Commit under the own hotkey; returns once that is final."""
        check_commitment(data)
        info = commitment_info(data)
        self._sign("setting the commitment", bt.calls.Commitments.set_commitment(netuid=self._netuid, info=info))

    def set_role(self, role: Role) -> None:
        """Announce the own hotkey's role, in place of an axon; returns once that is final."""
        call = bt.calls.SubtensorModule.serve_axon(netuid=self._netuid, **role_record(role))
        self._sign("announcing the role", call)

    def _sign(self, what: str, call: Any) -> None:
        wallet = self._own_wallet()
        self._submit(what, lambda link: link.client.submit_call(call, wallet, signer="hotkey"))

    def weights(self) -> dict[int, dict[int, float]]:
        """For each validator uid that set weights: miner uid -> weight, summing to 1."""
        number = self.block()

        async def read(link: _Link) -> dict[int, dict[int, float]]:
            snapshot = await link.client.at(number)
            rows: dict[int, dict[int, float]] = await snapshot.read("weights", netuid=self._netuid)
            return {uid: dict(sorted(row.items())) for uid, row in rows.items() if row}

        return self._read("the weights", read)

    def weights_schedule(self) -> WeightsSchedule:
        """When set weights take effect, and which ones are hidden."""
        number = self.block()

        async def read(link: _Link) -> WeightsSchedule:
            return await read_schedule(await link.client.at(number), self._netuid)

        return self._read("when weights are shown", read)

    def rules(self) -> SubnetRules:
        """The settings of owner and root for the subnet."""
        number = self.block()

        async def read(link: _Link) -> SubnetRules:
            return await read_rules(await link.client.at(number), self._netuid, await link.client.spec_version())

        return self._read("the subnet's settings", read)

    def check_weights(self, weights: Mapping[int, float], *, sent: int | None = None) -> None:
        """Check the own weights by the rules of the newest finalized block; raises with the cause."""
        values, hotkey, graph = quantise_weights(weights), self._own_wallet().hotkey.ss58_address, self.metagraph()

        async def check(link: _Link) -> None:
            key = (_SUBTENSOR, "WeightsVersionKey")
            version = None if sent is None else int(await link.client.query(key, [self._netuid], block=sent) or 0)
            view = await link.client.at(graph.block)
            await require_accepted(view, hotkey, graph, values, netuid=self._netuid, version=version)

        self._read("the rules for weights", check)

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Check the own weights and set them; returns once that is final.

        The SDK would change weights that exceed the largest one, and a subnet with commit-reveal encrypts them and
        looks at most of its rules when it reveals them: what breaks one would be lost without a word.
        """
        values, wallet = quantise_weights(weights), self._own_wallet()
        self.check_weights(weights)
        started_at: list[int] = []  # head block at each attempt

        async def submit(link: _Link) -> bt.ExtrinsicResult | None:
            # A lost connection may have delivered the extrinsic: sending it again would be rate limited.
            if started_at and await self._last_update(link, wallet) > started_at[0]:
                return None
            started_at.append(await link.client.block())
            intent = bt.SetWeights(
                netuid=self._netuid,
                weights={uid: float(value) for uid, value in values.items()},
                version_key=int(await link.client.query((_SUBTENSOR, "WeightsVersionKey"), [self._netuid]) or 0),
            )
            return await link.client.execute(intent, wallet)

        try:
            self._submit("setting weights", submit)
        except ExtrinsicLimitedError as error:
            with suppress(TransientError):  # without the two blocks the next attempt comes at the usual pause
                limit = self._read("the limit on weights", lambda link: self._limit(link, wallet))
                error.last_block, error.next_block = limit
            raise

    def require_fees(self) -> None:
        """Check that the coldkey, which pays for the hotkey's extrinsics, can pay for one."""
        wallet = self._own_wallet()
        call = bt.calls.Commitments.set_commitment(netuid=self._netuid, info=commitment_info("0" * 128))

        async def read(link: _Link) -> tuple[str, int, int]:
            composed = await link.substrate.compose(call)  # type: ignore[no-untyped-call]
            fee = await link.substrate.estimate_fee(composed, wallet.hotkey)
            owner = str(await link.client.query((_SUBTENSOR, "Owner"), [wallet.hotkey.ss58_address]))
            account = await link.client.query(("System", "Account"), [owner])
            return owner, int(account["data"]["free"]), int(fee.rao)

        coldkey, free, fee = self._read("the balance of the coldkey", read)
        if free < fee:
            raise PermanentError(
                Reason.CANNOT_PAY_FEES,
                f"coldkey {coldkey} has {free / 1e9:.9f} free, and an extrinsic of its hotkey costs {fee / 1e9:.9f}: "
                "send it some",
            )

    @property
    def _endpoint(self) -> str:
        """The current endpoint."""
        return self._endpoints[self._left % len(self._endpoints)]

    def _next_endpoint(self) -> None:
        self._left += 1
        self._connection.name = f"chain {public_address(self._endpoint)}"

    async def _connect(self) -> _Link:
        endpoint, turn = self._endpoint, self._left % max(1, len(self._archives))
        substrate = self._substrates(endpoint, [*self._archives[turn:], *self._archives[:turn]])
        try:
            with _translated("connecting", _read_error):
                link = _Link(await bt.Subtensor(endpoint, substrate=substrate), substrate)
                await self._inspect(link, endpoint)
                return link
        except BaseException:
            with suppress(Exception):  # it is half open: a failure to close it does not matter
                await substrate.close()
            raise

    async def _inspect(self, link: _Link, endpoint: str) -> None:
        """Check that the endpoint serves the same chain as before, the subnet, and new blocks."""
        genesis = await link.substrate.block_hash(0)
        self._genesis = self._genesis or genesis
        if genesis != self._genesis:
            raise ConnectionLostError(f"it serves another chain: its genesis is {genesis}, not {self._genesis}")
        if not await link.client.query((_SUBTENSOR, "NetworksAdded"), [self._netuid]):
            raise PermanentError(
                Reason.BAD_ENVIRONMENT, f"netuid: {public_address(endpoint)} has no subnet {self._netuid}; correct it"
            )
        age = self._clock.now() - int(await link.client.query(("Timestamp", "Now"))) / 1000
        if age <= STANDSTILL_BLOCKS * await link.client.block_time():
            self._behind.clear()
        else:
            # If all are far behind, the chain stands still or this machine's clock is wrong: then one is taken.
            self._behind.add(endpoint)
            if len(self._behind) < len(self._endpoints):
                raise ConnectionLostError(f"its newest block is {age:.0f} s old")
            log.warning("chain %s: the newest block is %.0f s old, as everywhere", public_address(endpoint), age)
        # What it has in the place of a block that is final elsewhere may be of a fork.
        if (final := await link.client.finalized_block()) < self._finalized:
            raise ConnectionLostError(f"its newest final block is {final}, and {self._finalized} is final already")

    def _read(
        self,
        what: str,
        work: Callable[[_Link], Awaitable[T]],
        chain_error: Callable[[str, bt.ChainError], Exception] | None = None,
    ) -> T:
        async def read(link: _Link) -> T:
            with _translated(what, chain_error or _read_error):
                return await work(link)

        return self._connection.call(f"reading {what}", read, seconds=self._limits.read_seconds)

    def _submit(self, what: str, work: Callable[[_Link], Awaitable[bt.ExtrinsicResult | None]]) -> None:
        async def submit(link: _Link) -> None:
            with _translated(what, _write_error):
                if (result := await work(link)) is not None:
                    result.raise_for_failure()

        with self._submitting:  # two concurrent extrinsics of one hotkey would use the same nonce
            self._connection.call(what, submit, seconds=self._limits.submit_seconds)

    async def _limit(self, link: _Link, wallet: bt.KeyedWallet) -> tuple[int, int]:
        """The block of the own last weights, and the first block in which the chain accepts others."""
        last = await self._last_update(link, wallet)
        return last, last + int(await link.client.query((_SUBTENSOR, "WeightsSetRateLimit"), [self._netuid]) or 0)

    async def _last_update(self, link: _Link, wallet: bt.KeyedWallet) -> int:
        """The block of the own last weights; -1 for never."""
        uid = await link.client.query((_SUBTENSOR, "Uids"), [self._netuid, wallet.hotkey.ss58_address])
        updates = await link.client.query((_SUBTENSOR, "LastUpdate"), [self._netuid])
        return -1 if uid is None or int(uid) >= len(updates) else int(updates[int(uid)])

    def _own_wallet(self) -> bt.KeyedWallet:
        if self._wallet is None:
            raise PermanentError(Reason.BAD_WALLET, "this chain was opened to read: give it a wallet to write")
        return self._wallet


class _UnlockedWallet(bt.Wallet):
    """A wallet folder with its hotkey unlocked: the SDK itself would ask the terminal for a password."""

    def __init__(self, name: str, hotkey_name: str, path: str, hotkey: Hotkey) -> None:
        super().__init__(name, hotkey_name, path)
        self._unlocked = hotkey.keypair

    @property
    def hotkey(self) -> Any:
        """The key pair that signs."""
        return self._unlocked


def open_wallet(
    path: Path, name: str, hotkey: str, password: Callable[[], Password | None] = lambda: None
) -> bt.Wallet:
    """Open a wallet folder for `BittensorChain`; arguments and errors are those of `load_hotkey`."""
    opened = load_hotkey(path, name, hotkey, password)
    return _UnlockedWallet(name, hotkey, str(path.expanduser()), opened)


def _resolve(network: str) -> tuple[list[str], list[str], str | None]:
    """The endpoints and archives of a list of networks and endpoints, and the genesis hash if it is known."""
    endpoints: list[str] = []
    archives: list[str] = []
    genesis: str | None = None
    for part in network.split(","):
        try:
            label, endpoint = bt_settings.resolve_endpoint(part.strip())
        except ValueError as error:
            raise PermanentError(Reason.BAD_ENVIRONMENT, f"network: {error}") from None
        endpoints += [endpoint, *bt_settings.default_fallback_endpoints(label)]
        archives += bt_settings.default_archive_endpoints(label)
        if label in {"finney", "archive"}:
            genesis = bt_settings.FINNEY_GENESIS_HASH
    return _distinct(endpoints), _distinct(archives), genesis


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


@contextmanager
def _translated(what: str, chain_error: Callable[[str, bt.ChainError], Exception]) -> Iterator[None]:
    """Translate the SDK's exceptions; `chain_error` translates the chain's own, which differ by read and write."""
    try:
        yield
    except bt.RpcPolicyError as error:  # the endpoint limits traffic: an immediate retry would add to it
        pause = f" (retry after {error.retry_after})" if error.retry_after else ""
        raise EndpointRefusesError(
            Reason.CHAIN_RATE_LIMITED, f"{what}: the endpoint refuses traffic: {error}{pause}"
        ) from None
    except (bt.RpcConnectionError, bt.ConnectionNotReady) as error:
        raise ConnectionLostError(str(error)) from None
    except bt.ChainError as error:
        raise chain_error(what, error) from None
    except (bt.BittensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        log.debug("%s", what, exc_info=error)
        raise PermanentError(
            Reason.CHAIN_REFUSED,
            f"{what}: the SDK cannot make sense of it ({error!r}); the chain's runtime may be newer",
        ) from None


def _read_error(what: str, error: bt.ChainError) -> Exception:
    """The error for a failed read: a pruned block, or an endpoint in trouble."""
    if _PRUNED in error.message:
        return PermanentError(
            Reason.BLOCK_UNKNOWN, f"{what}: this endpoint has pruned the block; name an archive endpoint: {error}"
        )
    return ConnectionLostError(str(error))


def _head_error(what: str, error: bt.ChainError) -> Exception:
    """The same for a block at the head, which may have gone back meanwhile."""
    if _NO_BLOCK in error.message:
        return PermanentError(Reason.BLOCK_UNKNOWN, f"{what}: it is not there: {error}; wait for it")
    return _read_error(what, error)


def _write_error(what: str, error: bt.ChainError) -> Exception:
    """The error for a refused extrinsic, by the chain's name for it and the SDK's own classification."""
    return refusal(what, name=error.name, code=error.code.value, message=error.message, remedy=error.remediation)
