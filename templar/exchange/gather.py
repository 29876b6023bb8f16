"""Gather: fetch what the peers of a window revealed, and report on each of them.

Partial success is normal. Whatever one peer's bucket or bytes do, the failure stays with that peer: it becomes a reason
in the report and every other peer is fetched as if nothing had happened. Everything ends at one deadline.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from templar.chain.base import Clock, NeuronInfo
from templar.exchange.buckets import Buckets
from templar.exchange.cache import PayloadCache
from templar.exchange.gathering import Gathering, Limits
from templar.exchange.outcomes import GatherReport, PeerOutcome, Tier
from templar.exchange.reveal import RevealRules

__all__ = ["GatherReport", "Gatherer", "PeerOutcome", "Tier"]

log = logging.getLogger(__name__)

LATE_SECONDS = 5.0
"""Time that a gather has at least, however late it begins."""
FINAL_SECONDS = 1.0
"""Time that there is at least once the reveals are final."""


@dataclass(frozen=True)
class Gatherer:
    """Fetches reveals for one node.

    Attributes:
        buckets: The peers' buckets.
        cache: Where payload bytes are kept.
        clock: Says when the reveals are final.
        concurrency: Peers fetched at once; with 1 no transfer can be given up (see `Crew`).
        patience: Seconds for which stores that fail are asked again at least, whatever the deadline; for a window that
            is long over.
    """

    buckets: Buckets
    cache: PayloadCache
    clock: Clock
    concurrency: int = 8
    patience: float = 0.0

    def gather(
        self,
        peers: Sequence[NeuronInfo],
        rules: RevealRules,
        *,
        reserve: Sequence[NeuronInfo] = (),
        others: Sequence[NeuronInfo] = (),
        retry_until: float,
    ) -> GatherReport:
        """Fetch the peers; then as many of the reserve, in order, as are needed to fill the places of failed ones.

        The first pass starts at once, as a prefetch, and what it finds stands. Who has revealed nothing yet is looked
        at again once the grace is over, and from the settling second on, when the reveals are final. Everybody begins
        with other peers, so that not all meet at one bucket.

        Everything ends at `retry_until`, or `LATE_SECONDS` after a late begin. Of the time between the settling second
        and then, the peers have the first half, if there is a reserve; what is under way is given up after it
        (`too_slow`) and the reserve has the other half, each batch a half of what is left while more could follow.
        Others have all of it.

        Stores that fail are asked again, after pauses that grow and carry jitter, until `retry_until`, and as long as
        that makes no more than twice the requests of a healthy peer.

        Args:
            peers: The gather tier.
            rules: What the reveals are held against.
            reserve: Replacements, in order; those that are not needed are not part of the report unless they are among
                the others.
            others: Fetched as well, never as replacements: a validator scores them. Those of the reserve come last,
                when it is known that nobody needs them.
            retry_until: The deadline.

        Raises:
            TemplarError: `local_file`; this machine cannot keep what it reads. Nobody is blamed for it.
        """
        started, now, settles = time.perf_counter(), self.clock.now(), rules.times.settles
        retry_until = max(retry_until, now + self.patience) if self.patience else retry_until
        deadline = max(retry_until, now + LATE_SECONDS, settles + FINAL_SECONDS)
        limits = Limits(rules.times.reveal_interval.last + 1, settles, retry_until, deadline)
        gathering = Gathering(self.buckets, self.cache, self.clock, rules, limits, concurrency=self.concurrency)
        try:
            gathering.add(peers, Tier.GATHER)
            listed, wanted = {each.uid for each in reserve}, {each.uid for each in others}
            gathering.add([each for each in others if each.uid not in listed], Tier.OTHER)
            gathering.run(tuple(Tier), settles)
            self.clock.sleep_until(settles)
            begin = max(now, settles)
            gathering.run((Tier.GATHER,), begin + (deadline - begin) / (2 if reserve else 1))
            unneeded = gathering.fill_places(len(peers), reserve)
            gathering.add([each for each in unneeded if each.uid in wanted], Tier.OTHER)
            gathering.run(tuple(Tier), deadline)
            gathering.give_up(tuple(Tier))
        finally:
            gathering.crew.close()
        report = GatherReport(rules.window, gathering.outcomes(), time.perf_counter() - started)
        log.info("window %d: %s", rules.window, report.summary)
        return report
