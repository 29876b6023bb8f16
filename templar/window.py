"""A window of each role as ordered steps: the one place where their order stands.

`mine`, `aggregate` and `validate` take a node, in real and in simulated time (`drive_window`), or under Prefect its
`NeuronTasks`, which run each step as a retrying task (`tasks/window.py`). The waits are inside the steps. Each of the
three returns a `WindowResult`: what was done, and what the node owed and did not do.
`open_window` chooses the window that a node works on and brings the state to the one before it.
"""

# ruff: noqa: D102 - the methods of the nodes say what a step does

import logging
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

from templar.agreement.conflicts import AuditReport
from templar.agreement.state import StateMark
from templar.agreement.voter import Settlement
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.gather import GatherReport
from templar.exchange.publish import TimedReport
from templar.neuron.aggregator import Aggregator
from templar.neuron.catchup import catch_up
from templar.neuron.configuration import CHAIN_ROLES, announce_role
from templar.neuron.journal import Status
from templar.neuron.miner import Miner, PageReport, TrainReport
from templar.neuron.node import CHAIN_IS_AWAY, Node
from templar.neuron.private_state import PayloadReport
from templar.neuron.validator import Validator, WeightsReport
from templar.scoring.evidence import Evidence, WindowFacts
from templar.timeline import first_block, window_of

log = logging.getLogger(__name__)

_OVER = (Status.FINISHED, Status.ABANDONED)


class Steps(Protocol):
    """The steps that every role takes; each is safe to call again (docs/architecture.md D9)."""

    def update_peers(self, window: int) -> object: ...
    def gather(self, window: int) -> GatherReport: ...
    def apply(self, settlement: Settlement) -> StateMark: ...
    def publish_sync_proof(self, window: int) -> object: ...
    def close_window(self, report: GatherReport, settlement: Settlement) -> AuditReport: ...


class MinerSteps(Steps, Protocol):
    """A miner's steps."""

    def fetch_pages(self, window: int) -> PageReport: ...
    def train(self, window: int) -> TrainReport: ...
    def compress(self, window: int) -> PayloadReport: ...
    def commit(self, window: int) -> TimedReport: ...
    def upload(self, window: int) -> TimedReport: ...
    def settle(self, window: int) -> Settlement: ...


class AggregatorSteps(Steps, Protocol):
    """The steps of a node that publishes rosters and signs decisions."""

    def observe_commitments(self, window: int) -> object: ...
    def settle_and_publish(self, window: int, report: GatherReport) -> Settlement: ...
    def publish_decision(self, settlement: Settlement) -> TimedReport: ...


class ValidatorSteps(AggregatorSteps, Protocol):
    """A validator's steps: those of an aggregator, and the measuring."""

    def evaluate(self, report: GatherReport, settlement: Settlement) -> WindowFacts | None: ...
    def rate(self, window: int, facts: WindowFacts | None) -> Evidence | None: ...
    def publish_evidence(self, evidence: Evidence | None) -> object: ...
    def set_weights(self, evidence: Evidence | None) -> WeightsReport | None: ...


class Missed(StrEnum):
    """The duty that a node did not do in a window. The window was closed all the same, so nothing is left to repeat."""

    NOTHING_PUBLISHED = "NothingPublished"
    """A miner with an assignment published no payload, or an aggregator no roster that counts when it had its turn."""
    NOTHING_SCORED = "NothingScored"
    """A validator measured none of the payloads."""


@dataclass(frozen=True)
class WindowResult:
    """The result of a window that was run to its end."""

    message: str
    missed: Missed | None = None
    reason: Reason | None = None  # why it was missed; the message has it, too


def mine(node: MinerSteps, window: int) -> WindowResult:
    """One window of a miner. Without a slot, which is no fault of its own, it owes no payload."""
    # 1. Find the peers, then train until shortly before the close. Training says why if nothing came of it.
    node.update_peers(window)
    node.fetch_pages(window)
    trained = node.train(window)

    # 2. Commit to the payload before the close and reveal it after; without a commitment in time nobody would count it.
    done, reason = "not trained", trained.reason
    if reason is None:
        payload = node.compress(window)
        done, reason = "not committed", node.commit(window).reason
        if reason is None:
            done, reason = "not revealed", node.upload(window).reason

    # 3. Prove the state before the window: its settling block, which draws the proof, is long there.
    node.publish_sync_proof(window - 1)

    # 4. Gather what the peers revealed, and wait for the roster that decides the window.
    report = node.gather(window)
    settlement = node.settle(window)

    # 5. Apply the decided payloads, and compare the roster with what was gathered.
    state = node.apply(settlement)
    audit = node.close_window(report, settlement)

    done = f"published {payload.num_bytes} bytes" if reason is None else f"{done} [{reason}]"
    message = f"window {window}: {done}, applied {settlement.uids}, root {state.root[:12]}{audit.summary}"
    missed = None if reason in (None, Reason.NO_ASSIGNMENT) else Missed.NOTHING_PUBLISHED
    return WindowResult(message, missed, reason if missed else None)


def aggregate(node: AggregatorSteps, window: int) -> WindowResult:
    """One window of an aggregator. It owes a roster if the ballots came to its slot."""
    # 1. See who committed before the close, and gather what the peers revealed after it.
    node.update_peers(window)
    node.observe_commitments(window)
    report = node.gather(window)

    # 2. Publish aggregate and roster in the own slot unless a lower rank's roster counts; sign what was decided.
    settlement = node.settle_and_publish(window, report)
    node.publish_decision(settlement)

    # 3. Apply the decided payloads, prove the new state, and compare the roster with what was gathered.
    state = node.apply(settlement)
    node.publish_sync_proof(window)
    audit = node.close_window(report, settlement)

    own = "" if audit.own_fault is None else f"own roster not published [{audit.own_fault}], "
    message = f"window {window}: {own}roster {settlement.uids}, root {state.root[:12]}{audit.summary}"
    return WindowResult(message, Missed.NOTHING_PUBLISHED if own else None, audit.own_fault)


def validate(node: ValidatorSteps, window: int) -> WindowResult:
    """One window of a validator. It owes a measurement of the payloads, if there are any."""
    # 1. See who committed before the close, and gather what every miner revealed after it: each miner is scored.
    node.update_peers(window)
    node.observe_commitments(window)
    report = node.gather(window)

    # 2. Settle on a roster, the own one if no lower rank's counts, and sign it before the next window closes.
    settlement = node.settle_and_publish(window, report)
    node.publish_decision(settlement)

    # 3. Measure every payload on the state before the window, then rate and slash the miners. If the data cannot be
    #    read, the window goes on without scores, because the state must not fall behind. Without the chain no step goes
    #    on, so the window is tried again.
    facts, reason = None, None
    try:
        facts = node.evaluate(report, settlement)
    except TemplarError as error:
        if error.reason in CHAIN_IS_AWAY:
            raise
        log.error("window %d: nothing is scored: %s", window, error)  # noqa: TRY400 - expected, its message says it all
        reason = error.reason
    evidence = node.rate(window, facts)

    # 4. Apply the decided payloads, publish the evidence, and set weights if they are due.
    state = node.apply(settlement)
    node.publish_evidence(evidence)
    weights = node.set_weights(evidence)

    # 5. Prove the new state and compare the roster with what was gathered.
    node.publish_sync_proof(window)
    audit = node.close_window(report, settlement)

    reason = reason if evidence is None and reason else _why_unscored(evidence)
    loss = "no payloads" if evidence is None or evidence.loss is None else f"loss {evidence.loss:.4f}"
    done = loss if reason is None else f"not measured [{reason}]"
    weighed = f", {weights.summary}" if weights else ""
    message = f"window {window}: {done}, applied {settlement.uids}{weighed}, root {state.root[:12]}{audit.summary}"
    return WindowResult(message, Missed.NOTHING_SCORED if reason else None, reason)


def _why_unscored(evidence: Evidence | None) -> Reason | None:
    """Say why no payload of a window was measured; None if one was, or if there was none.

    A window without evidence that did not fail now was applied, unmeasured, by an earlier process.
    """
    if evidence is None:
        return Reason.WINDOW_FINISHED
    has_payloads = any(record.facts.payload_sha256 for record in evidence.miners)
    return Reason.NON_FINITE_LOSS if evidence.loss is None and has_payloads else None


class Action(StrEnum):
    """The treatment of a window."""

    RUN = "run"
    SKIP = "skip"
    CATCHING_UP = "catching_up"


@dataclass(frozen=True)
class Opening:
    """The decision of `open_window`; reason and detail say why a window is not run."""

    window: int
    action: Action
    reason: Reason | None = None
    detail: str = ""
    behind: int = 0  # windows that the state of a node that catches up lacks to take this one


def drive_window(node: Node, window: int) -> Opening:
    """One window of a node's role by direct calls; a transient error in a step leaves it to the next opening."""
    opening = open_window(node, window)
    if opening.action is not Action.RUN:
        return opening
    try:
        match node:
            case Miner():
                result = mine(node, window)
            case Aggregator():
                result = aggregate(node, window)
            case Validator():
                result = validate(node, window)
            case _:
                raise ValueError(f"{node.name}: a node without a role has no windows")
    except TransientError as error:
        log.warning("%s: window %d is left to catch-up: %s", node.name, window, error)
        return Opening(window, Action.CATCHING_UP, error.reason, str(error))
    if result.missed:
        log.warning("%s: %s: %s", node.name, result.missed, result.message)
    return opening


def open_window(node: Node, requested: int | None = None) -> Opening:
    """Claim a window and bring the state to the one before it.

    Without a request the node takes up the window that it claimed and did not finish, or else the current one, or, if
    that is finished, the next. A finished window and one that passed unclaimed are skipped. A node whose state cannot
    be brought up in time is catching up. A claimed window whose state is there already runs again: its steps do only
    what was cut off. TransientError if the chain could not be reached; `not_registered`, as in `_skip_window`.
    """
    # 1. Choose the window, and refuse one that cannot run.
    current = window_of(node.chain.head(), node.hparams.windows)
    window = requested
    if window is None:
        claims = [each for each in node.journal.open_claims() if each >= node.state.window]
        following = current + 1 if node.journal.status(current) in _OVER else current
        window = next(iter(claims), max(following, node.birth.start.start_window))
    if (refusal := _refusal(node, window, current)) is not None:
        return refusal

    # 2. Claim it, so that a restart takes it up, and wait until it opens.
    node.journal.claim(window)
    node.chain.wait_for_block(first_block(window, node.hparams.windows))
    if not node.takes_part(window):
        return _skip_window(node, window)

    # 3. Catch up with the window before it while a roster of this one can still be published.
    deadline = node.exchange.expected_times(window).null_after + node.hparams.windows.settle_delay_seconds
    before = node.state.window
    try:
        reached = catch_up(node, window - 1, deadline=deadline)
    except TransientError as error:
        at = node.state.window
        detail = f"at window {at}, wanted {window - 1}: {error}"
        return Opening(window, Action.CATCHING_UP, error.reason, detail, behind=window - 1 - at)
    if reached > window:
        node.finish(window)
        return Opening(window, Action.SKIP, Reason.WINDOW_FINISHED, f"the state is already that of window {reached}")
    if before < reached == window - 1:
        # Without this proof a node that returns would count as out of sync for one window more.
        node.publish_sync_proof(reached)
    node.use_settings(window)
    node.workload.prepare(node.state.plan, window, node.check_settings)
    node.time.begin(window)
    return Opening(window, Action.RUN)


def _refusal(node: Node, window: int, current: int) -> Opening | None:
    """Say why a window cannot run; None if it can."""
    skip = partial(Opening, window, Action.SKIP)
    status, start = node.journal.status(window), node.birth.start.start_window
    if status in _OVER:
        return skip(Reason.WINDOW_FINISHED, f"window {window} is {status}")
    if window < start:
        return skip(Reason.WINDOW_PASSED, f"the network starts at window {start}")
    if window > max(current + 1, start):  # neurons may wait for the network's first window while they come up
        away = first_block(window, node.hparams.windows) - node.chain.head()
        return skip(Reason.WINDOW_NOT_OPEN, f"window {window} opens in {away} blocks")
    if status is None and window < current - node.windows_late:
        return skip(Reason.WINDOW_PASSED, f"the chain is in window {current}")
    return None


def _skip_window(node: Node, window: int) -> Opening:
    """Skip a window that opened before this node was registered or had announced its role and its bucket.

    The role is announced again; the bucket is at the node's start and whenever a window opens. `not_registered` if the
    hotkey is not on the subnet any more. After a failure of the chain a later call goes on.
    """
    following = window_of(node.chain.block(), node.hparams.windows) + 1
    address, role = node.exchange.own_signer.address, str(node.role)
    if node.chain.metagraph().by_hotkey(address) is None:
        problem = f"hotkey {address} is not registered on subnet {node.chain.netuid} any more"
        raise PermanentError(Reason.NOT_REGISTERED, f"{problem}: register it, then start again")
    announce_role(node.chain, address, role)
    then = node.exchange.metagraph(window).by_hotkey(address)
    if then is None:
        reason, detail = Reason.NOT_REGISTERED, f"registered after window {window} had opened"
    elif then.role is not CHAIN_ROLES[role]:
        reason, detail = Reason.ROLE_MISSING, f"window {window} opened with the role {then.role} on chain, not {role}"
    else:
        reason, detail = Reason.COMMITMENT_MISSING, f"window {window} opened without a bucket of this hotkey on chain"
    node.finish(window, reason)
    return Opening(window, Action.SKIP, reason, f"{detail}: takes part from window {following} on")
