"""What every step of the exchange needs to know of the node and the network it runs on."""

from dataclasses import dataclass
from typing import Any

from templar.chain.base import Chain, Metagraph, NeuronInfo
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, as_own_failure
from templar.exchange.buckets import Buckets
from templar.exchange.signed import Network
from templar.hparams import HParams
from templar.timeline import WindowTimes, closing_block, estimate_time, first_block


@dataclass(frozen=True)
class Exchange:
    """One node's view of the network.

    Attributes:
        chain: Time, identities, weights.
        buckets: Everybody's objects.
        network: What is signed into every object.
        hparams: The network's numbers.
        signer: The own hotkey; None for a node that only reads.
    """

    chain: Chain
    buckets: Buckets
    network: Network
    hparams: HParams
    signer: Signer | None = None

    @property
    def own_signer(self) -> Signer:
        """The own hotkey.

        Raises:
            PermanentError: `not_registered`; this node only reads.
        """
        if self.signer is None:
            raise PermanentError(Reason.NOT_REGISTERED, "this node has no hotkey: it can only read")
        return self.signer

    def author(self, window: int) -> dict[str, Any]:
        """The fields that every object of this node's begins with."""
        neuron = self.identity(window)
        return {
            "netuid": self.network.netuid,
            "genesis": self.network.genesis,
            "uid": neuron.uid,
            "hotkey": neuron.hotkey,
        }

    def metagraph(self, window: int) -> Metagraph:
        """The neurons at `open(w)`: everybody who decides about a window uses this one. Waits for its finality."""
        opening = first_block(window, self.hparams.windows)
        self.chain.wait_for_block(opening)
        return self.chain.metagraph(opening)

    def miners(self, window: int) -> tuple[NeuronInfo, ...]:
        """Who may train in a window, in uid order: everybody without a validator permit but the burn uid."""
        burn = self.hparams.weights.burn_uid
        return tuple(neuron for neuron in self.metagraph(window).miners() if neuron.uid != burn)

    def publishers(self, window: int) -> tuple[NeuronInfo, ...]:
        """Who may publish the roster of a window, by rank (PROTOCOL 12)."""
        return self.metagraph(window).validators()[: self.hparams.windows.roster_ranks]

    def identity(self, window: int) -> NeuronInfo:
        """This node in the metagraph of a window.

        Raises:
            PermanentError: `not_registered`.
        """
        neuron = self.metagraph(window).by_hotkey(self.own_signer.address)
        if neuron is None:
            raise PermanentError(
                Reason.NOT_REGISTERED,
                f"hotkey {self.own_signer.address} is not registered on subnet {self.chain.netuid} at window {window}: "
                "register it, then start again",
            )
        return neuron

    def times(self, window: int) -> WindowTimes:
        """The times of a window that has closed, from finalized blocks; waits for the closing block.

        Raises:
            TransientError: The chain could not be reached.
        """
        rules = self.hparams.windows
        self.chain.wait_for_block(closing_block(window, rules))
        opened = self.chain.block_time(first_block(window, rules))
        return WindowTimes(window, opened, self.chain.block_time(closing_block(window, rules)), rules)

    def expected_times(self, window: int) -> WindowTimes:
        """The times of a window, estimated where its blocks are not final yet: for deciding when to act."""
        rules = self.hparams.windows
        opened, closed = (
            self._expected_time(block) for block in (first_block(window, rules), closing_block(window, rules))
        )
        return WindowTimes(window, opened, closed, rules)

    def acting_times(self, window: int) -> WindowTimes:
        """The times of a window whose closing block is there, finalized or not: for deciding when to act.

        Waits for the block. What counts is decided later, by the finalized one.
        """
        rules = self.hparams.windows
        self.chain.wait_for_block(closing_block(window, rules), finalized=False)
        return self.expected_times(window)

    def settling_block(self, times: WindowTimes) -> int:
        """`settled(w)`: the first block with time >= S(w) (PROTOCOL 5); waits until it is there."""
        block = closing_block(times.window, self.hparams.windows)
        block += max(0, int((times.settles - times.closed) / self.chain.block_seconds) - 2)
        while True:
            self.chain.wait_for_block(block)
            if self.chain.block_time(block) >= times.settles:
                break
            block += 1
        while self.chain.block_time(block - 1) >= times.settles:
            block -= 1
        return block

    def chain_now(self) -> float:
        """The chain's time by its newest block, finalized or not: never ahead, at most about a block behind.

        What a node concludes from the time alone, such as that a slot is over, must not follow from a wrong clock.

        Raises:
            TransientError: The chain does not say.
        """
        with as_own_failure():
            return self._expected_time(self.chain.head())

    def _expected_time(self, block: int) -> float:
        newest = self.chain.block()
        if block <= newest:
            return self.chain.block_time(block)
        time = self.chain.block_time(newest)
        return estimate_time(block, known_block=newest, known_time=time, rules=self.hparams.windows)
