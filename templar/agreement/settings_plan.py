"""The plan: settings that change in a network's life, each from a window on (docs/protocol.md 2).

The owners that the start window names propose an entry, each in its own bucket. A publisher puts it into its roster,
and with the decided roster it is part of the agreed state: every root after it covers it, so nodes with another plan
are nodes with another state. An entry holds from a window so far ahead that every node has applied it by then.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from templar.chain.base import Metagraph, NeuronInfo
from templar.chain.hotkey import Signer, is_address
from templar.errors import PermanentError, Reason, RejectedError, TemplarError
from templar.exchange.buckets import Buckets
from templar.exchange.gather import ask_in_turn
from templar.exchange.object_keys import PLAN_KEY
from templar.exchange.objects import MAX_ENTRIES, AdoptedEntry, Approval, PlanEntry, PlanProposal, StartWindow
from templar.exchange.signed import Found, Network, Sealed, check_signature, read_signed, seal
from templar.hparams import HParams, with_changes
from templar.shared_results import shared
from templar.store.base import ObjectStore

log = logging.getLogger(__name__)

CHANGEABLE = (
    "data.other_dataset",
    *("training.batch_size", "training.micro_batch_size", "training.inner_steps", "training.max_step_batches"),
    *("training.max_grad_norm", "training.optimizer", "training.adamw.", "training.muon_learning_rate"),
    *("training.schedule.", "training.outer_learning_rate", "training.weight_decay"),
    *("gradient.momentum_decay", "gradient.feedback_carry"),
    *("peers.gather_peer_count", "peers.reserve_peer_count", "peers.minimum_peers", "peers.recent_windows"),
    *("scoring.", "weights.rule", "weights.value_exponent", "weights.own_data_exponent"),
    *("weights.windows_per_weights", "weights.power_normalisation", "weights.gather_share"),
    *("weights.gather_top_ratio", "weights.reserve_decay_ratio", "weights.burn_rate"),
)
"""The settings that an entry may change; a name that ends with a dot stands for all of its group but `FIXED`.

The rest says how objects are read, when they count, who decides, or how the data are shared out: it stays as in the
genesis.
"""
FIXED = ("scoring.validator_offset",)
OWNER = re.compile(r"plan\.owner_([1-9][0-9]?)")
"""The names with which an entry gives an owner's place to another hotkey, such as `plan.owner_1` that of the first."""
PROTOCOL = "protocol.version"
"""The name with which an entry says what protocol version the network speaks from its first window on."""
FARTHEST = 100
"""An entry begins at most so many times the notice ahead: after it another one must be able to begin."""


@dataclass(frozen=True)
class SettingsPlan:
    """The settings of a network by window: those of its genesis, and the entries that were adopted since."""

    genesis: HParams
    entries: tuple[PlanEntry, ...] = ()

    def at(self, window: int) -> HParams:
        """The settings of a window.

        Raises:
            PermanentError: `plan_unknown`; an entry that holds by then names a setting or a value that this release
                does not know.
        """
        holding = tuple(each for each in self.entries if each.first_window <= window)
        return _settings(self.genesis, holding) if holding else self.genesis

    @property
    def protocols(self) -> dict[int, str]:
        """The protocol versions that entries name, by their first window."""
        return {each.first_window: str(each.changes[PROTOCOL]) for each in self.entries if PROTOCOL in each.changes}

    def owners(self, start: StartWindow, window: int) -> tuple[str, ...]:
        """The hotkeys that own the network in a window: those of the start window, but for places that entries gave on.

        IndexError: An entry names a place that there is not.
        """
        found = list(start.owners)
        for entry in self.entries:
            for name, hotkey in entry.changes.items() if entry.first_window <= window else ():
                if place := OWNER.fullmatch(name):
                    found[int(place[1]) - 1] = str(hotkey)
        return tuple(found)

    def after(self, entry: PlanEntry) -> "SettingsPlan":
        """The plan with one more entry."""
        return replace(self, entries=(*self.entries, entry))

    def head(self, start: StartWindow) -> str:
        """Digest of the newest entry, or the genesis hash: the next entry names it as the one before."""
        return self.entries[-1].digest if self.entries else start.digest

    def problem(self, entry: PlanEntry, window: int, start: StartWindow) -> str:
        """Say why an entry cannot be adopted with the roster of a window; empty if it can.

        Whether this release knows the settings is another matter: see `at`.
        """
        earliest = window + self.genesis.windows.plan_notice_windows
        if self.entries:
            earliest = max(earliest, self.entries[-1].first_window + 1)
        if entry.number != len(self.entries) + 1 or entry.previous != self.head(start):
            return f"entry {entry.number} does not follow the newest one, number {len(self.entries)}"
        latest = window + FARTHEST * self.genesis.windows.plan_notice_windows
        if not earliest <= entry.first_window <= latest:
            begins = f"entry {entry.number} begins at window {entry.first_window}"
            return f"{begins}: with the notice, it may be {earliest} to {latest}"
        try:
            owners = self.after(entry).owners(start, entry.first_window)
        except IndexError:
            return f"entry {entry.number} names an owner that there is not: there are {len(start.owners)}"
        if len(set(owners)) < len(owners) or not all(map(is_address, set(owners).difference(start.owners))):
            return f"entry {entry.number} gives an owner's place to no hotkey, or two places to one"
        return ""

    def adopted(self, found: AdoptedEntry | None, window: int, start: StartWindow) -> "SettingsPlan":
        """The plan after a decided roster; what the roster adds against the rules is as if it were not there."""
        try:
            self.check(found, window, start)
        except RejectedError as error:
            log.error("window %d: its roster changes no setting: %s", window, error)  # noqa: TRY400 - it says it all
            return self
        if found is None or found.entry in self.entries:
            return self
        log.info("window %d: entry %d of the plan changes %s", window, found.entry.number, found.entry.summary)
        return self.after(found.entry)

    def check(self, found: AdoptedEntry | None, window: int, start: StartWindow) -> None:
        """Check what a window's roster adds to the plan; every node gets the same answer.

        Raises:
            RejectedError: `plan_invalid`; it does not follow the plan, comes too late, or too few owners signed it.
        """
        if found is None or found.entry in self.entries:
            return
        if problem := self.problem(found.entry, window, start):
            raise RejectedError(Reason.PLAN_INVALID, problem)
        signers, owners = {each.hotkey for each in found.approvals}, set(self.owners(start, window))
        if len(signers & owners) < start.owners_needed or len(signers) != len(found.approvals):
            problem = f"{len(signers & owners)} of {start.owners_needed} owners that are needed signed it"
            raise RejectedError(Reason.PLAN_INVALID, f"entry {found.entry.number}: {problem}")
        for each in found.approvals:
            check_signature(Sealed(proposal(start, each, found.entry), each.signature))


def check_changes(settings: HParams, changes: Mapping[str, Any]) -> HParams:
    """Change settings that may change; an owner is none of them.

    Raises:
        PermanentError: `plan_unknown`; the message names each setting that is unknown or fixed, and each bad value.
    """
    groups = tuple(name for name in CHANGEABLE if name.endswith("."))
    changes = {name: value for name, value in changes.items() if not OWNER.fullmatch(name)}
    fixed = [name for name in changes if name in FIXED or (name not in CHANGEABLE and not name.startswith(groups))]
    if fixed:
        problem = f"{', '.join(fixed)}: this release changes no such setting within a network"
        raise PermanentError(Reason.PLAN_UNKNOWN, problem)
    try:
        return with_changes(settings, changes)
    except PermanentError as error:
        raise PermanentError(Reason.PLAN_UNKNOWN, error.message) from None


@shared(lambda genesis, entries: (genesis.model_dump_json(), *(each.digest for each in entries)), most=16)
def _settings(genesis: HParams, entries: tuple[PlanEntry, ...]) -> HParams:
    settings = genesis
    for entry in entries:
        try:
            settings = check_changes(settings, entry.changes)
        except PermanentError as error:
            problem = f"entry {entry.number} of the plan, from window {entry.first_window} on: {error.message}"
            raise PermanentError(error.reason, f"{problem}: install a release that knows it") from None
    return settings


def proposed_entry(
    buckets: Buckets,
    members: Metagraph,
    start: StartWindow,
    plan: SettingsPlan,
    window: int,
    *,
    seconds: float,
    concurrency: int = 1,
) -> AdoptedEntry | None:
    """The entry that enough owners propose and that may be adopted with the roster of a window; None if there is none.

    An owner that is no neuron of the subnet, or whose bucket fails or takes more than so many seconds, is left out.
    """
    hotkeys = plan.owners(start, window)
    owners = {owner.uid: owner for owner in map(members.by_hotkey, hotkeys) if owner is not None}

    def read(uid: int) -> Found[PlanProposal] | None:
        try:
            return read_proposal(buckets, start, owners[uid])
        except TemplarError as error:
            log.warning("what the owner uid %d proposes is left out: %s", uid, error)
            return None

    signed: dict[PlanEntry, list[Approval]] = defaultdict(list)
    if len(plan.entries) < MAX_ENTRIES:
        for uid, found in ask_in_turn(read, owners, seconds=seconds, concurrency=concurrency):
            if found is not None and found.body.entry not in plan.entries:
                approval = Approval(uid=uid, hotkey=owners[uid].hotkey, signature=found.signature)
                signed[found.body.entry].append(approval)
    for entry, approvals in sorted(signed.items(), key=lambda item: item[0].digest):
        adopted = AdoptedEntry(entry=entry, approvals=tuple(sorted(approvals, key=lambda each: each.uid)))
        try:
            plan.check(adopted, window, start)
        except RejectedError as error:
            log.warning("an entry of the plan is not adopted: [%s] %s", error.reason, error.message)
            continue
        return adopted
    return None


def read_proposal(buckets: Buckets, start: StartWindow, owner: NeuronInfo) -> Found[PlanProposal] | None:
    """What an owner proposes, None if it proposes nothing; errors as in `read_signed`."""
    network = Network(start.netuid, start.digest)
    return read_signed(buckets.reader(owner), PLAN_KEY, PlanProposal, network=network, author=owner)


def propose(store: ObjectStore, start: StartWindow, owner: NeuronInfo, signer: Signer, entry: PlanEntry) -> None:
    """Propose the next entry in an owner's own bucket, in place of what it proposed before.

    Raises:
        TransientError: The store failed; a later call goes on.
    """
    store.put(PLAN_KEY, seal(proposal(start, owner, entry), signer).encode())


def proposal(start: StartWindow, owner: NeuronInfo | Approval, entry: PlanEntry) -> PlanProposal:
    """The body that an owner signs."""
    return PlanProposal(netuid=start.netuid, genesis=start.digest, uid=owner.uid, hotkey=owner.hotkey, entry=entry)
