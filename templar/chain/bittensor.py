"""The real chain: a Bittensor subnet through SDK 11.

Everything is read from finalized blocks, and a write returns once it is final, so that it can be read back. No type or
exception of the SDK leaves this module.

`FinalizedChain` is the reading half: the number of the newest finalized block never falls when endpoints change;
finalized blocks are cached; new blocks are polled for, because a dead subscription is silent and a failed poll is not.
"""

import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import bittensor as bt
from bittensor import settings as bt_settings

from templar.chain.base import Block, Clock, Metagraph, NeuronInfo, NumberCache
from templar.chain.clock import SystemClock
from templar.chain.extrinsics import (
    ExtrinsicLimitedError,
    check_commitment,
    commitment_info,
    commitment_text,
    quantise_weights,
    refusal,
)
from templar.chain.hotkey import load_hotkey
from templar.chain.remote import CallLimits, Connection, ConnectionLostError, public_address
from templar.errors import PermanentError, Reason, TransientError

log = logging.getLogger(__name__)

LONGEST_POLL_SECONDS = 1.0
HEADERS_KEPT = 4096
METAGRAPHS_KEPT = 16
# Storage items, as (pallet, name).
_NOW = ("Timestamp", "Now")
_COMMITMENT_OF = ("Commitments", "CommitmentOf")
_UIDS = ("SubtensorModule", "Uids")
_LAST_UPDATE = ("SubtensorModule", "LastUpdate")
_RATE_LIMIT = ("SubtensorModule", "WeightsSetRateLimit")
_COMMIT_REVEAL = ("SubtensorModule", "CommitRevealWeightsEnabled")

T = TypeVar("T")


class FinalizedChain(ABC):
    """The reading half of `templar.chain.base.Chain` for a chain across a network. Safe under threads."""

    def __init__(self, *, clock: Clock, outage_pause_seconds: float) -> None:
        self._clock = clock
        self._outage_pause_seconds = outage_pause_seconds
        self._finalized = -1
        self._rising = threading.Lock()
        self._headers: NumberCache[Block] = NumberCache(HEADERS_KEPT)
        self._metagraphs: NumberCache[Metagraph] = NumberCache(METAGRAPHS_KEPT)

    @property
    @abstractmethod
    def block_seconds(self) -> float:
        """Expected seconds between two blocks."""

    @abstractmethod
    def _read_finalized(self) -> int:
        """Ask for the number of the newest finalized block."""

    @abstractmethod
    def _read_head(self) -> int:
        """Ask for the number of the newest block."""

    @abstractmethod
    def _read_block(self, number: int) -> Block:
        """Ask for a finalized block."""

    @abstractmethod
    def _read_metagraph(self, number: int) -> Metagraph:
        """Ask for the metagraph at a finalized block."""

    @property
    def clock(self) -> Clock:
        """The clock of this chain's participants."""
        return self._clock

    def block(self) -> int:
        """Number of the newest finalized block."""
        newest = self._read_finalized()
        with self._rising:
            self._finalized = max(self._finalized, newest)
            return self._finalized

    def head(self) -> int:
        """Number of the newest block, finalized or not."""
        return max(self._finalized, self._read_head())

    def block_time(self, number: int) -> float:
        """The chain's timestamp of a finalized block, in seconds."""
        return self._block(number).time

    def block_hash(self, number: int) -> str:
        """Hash of a finalized block: `0x` and 64 hex digits."""
        return self._block(number).hash

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Return once the block is there (and finalized, unless only acting depends on it)."""
        while (missing := number - (self.block() if finalized else self.head())) > 0:
            poll = min(LONGEST_POLL_SECONDS, self.block_seconds / 4)
            self._clock.sleep_until(self._clock.now() + max(poll, (missing - 1) * self.block_seconds))

    def follow(self) -> Iterator[Block]:
        """Every finalized block from the current one on, in order, without gaps or repeats.

        It never ends: it waits through an outage of any length and then yields the blocks of that time.
        """
        number = self._ride_out(self.block)
        while True:
            yield self._ride_out(functools.partial(self._block, number))
            number += 1
            self._ride_out(functools.partial(self.wait_for_block, number))

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The subnet's neurons at a finalized block, the newest by default."""
        number = self.block() if block is None else block
        self._check_finalized(number)
        return self._metagraphs.get(number) or self._metagraphs.put(number, self._read_metagraph(number))

    def _block(self, number: int) -> Block:
        self._check_finalized(number)
        return self._headers.get(number) or self._headers.put(number, self._read_block(number))

    def _check_finalized(self, number: int) -> None:
        if number < 0 or (number > self._finalized and number > self.block()):
            raise PermanentError(
                Reason.BLOCK_UNKNOWN, f"block {number} is not final: the newest one is {self._finalized}; wait for it"
            )

    def _ride_out(self, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except TransientError as error:
                log.warning("%s; still trying", error)
                self._clock.sleep_until(self._clock.now() + self._outage_pause_seconds)


@dataclass(frozen=True)
class _Link:
    """One connection: the SDK's client and the chain access below it, which alone returns block hashes."""

    client: bt.Client
    substrate: bt.Substrate


class BittensorChain(FinalizedChain):
    """A subnet of Bittensor; implements `templar.chain.base.Chain`. Safe under threads.

    Args:
        network: A network's name (`finney`, `test`, `local`) or a `ws://` or `wss://` endpoint.
        netuid: The subnet.
        wallet: Its hotkey commits and sets weights; None for a reader. See `open_wallet`.
        substrate: Chain access to use in place of a websocket to the network.
        clock: Clock of waits and pauses; the machine's clock by default.
        limits: Time limits and number of attempts of a call.

    Raises:
        PermanentError: `bad_environment`; there is no such network.
    """

    def __init__(
        self,
        network: str,
        netuid: int,
        *,
        wallet: bt.KeyedWallet | None = None,
        substrate: bt.Substrate | None = None,
        clock: Clock | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        try:
            self._label, self._endpoint = bt_settings.resolve_endpoint(network)
        except ValueError as error:
            raise PermanentError(Reason.BAD_ENVIRONMENT, f"network: {error}") from None
        self._netuid = netuid
        self._wallet = wallet
        self._substrate = substrate
        self._limits = CallLimits() if limits is None else limits
        super().__init__(
            clock=SystemClock() if clock is None else clock,
            outage_pause_seconds=self._limits.longest_backoff_seconds,
        )
        self._connection = Connection(
            f"chain {public_address(network)}", self._connect, _disconnect, clock=self._clock, limits=self._limits
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

    def _read_block(self, number: int) -> Block:
        async def read(link: _Link) -> Block:
            hash_ = await link.substrate.block_hash(number)
            milliseconds = await link.client.query(_NOW, block=number)
            return Block(number, int(milliseconds) / 1000, hash_)

        return self._read(f"block {number}", read)

    def _read_metagraph(self, number: int) -> Metagraph:
        async def read(link: _Link) -> bt.Metagraph | None:
            return await link.client.subnets.metagraph(self._netuid, block=number, commitments=False)

        graph = self._read(f"the metagraph at block {number}", read)
        if graph is None:
            raise PermanentError(Reason.BAD_ENVIRONMENT, f"netuid: there is no subnet {self._netuid} at block {number}")
        neurons = tuple(
            NeuronInfo(neuron.uid, neuron.hotkey, neuron.total_stake.amount, neuron.validator_permit, neuron.incentive)
            for neuron in graph.neurons
        )
        return Metagraph(number, neurons)

    def commitments(self) -> dict[str, str]:
        """Each hotkey's newest commitment; commitments of another form are ignored."""
        number = self.block()
        rows = self._read(
            "the commitments",
            lambda link: link.client.query_map(_COMMITMENT_OF, [self._netuid], block=number),
        )
        found = {str(hotkey): commitment_text(record) for hotkey, record in rows}
        return {hotkey: text for hotkey, text in found.items() if text is not None}

    def set_commitment(self, data: str) -> None:
        """Commit under the own hotkey; returns once that is final."""
        check_commitment(data)
        wallet = self._own_wallet()
        call = bt.calls.Commitments.set_commitment(netuid=self._netuid, info=commitment_info(data))

        async def submit(link: _Link) -> bt.ExtrinsicResult:
            return await link.client.submit_call(call, wallet, signer="hotkey")

        self._submit("setting the commitment", submit)

    def weights(self) -> dict[int, dict[int, float]]:
        """For each validator uid that set weights: miner uid -> weight, summing to 1."""
        number = self.block()

        async def read(link: _Link) -> dict[int, dict[int, float]]:
            snapshot = await link.client.at(number)
            rows: dict[int, dict[int, float]] = await snapshot.read("weights", netuid=self._netuid)
            return {uid: dict(sorted(row.items())) for uid, row in rows.items() if row}

        return self._read("the weights", read)

    def hides_weights(self) -> bool:
        """Whether the subnet runs commit-reveal."""
        return bool(self._read("its settings", lambda link: link.client.query(_COMMIT_REVEAL, [self._netuid])))

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set the own weights; returns once that is final.

        A subnet with commit-reveal encrypts them, and `weights` shows them after the chain has revealed them.
        """
        values = quantise_weights(weights)
        wallet = self._own_wallet()
        started_at: list[int] = []  # head block at each attempt

        async def submit(link: _Link) -> bt.ExtrinsicResult | None:
            # A lost connection may have delivered the extrinsic: sending it again would be rate limited.
            if started_at and await self._last_update(link, wallet) > started_at[0]:
                return None
            started_at.append(await link.client.block())
            intent = bt.SetWeights(netuid=self._netuid, weights={uid: float(value) for uid, value in values.items()})
            return await link.client.execute(intent, wallet)

        try:
            self._submit("setting weights", submit)
        except ExtrinsicLimitedError as error:
            with suppress(TransientError):  # without the two blocks the next attempt comes at the usual pause
                limit = self._read("the limit on weights", lambda link: self._limit(link, wallet))
                error.last_block, error.next_block = limit
            raise

    async def _connect(self) -> _Link:
        substrate = self._substrate
        if substrate is None:
            substrate = bt.RpcSubstrate(
                self._endpoint,
                fallback_endpoints=bt_settings.default_fallback_endpoints(self._label),
                archive_endpoints=bt_settings.default_archive_endpoints(self._label),
            )
        try:
            with _translated("connecting", _read_error):
                return _Link(await bt.Subtensor(self._endpoint, substrate=substrate), substrate)
        except BaseException:
            with suppress(Exception):  # it is half open: a failure to close it does not matter
                await substrate.close()
            raise

    def _read(self, what: str, work: Callable[[_Link], Awaitable[T]]) -> T:
        async def read(link: _Link) -> T:
            with _translated(what, _read_error):
                return await work(link)

        return self._connection.call(f"reading {what}", read, seconds=self._limits.read_seconds)

    def _submit(self, what: str, work: Callable[[_Link], Awaitable[bt.ExtrinsicResult | None]]) -> None:
        async def submit(link: _Link) -> None:
            with _translated(what, _write_error):
                result = await work(link)
                if result is not None:
                    result.raise_for_failure()

        with self._submitting:  # two concurrent extrinsics of one hotkey would use the same nonce
            self._connection.call(what, submit, seconds=self._limits.submit_seconds)

    async def _limit(self, link: _Link, wallet: bt.KeyedWallet) -> tuple[int, int]:
        """The block of the own last weights, and the first block in which the chain accepts others."""
        last = await self._last_update(link, wallet)
        return last, last + int(await link.client.query(_RATE_LIMIT, [self._netuid]) or 0)

    async def _last_update(self, link: _Link, wallet: bt.KeyedWallet) -> int:
        """The block of the own last weights; -1 for never."""
        uid = await link.client.query(_UIDS, [self._netuid, wallet.hotkey.ss58_address])
        updates = await link.client.query(_LAST_UPDATE, [self._netuid])
        return -1 if uid is None or int(uid) >= len(updates) else int(updates[int(uid)])

    def _own_wallet(self) -> bt.KeyedWallet:
        if self._wallet is None:
            raise PermanentError(Reason.BAD_WALLET, "this chain was opened to read: give it a wallet to write")
        return self._wallet


def open_wallet(path: Path, name: str, hotkey: str) -> bt.Wallet:
    """Open a wallet folder for `BittensorChain`.

    Raises:
        PermanentError: `bad_wallet`; the hotkey is missing, malformed or encrypted.
    """
    load_hotkey(path, name, hotkey)
    return bt.Wallet(name, hotkey, str(path.expanduser()))


async def _disconnect(link: _Link) -> None:
    await link.client.close()


@contextmanager
def _translated(what: str, chain_error: Callable[[str, bt.ChainError], Exception]) -> Iterator[None]:
    """Translate the SDK's exceptions; `chain_error` translates the chain's own, which differ by read and write."""
    try:
        yield
    except bt.RpcPolicyError as error:  # the endpoint limits traffic: an immediate retry would add to it
        pause = f" (retry after {error.retry_after})" if error.retry_after else ""
        raise TransientError(
            Reason.CHAIN_RATE_LIMITED, f"{what}: the endpoint refuses traffic: {error}{pause}"
        ) from error
    except (bt.RpcConnectionError, bt.ConnectionNotReady) as error:
        raise ConnectionLostError(str(error)) from error
    except bt.ChainError as error:
        raise chain_error(what, error) from error
    except (bt.BittensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise PermanentError(
            Reason.CHAIN_REFUSED,
            f"{what}: the SDK cannot make sense of it ({error!r}); the chain's runtime may be newer",
        ) from error


def _read_error(what: str, error: bt.ChainError) -> Exception:
    """The error for a failed read: a pruned block, or an endpoint in trouble."""
    if "State discarded" in error.message:
        return PermanentError(
            Reason.BLOCK_UNKNOWN, f"{what}: this endpoint has pruned the block; use an archive endpoint: {error}"
        )
    return ConnectionLostError(str(error))


def _write_error(what: str, error: bt.ChainError) -> Exception:
    """The error for a refused extrinsic, by the chain's name for it and the SDK's own classification."""
    return refusal(what, name=error.name, code=error.code.value, message=error.message, remedy=error.remediation)
