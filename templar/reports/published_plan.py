"""The plan of a network as its public objects show it: what was adopted, and what its owners propose."""

import logging
from dataclasses import dataclass
from pathlib import Path

from templar.agreement.ballot_box import decided_roster
from templar.agreement.checkpoint import list_checkpoints, mark_of, read_manifest
from templar.agreement.genesis import Birth
from templar.agreement.proven_state import proven_state
from templar.agreement.settings_plan import SettingsPlan, read_proposal
from templar.agreement.state import StateMark
from templar.errors import TemplarError
from templar.exchange.network_view import NetworkView
from templar.exchange.objects import PlanEntry
from templar.neuron.snapshot import Snapshots
from templar.timeline import window_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """What an owner of the network proposes."""

    hotkey: str
    uid: int | None  # None for an owner that is no neuron of the subnet
    entry: PlanEntry | None
    problem: str  # why there is none, or why it cannot be adopted now; empty if it can


@dataclass(frozen=True)
class PublishedPlan:
    """The plan, the window that is open, and the newest window whose decision is part of it."""

    plan: SettingsPlan
    current: int
    known_to: int
    outer_steps: int  # up to that window
    proposals: tuple[Proposal, ...]


def published_plan(exchange: NetworkView, birth: Birth, home: Path) -> PublishedPlan:
    """Read the plan: that of the newest state in this folder or of the newest proven checkpoint, and rosters since.

    Raises:
        TransientError: The chain could not be reached.
    """
    # 1. The entries of a state, then those of the rosters that were decided after it.
    current = window_of(exchange.chain.block(), exchange.hparams.windows)
    mark = newest_mark(exchange, birth, current, home)
    plan, known_to, outer_steps = SettingsPlan(exchange.hparams, mark.plan), mark.window, mark.outer_steps
    for window in range(mark.window + 1, current):
        try:
            if (decided := decided_roster(exchange, window)) is not None:
                plan = plan.adopted(decided[0].plan, window, birth.start)
                outer_steps += 1
        except TemplarError as error:
            log.info("window %d: the decision is not known now: %s", window, error)
            break
        known_to = window

    # 2. What the owners propose.
    members, proposals = exchange.newest_metagraph(), list[Proposal]()
    for hotkey in plan.owners(birth.start, current):
        owner, entry, problem = members.by_hotkey(hotkey), None, "proposes nothing"
        if owner is None:
            proposals.append(Proposal(hotkey, None, None, "is no neuron of this subnet"))
            continue
        try:
            found = read_proposal(exchange.buckets, birth.start, owner)
            if found is not None:
                entry = found.body.entry
                problem = "is adopted" if entry in plan.entries else problem_of(plan, entry, current, birth)
        except TemplarError as error:
            problem = f"[{error.reason}] {error.message}"
        proposals.append(Proposal(hotkey, owner.uid, entry, problem))
    return PublishedPlan(plan, current, known_to, outer_steps, tuple(proposals))


def problem_of(plan: SettingsPlan, entry: PlanEntry, window: int, birth: Birth) -> str:
    """Say why an entry cannot be adopted with the roster of a window, or not be followed; empty if it can."""
    if problem := plan.problem(entry, window, birth.start):
        return problem
    try:
        plan.after(entry).at(entry.first_window)
    except TemplarError as error:
        return error.message
    return ""


def newest_mark(exchange: NetworkView, birth: Birth, current: int, home: Path | None = None) -> StateMark:
    """The newest checkpoint of a proven state before a window, or the newest snapshot in a folder if that is newer."""
    newest = birth.mark
    if home is not None and (home / "snapshots").is_dir():
        newest = next(iter(Snapshots(home / "snapshots", birth.network, kept=1).marks()), newest)
    shown = []
    for validator in exchange.newest_metagraph().validators():
        try:
            windows = list_checkpoints(exchange.buckets.reader(validator), validator.uid)
        except TemplarError as error:
            log.info("checkpoints of uid %d are left out: %s", validator.uid, error)
            continue
        shown += [(window, validator) for window in windows if newest.window < window < current]
    for window, validator in sorted(shown, key=lambda each: -each[0]):
        try:
            found = read_manifest(exchange.buckets.reader(validator), validator, window, exchange.network)
            if found is not None and (found.root, found.outer_steps) == proven_state(exchange, window):
                return mark_of(found)
        except TemplarError as error:
            log.info("checkpoint of window %d of uid %d is left out: %s", window, validator.uid, error)
    return newest
