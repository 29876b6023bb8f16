"""One node's view of the network: chain, buckets, hyper-parameters and identity."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from templar.canonical import keyed_seed
from templar.chain.base import Chain, Metagraph, NeuronInfo
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, TransientError, as_own_failure
from templar.exchange.buckets import Buckets
from templar.exchange.signed import Network
from templar.hparams import HParams
from templar.timeline import WindowTimes, closing_block, first_block

LONGEST_PAUSE_SECONDS = 1.0
STAKE_UNIT = 2.0**-20  # stake is drawn by in whole units of this size, for exact arithmetic


def drawn_by_stake(validators: Sequence[NeuronInfo], seed: str, count: int) -> tuple[NeuronInfo, ...]:
    """Draw validators one after the other, each with a chance in proportion to its stake among those that are left.

    A holder that splits its stake over several hotkeys is drawn first as often as before. The validators come in an
    order that every node has, and the seed is a block hash, or another string that no validator can choose.
    """
    left, drawn = list(validators), []
    for rank in range(min(count, len(left))):
        stakes = [max(1, int(each.stake / STAKE_UNIT)) for each in left]
        point, place = keyed_seed("publishers", seed, rank) % sum(stakes), 0
        while point >= stakes[place]:
            point -= stakes[place]
            place += 1
        drawn.append(left.pop(place))
    return tuple(drawn)


@dataclass
class NetworkView:
    """One node's view of the network."""

    chain: Chain
    buckets: Buckets
    network: Network
    hparams: HParams  # of the window that is run or replayed: the plan may change them
    signer: Signer | None = None  # this node's hotkey; None for a node that only reads

    @property
    def own_signer(self) -> Signer:
        """This node's hotkey.

        Raises:
            PermanentError: `not_registered`; this node only reads.
        """
        if self.signer is None:
            raise PermanentError(Reason.NOT_REGISTERED, "this node has no hotkey: it can only read")
        return self.signer

    def author(self, window: int) -> dict[str, Any]:
        """The fields that begin each object that this node signs."""
        neuron = self.identity(window)
        return {
            "netuid": self.network.netuid,
            "genesis": self.network.genesis,
            "uid": neuron.uid,
            "hotkey": neuron.hotkey,
        }

    def metagraph(self, window: int) -> Metagraph:
        """The neurons at `open(w)`, on which every decision about the window is based; waits until it is final."""
        opening = first_block(window, self.hparams.windows)
        self.chain.wait_for_block(opening)
        return self._with_settings(self.chain.metagraph(opening))

    def newest_metagraph(self) -> Metagraph:
        """The neurons at the newest block, for what belongs to no window."""
        return self._with_settings(self.chain.metagraph())

    def _with_settings(self, metagraph: Metagraph) -> Metagraph:
        return replace(metagraph, validator_min_stake=self.hparams.peers.validator_min_stake)

    def miners(self, window: int) -> tuple[NeuronInfo, ...]:
        """Neurons that may train in a window, in uid order: those that announced it, except the burn uid."""
        burn = self.hparams.weights.burn_uid
        return tuple(neuron for neuron in self.metagraph(window).miners() if neuron.uid != burn)

    def announced(self, window: int) -> tuple[NeuronInfo, ...]:
        """The validators whose stake counts in a window's ballots, by rank (docs/protocol.md 11)."""
        return self.metagraph(window).validators()

    def publishers(self, window: int) -> tuple[NeuronInfo, ...]:
        """Neurons that may publish the roster of a window, by rank: drawn by stake (docs/protocol.md 8)."""
        rules, announced = self.hparams.windows, self.announced(window)
        seed = self.chain.block_hash(first_block(window, rules))
        return drawn_by_stake(announced, seed, rules.roster_ranks)

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
        """The times of a window, estimated where its blocks are not final yet: for deciding when to act.

        Blocks never come faster than estimated, so the true times are these or later.
        """
        rules = self.hparams.windows
        opened, closed = (
            self._expected_time(block) for block in (first_block(window, rules), closing_block(window, rules))
        )
        return WindowTimes(window, opened, closed, rules)

    def acting_times(self, window: int) -> WindowTimes:
        """The times of a window whose closing block exists, finalized or not: for deciding when to act.

        Waits for the block. Another one may take its place (see `settled_times`). Whether an object counts is decided
        later, by the finalized block.
        """
        rules, chain = self.hparams.windows, self.chain
        blocks = first_block(window, rules), closing_block(window, rules)
        while True:
            chain.wait_for_block(blocks[1], finalized=False)
            try:
                # The blocks' own times, because blocks may come slower than estimated. Not earlier than the estimate
                # from the finalized block: an endpoint may show blocks that nobody else has.
                opened, closed = (
                    max(chain.block_time(block, finalized=False), self._expected_time(block)) for block in blocks
                )
                return WindowTimes(window, opened, closed, rules)
            except PermanentError as error:
                if error.reason is not Reason.BLOCK_UNKNOWN or blocks[1] <= chain.block():
                    raise
            self._pause()  # the head went back meanwhile

    def settled_times(self, times: WindowTimes, stored_at: int | None = None) -> WindowTimes:
        """The times of a window once its closing block is final, or as soon as what was stored is too early to count.

        Another block may take the closing one's place until then. While the chain cannot be reached, this waits until
        the roster slots are over: the close may have moved by several slots, and reveals may still count. `times` are
        as they were known when the reveal was stored, by default in the first second that counts by them.
        """
        stored_at = times.reveal_interval.first if stored_at is None else stored_at
        while True:
            try:
                times = self.acting_times(times.window)
                is_final = self.chain.block() >= closing_block(times.window, self.hparams.windows)
                if is_final or times.reveal_interval.first > stored_at:
                    return times
            except TransientError:
                if self.chain.clock.now() > times.null_after:
                    return times
            self._pause()

    def settling_block(self, times: WindowTimes) -> int:
        """`settled(w)`: the first block with time >= S(w) (docs/protocol.md 3); waits until it exists."""
        # Estimate the block, then search forward and back.
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
        """The chain's time: that of its newest block, finalized or not. It is never ahead, and about a block behind.

        Conclusions from the time alone, such as that a slot is over, use it: the machine's clock may be wrong.

        Raises:
            TransientError: The chain did not answer.
        """
        with as_own_failure():
            return self.chain.block_time(self.chain.head(), finalized=False)

    def _pause(self) -> None:
        clock = self.chain.clock
        clock.sleep_until(clock.now() + min(LONGEST_PAUSE_SECONDS, self.chain.block_seconds / 4))

    def _expected_time(self, block: int) -> float:
        newest = self.chain.block()
        if block <= newest:
            return self.chain.block_time(block)
        return self.chain.block_time(newest) + (block - newest) * self.hparams.windows.block_seconds
