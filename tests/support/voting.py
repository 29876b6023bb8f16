"""Validators of a small network that vote on one window, each from its own words and what it can read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from templar.agreement.ballot_box import BallotBox
from templar.agreement.roster import draft_roster, publish_roster
from templar.agreement.roster_judge import Judge
from templar.agreement.voter import Voter, await_decision, settled
from templar.exchange.payload_cache import PayloadCache
from templar.timeline import Interval, WindowTimes
from tests.support.subnet import LAYOUT, Subnet, gathered

Publish = Callable[[int, Interval], None]


def no_roster(rank, slot):
    """Nothing is published."""


@dataclass
class Chamber:
    """Everybody who takes part in the ballots on a window, or only reads them."""

    subnet: Subnet
    folder: Path
    window: int
    kept: dict[int, str] = field(default_factory=dict)  # uid -> the words that its validator stored
    caches: int = 0

    def __post_init__(self):
        self.times: WindowTimes = self.subnet.times(self.window)

    def cache(self):
        """An empty cache."""
        self.caches += 1
        return PayloadCache(self.folder / f"payloads-{self.caches}", LAYOUT)

    def publish(self, author, miners, rank, slot):
        """Publish a roster of these miners, all by default, with all that belongs to it."""
        cache = self.cache()
        submissions = gathered(cache, self.subnet.miners if miners is None else miners, self.window)
        draft = draft_roster(
            self.subnet.exchange(author),
            self.window,
            submissions,
            previous=None,
            peer_list=None,
            cache=cache,
            spool=self.folder / f"spool-{author.uid}",
            durable=False,
        )
        publish_roster(self.subnet.exchange(author), draft, slot)
        return draft.roster

    def publishing(self, author, miners=None):
        """What makes a validator publish its roster in its ballot."""
        return lambda rank, slot: self.publish(author, miners, rank, slot) and None

    def judge(self, exchange, check=lambda roster: None):
        """Judges rosters with a cache of its own."""
        return Judge(exchange, self.times, self.cache(), check)

    def settle(self, member, publish=None, *, exchange=None, views=None, check=lambda roster: None, deadline=None):
        """Take part if the member is a validator, else only read; the settlement.

        Raises:
            TransientError: `decision_missing`.
        """
        exchange = exchange or self.subnet.exchange(member, views)
        ballots, judge = BallotBox(exchange, self.window), self.judge(exchange, check)
        voter = None
        if member.permit:
            voter = Voter(
                ballots,
                judge,
                publish_own=publish or no_roster,
                kept=self.kept.get(member.uid),
                keep=partial(self.kept.__setitem__, member.uid),
            )
        until = self.times.settle_until if deadline is None else deadline
        await_decision(ballots, self.times, voter, deadline=until)
        if voter is not None:
            voter.show(at_once=True)
        return settled(judge, ballots)
