"""A ledger whose blocks come late, are final late, and are replaced, as on a chain across a network."""

from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason

POLL_SECONDS = 0.25


class UnevenLedger(Ledger):
    """Blocks come after these gaps, in seconds, and then regularly.

    The newest `finality_lag` blocks are not final. `replaced` has blocks whose place another one takes: number, time of
    the first one, and the instant from which the other one counts.
    """

    gaps: tuple[float, ...] = ()
    finality_lag = 0
    replaced: tuple[tuple[int, float, float], ...] = ()

    def block_time(self, number: int, *, finalized: bool = True) -> float:
        if finalized:
            return self._final_time(number)
        if number > self.head():
            raise PermanentError(Reason.BLOCK_UNKNOWN, f"block {number} is not there")
        return self._shown_time(number)

    def head(self) -> int:
        number = 0
        while self._shown_time(number + 1) <= self.clock.now():
            number += 1
        return number

    def block(self) -> int:
        number = 0
        while self._final_time(number + 1) <= self.clock.now():
            number += 1
        return max(0, number - self.finality_lag)

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        while number > (self.block() if finalized else self.head()):
            self.clock.sleep_until(self.clock.now() + POLL_SECONDS)

    def _final_time(self, number: int) -> float:
        late = sum(self.gaps[:number]) + max(0, number - len(self.gaps)) * self.block_seconds
        return super().block_time(0) + late

    def _shown_time(self, number: int) -> float:
        for block, time, until in self.replaced:
            if block == number and self.clock.now() < until:
                return time
        return self._final_time(number)
