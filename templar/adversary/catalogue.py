"""Every attack and fault that the gauntlet runs, by name.

The rows are those of the table in docs/threat-model.md. Who drives a network takes from here what the attackers are
and what surrounds them; `templar.adversary.judge` says what came of it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from templar.adversary import faults
from templar.adversary.attacks import ABSENT, ATTACKS, CONTINUE, REJECT, UNTIMELY, scenario
from templar.adversary.chains import ReorganisingChain, StaleChain
from templar.adversary.publishers import PUBLISHERS
from templar.adversary.scenario import Misconduct, Scenario
from templar.adversary.stores import (
    FORBIDDEN,
    NO_SUCH_BUCKET,
    SERVER_ERROR,
    TOO_MANY_REQUESTS,
    CorruptingStore,
    ShorteningStore,
    TruncatingStore,
)
from templar.errors import Reason

STORES = (
    scenario("bucket_forbidden", (22,), "403", REJECT, Reason.BUCKET_UNREADABLE, bucket=faults.failing(FORBIDDEN)),
    scenario(
        "bucket_missing",
        (22,),
        "the bucket is gone",
        REJECT,
        Reason.BUCKET_UNREADABLE,
        bucket=faults.failing(NO_SUCH_BUCKET),
    ),
    scenario("bucket_busy", (22,), "429", REJECT, Reason.STORE_BUSY, bucket=faults.failing(TOO_MANY_REQUESTS)),
    scenario("bucket_broken", (22,), "503", REJECT, Reason.STORE_BUSY, bucket=faults.failing(SERVER_ERROR)),
    scenario(
        "bucket_truncates",
        (22,),
        "bodies that end early",
        REJECT,
        Reason.BUCKET_UNREADABLE,
        bucket=faults.for_all(TruncatingStore),
    ),
    scenario(
        "bucket_shortens",
        (22,),
        "bodies that end early unnoticed",
        REJECT,
        Reason.MALFORMED,
        bucket=faults.for_all(ShorteningStore),
    ),
    scenario(
        "bucket_corrupts",
        (22,),
        "a bit flipped on the way",
        REJECT,
        Reason.WRONG_HASH,
        bucket=faults.for_all(CorruptingStore),
    ),
    scenario("bucket_stale", (22,), "objects that show up late", REJECT, *ABSENT, bucket=faults.stale),
    scenario("bucket_hangs", (21, 22), "no answer in time", REJECT, Reason.STORE_UNREACHABLE, bucket=faults.hanging),
    scenario("bucket_flaky", (22,), "a 503 before the first answers", CONTINUE, bucket=faults.flaky),
    scenario("bucket_slow", (21,), "slow answers", CONTINUE, bucket=faults.slow),
    scenario(
        "key_rotated",
        (22,),
        "a key that is taken back in mid-window",
        CONTINUE,
        Reason.BUCKET_UNREADABLE,
        bucket=faults.failing(FORBIDDEN, since_seconds=10.0),
        windows=3,
    ),
    scenario(
        "two_faced", (20,), "other bytes for every second reader", CONTINUE, Reason.WRONG_HASH, bucket=faults.two_faced
    ),
    scenario("two_timed", (20,), "another time for every second reader", CONTINUE, *UNTIMELY, bucket=faults.two_timed),
    scenario(
        "withheld", (21,), "every second reader is refused", CONTINUE, Reason.BUCKET_UNREADABLE, bucket=faults.withheld
    ),
)

NODES = (
    scenario(
        "chain_unreachable",
        (28,),
        "an endpoint that is down for seconds in every window",
        CONTINUE,
        *ABSENT,
        chain=faults.unreachable(20.0, 3.0, 13.0),
        windows=4,
    ),
    scenario(
        "publisher_unreachable",
        (28,),
        "the same, and the aggregator's endpoint is down as well",
        CONTINUE,
        *ABSENT,
        chain=faults.unreachable(20.0, 3.0, 13.0),
        publisher_chain=True,
        alone=True,
        windows=4,
    ),
    scenario(
        "chain_stale",
        (28,),
        "an endpoint three blocks behind",
        CONTINUE,
        *ABSENT,
        *UNTIMELY,
        chain=partial(StaleChain, blocks=3),
        windows=3,
    ),
    scenario(
        "chain_reorganises",
        (28,),
        "a head that runs ahead, repeats itself and goes back",
        CONTINUE,
        *ABSENT,
        *UNTIMELY,
        chain=partial(ReorganisingChain, depth=3),
        windows=3,
    ),
    scenario(
        "clean_up",
        (35,),
        "every bucket is cleaned by clocks that are half a minute off while some catch up",
        CONTINUE,
        *ABSENT,
        chain=faults.unreachable(40.0, 30.0, 1000.0),
        cleans=True,
        alone=True,
        windows=8,
        overrides={"storage": {"retention_windows": 3, "checkpoint_frequency": 2}},
    ),
)

EMPTY = (
    scenario("nobody", (40,), "a network without miners", CONTINUE, honest=0, alone=True, windows=3),
    scenario(
        "all_bad",
        (40,),
        "every miner's payload is noise",
        REJECT,
        Reason.MALFORMED,
        actor="garbage",
        honest=0,
        alone=True,
        windows=3,
    ),
    scenario(
        "one_good",
        (40,),
        "every miner's payload but one is noise",
        REJECT,
        Reason.MALFORMED,
        actor="garbage",
        honest=1,
        alone=True,
    ),
)


def misconduct(name: str, rows: tuple[int, ...], title: str, reason: Reason, **more: Any) -> Scenario:
    """The aggregator of this name among honest miners; each of its windows is reported for this reason."""
    publisher = Misconduct(PUBLISHERS[name], **more)
    return scenario(name, rows, title, CONTINUE, reason, publisher=publisher, alone=True, windows=3)


AGGREGATORS = (
    misconduct("silent_publisher", (25,), "an aggregator without a roster", Reason.ROSTER_MISSING),
    misconduct("late_publisher", (25,), "an aggregator whose roster comes after its slot", Reason.ROSTER_LATE),
    misconduct(
        "omitting_publisher", (25,), "an aggregator that leaves two miners out", Reason.ROSTER_OMITS, omits=True
    ),
    misconduct(
        "forging_publisher",
        (25,),
        "an aggregator that makes up a miner's payload",
        Reason.BAD_SIGNATURE,
        is_provable=True,
    ),
    misconduct(
        "two_faced_publisher",
        (20, 25),
        "an aggregator that replaces its roster once it is decided",
        Reason.ROSTER_EQUIVOCATION,
        is_provable=True,
        delay=1,
    ),
)

SCENARIOS: Mapping[str, Scenario] = {each.name: each for each in (*ATTACKS, *STORES, *NODES, *EMPTY, *AGGREGATORS)}
"""Every scenario by name."""
