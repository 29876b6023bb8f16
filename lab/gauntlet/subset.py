"""The scenarios that run on a real endpoint: those of the catalogue, and those that need an endpoint.

A bucket's misbehaviour happens at the gates here, over real connections, the same for every client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lab.adversary.catalogue import SCENARIOS
from lab.adversary.judge import Expect, Scenario
from lab.gauntlet.gate import Ask, Drip, Refusal, Treatment
from lab.simulate.world import Member
from templar.errors import PermanentError, Reason

FORBIDDEN = Refusal(403, "AccessDenied")
GONE = Refusal(404, "NoSuchBucket")
BUSY = Refusal(429, "TooManyRequests")
BROKEN = Refusal(503, "ServiceUnavailable")
SLOW_LORIS = Drip(1024)

SUBSET = (
    "pickle",
    "index_twice",
    "huge",
    "copying",
    "late",
    "late_swapping",
    "old_client",
    "replaying",
    "withheld",
    "dripping",
    "retry_storm",
    "one_hotkey",
)
"""The scenarios by default: one for each kind of attack, all of them in one network."""

BucketRule = Callable[[Ask, Member | None], Treatment | None]
"""A bucket's answer to a reader; None for that of its endpoint. The reader is None if it is no member."""


def _always(treatment: Treatment) -> BucketRule:
    return lambda ask, reader: treatment


def _withheld(ask: Ask, reader: Member | None) -> Treatment | None:
    """Every second reader is refused; the aggregator, uid 1, is not."""
    del ask
    return FORBIDDEN if reader is not None and reader.uid % 2 == 0 else None


BUCKET_RULES: Mapping[str, BucketRule] = {
    "bucket_forbidden": _always(FORBIDDEN),
    "bucket_missing": _always(GONE),
    "bucket_busy": _always(BUSY),
    "bucket_broken": _always(BROKEN),
    "withheld": _withheld,
    "dripping": _always(SLOW_LORIS),
    "retry_storm": _always(BROKEN),
}
"""The answers of the attackers' buckets once the scenario's quiet windows are over."""

ONE_HOTKEY, RETRY_STORM = "one_hotkey", "retry_storm"

ENDPOINT_SCENARIOS = (
    Scenario(
        "dripping",
        (21,),
        "a bucket that gives 1 KB per second",
        Expect.REJECT,
        frozenset({Reason.STORE_UNREACHABLE, Reason.TOO_SLOW}),
    ),
    Scenario(
        RETRY_STORM,
        (22, 33),
        "a bucket that fails from the third window on: readers do not ask much more often",
        Expect.REJECT,
        frozenset({Reason.STORE_BUSY, Reason.TOO_SLOW}),
        quiet=2,  # the first window has no earlier one to read, so it is the calmest
        windows=3,
    ),
    Scenario(
        ONE_HOTKEY,
        (30,),
        "a second process with an honest miner's hotkey",
        Expect.REJECT,
        frozenset({Reason.ALREADY_RUNNING}),
        is_outside=True,
    ),
)
"""Scenarios that need a real endpoint or a real process."""

LISTED: Mapping[str, Scenario] = {scenario.name: scenario for scenario in (*SCENARIOS.values(), *ENDPOINT_SCENARIOS)}
"""Every scenario by name, as its catalogue defines it."""

LATE_OR_ABSENT = frozenset(
    {Reason.COMMIT_MISSING, Reason.MANIFEST_MISSING, Reason.PAYLOAD_MISSING, Reason.COMMIT_LATE, Reason.REVEAL_LATE}
)
"""Legal reasons of every attacker in real time: on a busy machine an attacker may be too late for its attack."""


def telling_reasons(name: str) -> frozenset[Reason]:
    """The reasons of which a reader must report at least one, or else nothing was attacked."""
    reasons = LISTED[name].reasons
    return (reasons - LATE_OR_ABSENT) or reasons


def _in_real_time(scenario: Scenario) -> Scenario:
    """The scenario with the legal reasons and the bucket of a run in real time."""
    reasons = scenario.reasons if scenario.name == ONE_HOTKEY else scenario.reasons | LATE_OR_ABSENT
    return replace(scenario, reasons=reasons, bucket=None if scenario.name in BUCKET_RULES else scenario.bucket)


AVAILABLE: Mapping[str, Scenario] = {
    name: _in_real_time(scenario) for name, scenario in LISTED.items() if not (scenario.alone or scenario.chain)
}
"""The scenarios that can share a network in real time with any other."""


def chosen(names: Sequence[str]) -> tuple[Scenario, ...]:
    """Scenarios by their names, each once, in their order; without any name the named subset.

    Raises:
        PermanentError: `bad_parameters`; a name is not that of a scenario that runs here.
    """
    for name in names:
        if name not in AVAILABLE:
            where = "it runs on simulated time only" if name in SCENARIOS else "there is no such scenario"
            raise PermanentError(
                Reason.BAD_PARAMETERS, f"scenarios: {name!r}: {where}; on an endpoint there are {', '.join(AVAILABLE)}"
            )
    return tuple(AVAILABLE[name] for name in dict.fromkeys(names or SUBSET))
