"""Every attack and fault that the gauntlet runs, by name.

The rows are those of the table in docs/threat-model.md. The driver of a network takes the attackers and the faults from
here, and `lab.adversary.judge` gives the verdict.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from lab.adversary import faults
from lab.adversary.actors import PUBLISHERS
from lab.adversary.chains import ReorganisingChain, StaleChain
from lab.adversary.faults import FORBIDDEN, NO_SUCH_BUCKET, SERVER_ERROR, TOO_MANY_REQUESTS
from lab.adversary.judge import BucketFault, ChainFault, Expect, Misconduct, Scenario
from lab.adversary.mutations import MUTATIONS
from templar.errors import Reason

REJECT, BOUND, CONTINUE = Expect.REJECT, Expect.BOUND, Expect.CONTINUE
ABSENT = frozenset({Reason.COMMIT_MISSING, Reason.MANIFEST_MISSING, Reason.PAYLOAD_MISSING})
UNCOMMITTED = ABSENT | {Reason.COMMIT_MISMATCH}
UNTIMELY = frozenset({Reason.COMMIT_EARLY, Reason.COMMIT_LATE, Reason.REVEAL_EARLY, Reason.REVEAL_LATE})
HANGING = faults.slow(0.05, then=faults.TIMED_OUT)
DOWN = faults.unreachable(20.0, 3.0, 13.0)


def scenario(name: str, rows: tuple[int, ...], title: str, expect: Expect, *reasons: Reason, **more: Any) -> Scenario:
    """A scenario with its legal reasons."""
    return Scenario(name, rows, title, expect, frozenset(reasons), **more)


def attack(name: str, rows: tuple[int, ...], title: str, *reasons: Reason, **more: Any) -> Scenario:
    """An attack of the miner of the same name, to be rejected."""
    return scenario(name, rows, title, REJECT, *reasons, actor=name, **more)


def mutation(name: str, rows: tuple[int, ...], title: str) -> Scenario:
    """A payload that a mutation made, to be rejected for the reasons that belong to it."""
    return Scenario(name, rows, title, REJECT, MUTATIONS[name][1], actor=name)


def store_fault(
    name: str,
    title: str,
    bucket: BucketFault,
    *reasons: Reason,
    rows: tuple[int, ...] = (22,),
    expect: Expect = REJECT,
    **more: Any,
) -> Scenario:
    """Honest miners whose buckets are faulty."""
    return scenario(name, rows, title, expect, *reasons, bucket=bucket, **more)


def endpoint_fault(
    name: str, title: str, chain: ChainFault, *reasons: Reason, windows: int = 3, **more: Any
) -> Scenario:
    """Honest miners whose chain endpoints are faulty."""
    return scenario(name, (28,), title, CONTINUE, *ABSENT, *reasons, chain=chain, windows=windows, **more)


def misconduct(name: str, rows: tuple[int, ...], title: str, reason: Reason, **more: Any) -> Scenario:
    """The aggregator of this name among honest miners; each window of its turn is reported for this reason."""
    publisher = Misconduct(PUBLISHERS[name], **more)
    return scenario(name, rows, title, CONTINUE, reason, publisher=publisher, alone=True, windows=4)


BYTES = (
    attack("pickle", (1,), "a pickle in place of a payload", Reason.MALFORMED),
    attack(
        "smuggled_pickle", (1,), "a pickle inside a payload", Reason.MALFORMED, Reason.BAD_PAYLOAD, Reason.NOT_CANONICAL
    ),
    attack("zip_bomb", (1,), "an archive that unpacks to hundreds of times its size, elsewhere", Reason.MALFORMED),
    mutation("endless_unary", (2,), "a plane of bits without an end"),
    mutation("truncated", (2, 22), "a payload without its last byte"),
    mutation("followed_by_more", (2,), "bytes after the last section"),
    mutation("oversized", (3,), "a payload longer than any legal one"),
    attack("five_gigabytes", (3,), "a manifest that promises five gigabytes", Reason.WRONG_SIZE),
    attack("wrong_size", (2,), "a manifest that promises another length", Reason.WRONG_SIZE),
    attack("wrong_hash", (20,), "a manifest that promises another hash", Reason.WRONG_HASH),
    scenario("junk_keys", (3,), "hundreds of junk keys in a bucket", CONTINUE, actor="junk_keys"),
    mutation("other_k", (2, 4), "a payload of other chunks"),
    mutation("forged_layout", (4,), "other chunks under the right digest"),
    mutation("missing_tensor", (4,), "a tensor is missing"),
    mutation("extra_tensor", (4,), "a tensor too many"),
    mutation("reordered_tensors", (4,), "two tensors have changed places"),
    mutation("index_beyond", (5,), "an index beyond its chunk"),
    mutation("index_twice", (5,), "a gap that leads back to an index"),
    mutation("scale_nan", (6,), "the bits of a NaN for a scale"),
    mutation("scale_negative", (6,), "the bits of a negative number for a scale"),
    mutation("scale_beyond_table", (6,), "a scale beyond the table"),
    mutation("scale_below_table", (6,), "a scale below the table"),
    mutation("no_largest_scale", (6,), "a second way to write the same scales"),
    mutation("stray_bits", (6,), "bits after the last one of a plane"),
    mutation("flipped_bit", (22,), "a bit that has flipped"),
    attack("garbage", (1,), "noise of the right length", Reason.MALFORMED),
)

INFLUENCE = (
    scenario("huge", (7,), "an honest update, a million times too large", BOUND, actor="huge", training=True),
    scenario("colluding", (8,), "the same huge update from every attacker", BOUND, actor="colluding", training=True),
    scenario("zero", (11,), "payloads that say nothing", BOUND, actor="zero", training=True),
)

IDENTITY = (
    attack("copying", (12,), "another's payload under an own manifest", *UNCOMMITTED),
    attack(
        "copying_late_commit",
        (12, 19),
        "another's payload, with a commitment made to fit",
        *UNCOMMITTED,
        Reason.COMMIT_LATE,
    ),
    attack(
        "copying_commit",
        (12,),
        "another's commitment, manifest and payload under an own commitment",
        *UNCOMMITTED,
        Reason.WRONG_IDENTITY,
    ),
    attack("copying_bucket", (12,), "all that another published, as it is", *ABSENT, Reason.WRONG_IDENTITY),
    scenario("moving", (20,), "another's bucket, committed on chain in mid-window", CONTINUE, *ABSENT, actor="moving"),
    scenario("staking", (41,), "stake on every other miner", CONTINUE, actor="staking", windows=3, alone=True),
    attack("impersonating", (12, 39), "another's name over an own signature", *ABSENT, Reason.BAD_SIGNATURE),
    attack("replaying", (39,), "the signed objects of an earlier window", Reason.WRONG_WINDOW, quiet=1, windows=3),
    attack("repeating", (14, 39), "the payload of an earlier window", Reason.WRONG_WINDOW, quiet=1, windows=3),
    mutation("other_window", (39,), "a payload of the window before"),
    mutation("other_uid", (12,), "a payload in another's name"),
    attack("foreign", (39,), "a manifest for another subnet", Reason.WRONG_NETWORK),
    mutation("other_version", (32,), "a payload of another protocol version"),
    attack("old_client", (32,), "a manifest of another protocol version", Reason.WRONG_NETWORK),
    attack("other_data", (16,), "a manifest that names other data than was assigned", Reason.WRONG_ASSIGNMENT),
)

TIMING = (
    attack("silent", (19,), "a commitment and no reveal", Reason.MANIFEST_MISSING),
    attack("late", (19,), "a reveal after the grace", Reason.REVEAL_LATE),
    attack("hasty", (19,), "a reveal before the close", Reason.REVEAL_EARLY),
    attack("late_commit", (12, 19), "a commitment after the close", Reason.COMMIT_LATE),
    scenario(
        "backdating",
        (12, 19),
        "another's payload, with a commitment that is dated back",
        CONTINUE,
        Reason.COMMIT_UNSEEN,
        *ABSENT,
        actor="backdating",
        bucket=faults.BACKDATED,
    ),
    attack("early_commit", (19,), "a commitment a window before", Reason.COMMIT_EARLY, quiet=1, windows=3),
    attack("fast_clock", (19,), "a clock half a minute ahead", *ABSENT, *UNTIMELY, windows=3),
    attack("slow_clock", (19,), "a clock half a minute behind", *ABSENT, *UNTIMELY, windows=3),
    store_fault("stamped_late", "a store that stamps half a minute late", faults.STAMPED_LATE, *UNTIMELY, rows=(19,)),
    store_fault(
        "stamped_early", "a store that stamps half a minute early", faults.STAMPED_EARLY, *UNTIMELY, rows=(19,)
    ),
    attack("swapping", (20,), "a payload replaced before the readers come", Reason.WRONG_HASH),
    attack("withdrawing", (20,), "a payload taken away before the readers come", Reason.PAYLOAD_MISSING),
    scenario(
        "late_swapping",
        (20,),
        "a payload replaced between readers",
        CONTINUE,
        Reason.WRONG_HASH,
        Reason.REVEAL_LATE,
        Reason.OBJECT_DIFFERS,
        actor="late_swapping",
        windows=3,
    ),
)

MANIFESTS = (
    attack("manifest_deep_json", (38,), "brackets within brackets", Reason.MALFORMED),
    attack("manifest_huge_string", (3, 38), "a megabyte in one field", Reason.WRONG_SIZE),
    attack("manifest_control_characters", (38,), "a name that forges a line of a log", Reason.MALFORMED),
    attack("manifest_raw_control_characters", (38,), "control characters as they are", Reason.MALFORMED),
    attack("manifest_not_a_number", (38,), "a length that is not a number", Reason.MALFORMED),
    attack("manifest_spaced", (38,), "a second way to write the same JSON", Reason.NOT_CANONICAL, Reason.WRONG_SIZE),
    attack("manifest_forged_signature", (39,), "a signature that nobody made", Reason.BAD_SIGNATURE),
    attack("manifest_empty", (38,), "no byte at all", Reason.MALFORMED),
    mutation("control_characters", (38,), "a hotkey that clears the screen"),
)

ATTACKS = (*BYTES, *INFLUENCE, *IDENTITY, *TIMING, *MANIFESTS)

STORES = (
    store_fault("bucket_forbidden", "403", faults.failing(FORBIDDEN), Reason.BUCKET_UNREADABLE),
    store_fault("bucket_missing", "the bucket is gone", faults.failing(NO_SUCH_BUCKET), Reason.BUCKET_UNREADABLE),
    store_fault("bucket_busy", "429", faults.failing(TOO_MANY_REQUESTS), Reason.STORE_BUSY),
    store_fault("bucket_broken", "503", faults.failing(SERVER_ERROR), Reason.STORE_BUSY),
    store_fault("bucket_truncates", "bodies that end early", faults.TRUNCATING, Reason.BUCKET_UNREADABLE),
    store_fault("bucket_shortens", "bodies that end early unnoticed", faults.SHORTENING, Reason.MALFORMED),
    store_fault("bucket_corrupts", "a bit flipped on the way", faults.CORRUPTING, Reason.WRONG_HASH),
    store_fault("bucket_stale", "objects that show up late", faults.stale(30.0), *ABSENT),
    store_fault("bucket_hangs", "no answer in time", HANGING, Reason.STORE_UNREACHABLE, rows=(21, 22)),
    store_fault("bucket_flaky", "a 503 before the first answers", faults.flaky(2), expect=CONTINUE),
    store_fault("bucket_slow", "slow answers", faults.slow(0.02), rows=(21,), expect=CONTINUE),
    store_fault(
        "key_rotated",
        "a key that is taken back in mid-window",
        faults.failing(FORBIDDEN, since_seconds=10.0),
        Reason.BUCKET_UNREADABLE,
        expect=CONTINUE,
        windows=3,
    ),
    store_fault(
        "two_faced",
        "other bytes for every second reader",
        faults.TWO_FACED,
        Reason.WRONG_HASH,
        rows=(20,),
        expect=CONTINUE,
    ),
    store_fault(
        "two_timed", "another time for every second reader", faults.TWO_TIMED, *UNTIMELY, rows=(20,), expect=CONTINUE
    ),
    store_fault(
        "withheld",
        "every second reader is refused",
        faults.WITHHELD,
        Reason.BUCKET_UNREADABLE,
        rows=(21,),
        expect=CONTINUE,
    ),
)

NODES = (
    endpoint_fault("chain_unreachable", "an endpoint that is down for seconds in every window", DOWN, windows=4),
    endpoint_fault(
        "publisher_unreachable",
        "the same, and the aggregator's endpoint is down as well",
        DOWN,
        windows=4,
        publisher_chain=True,
        alone=True,
    ),
    endpoint_fault("chain_stale", "an endpoint three blocks behind", partial(StaleChain, blocks=3), *UNTIMELY),
    endpoint_fault(
        "chain_reorganises",
        "a head that runs ahead, repeats itself and goes back",
        partial(ReorganisingChain, depth=3),
        *UNTIMELY,
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
    misconduct("hasty_publisher", (25,), "an owner that changes settings without notice", Reason.PLAN_INVALID),
    misconduct(
        "two_faced_publisher",
        (20, 25),
        "an aggregator that replaces its roster once it is decided",
        Reason.ROSTER_EQUIVOCATION,
        is_provable=True,
        delay=1,
    ),
    misconduct(
        "double_voting_publisher",
        (25,),
        "a validator that signs two votes in one ballot",
        Reason.WORD_EQUIVOCATION,
        is_provable=True,
        needs_turn=False,
    ),
)


SCENARIOS: Mapping[str, Scenario] = {each.name: each for each in (*ATTACKS, *STORES, *NODES, *EMPTY, *AGGREGATORS)}
"""Every scenario by name."""
