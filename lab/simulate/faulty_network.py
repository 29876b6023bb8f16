"""A network under a plan of faults (`lab.simulate.fault_plan`), and the invariants that hold in spite of them.

Members without a fault are *healthy*. In every window

* all nodes that run honest code and applied the window have one root;
* every healthy node has applied the window before the next one closes; unless every publisher of the window has a
  fault, its roster has the payload of every healthy miner;
* no validator that runs honest code penalises a healthy miner, not even one that has a fault itself;
* nobody has a weight without a payload that counted and was measured.

At the end every node that runs honest code has come to the others' root, and no report convicts one of them; where the
miners train, every healthy validator pays somebody.
"""

import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from lab.adversary.chains import (
    BlockSchedule,
    IntermittentChain,
    PrunedChain,
    SkewedChain,
    UnreachableChain,
    difficult_blocks,
)
from lab.adversary.faults import CountingChain, FaultyStore, IntermittentStore, Killed, KillSwitch
from lab.adversary.reports import read_accusations
from lab.simulate.fault_plan import BUCKETS, CALM_WINDOWS, ENDPOINTS, EPOCH_WINDOWS, PRUNED_AFTER, FaultKind, FaultPlan
from lab.simulate.run import evidence_in
from lab.simulate.world import GENESIS_TIME, START_WINDOW, VALIDATING, Member, SimulatedStage, Weather, World
from templar.agreement.settings_plan import SettingsPlan, propose
from templar.agreement.voter import Settlement
from templar.canonical import keyed_seed
from templar.chain.base import Chain, NeuronInfo
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange import network_view
from templar.exchange.network_view import LONGEST_PAUSE_SECONDS
from templar.exchange.objects import PlanEntry
from templar.hparams import HParams, load_hparams
from templar.neuron.catchup import catch_up
from templar.neuron.node import Node
from templar.scoring.evidence import Evidence
from templar.shared_results import sharing
from templar.store.base import ObjectStore
from templar.store.files import memory_folder
from templar.timeline import first_block
from templar.window import Action, drive_window

PAUSES = (2, 5, 10, 20, 40)  # seconds from one try of a window's steps to the next, as under Prefect
EVAL_SEQUENCES = 16  # sequences that a validator measures of the own data of a miner, and of others'


SETTINGS: Mapping[str, tuple[float, ...]] = {
    "training.adamw.learning_rate": (0.001, 0.002, 0.004),
    "training.outer_learning_rate": (0.5, 0.7, 1.0),
    "gradient.momentum_decay": (0.8, 0.9),
    "peers.gather_peer_count": (20, 24),
    "scoring.baseline_share": (0.1, 0.2),
    "weights.burn_rate": (0.0, 0.5),
}
"""The settings that change while the network runs, and their values."""


@dataclass(frozen=True)
class OlderPlan(SettingsPlan):
    """The plan as a release sees it that does not know some settings."""

    unknown: frozenset[str] = frozenset()

    def at(self, window: int) -> HParams:
        """As a release that knows all, if no entry that holds by then names one of them."""
        named = {name for each in self.entries if each.first_window <= window for name in each.changes}
        if named & self.unknown:
            raise PermanentError(Reason.PLAN_UNKNOWN, f"{', '.join(sorted(named & self.unknown))}: install a release")
        return super().at(window)


class ViolationError(Exception):
    """An invariant that does not hold."""


@dataclass
class FaultyNetwork:
    """A network under a plan: its nodes, and what is known of its windows so far.

    `on_window` is called with each window for which the invariants hold.
    """

    plan: FaultPlan
    folder: Path
    hparams: HParams
    on_window: Callable[[int], None] = lambda window: None
    nodes: dict[int, Node] = field(default_factory=dict)
    roots: dict[int, str] = field(default_factory=dict)
    changes: int = 0  # entries of the plan that were adopted
    outer_steps: int = 0
    paying: set[int] = field(default_factory=set)  # validators that gave somebody a weight
    null_windows: int = 0
    kills: int = 0
    stopped: int = 0  # windows that a process of an older release did not take part in

    def __post_init__(self) -> None:
        rules, seed = self.hparams.windows, self.plan.seed
        blocks = difficult_blocks(seed, rules.block_seconds)
        self.schedule = BlockSchedule(GENESIS_TIME, blocks) if self.plan.is_difficult else None
        self.stage = SimulatedStage(self.folder / "buckets")
        self.clock = self.stage.clock
        self._switches = {fault.uid: KillSwitch() for fault in self.plan.faults}
        self.world = World(
            self.folder,
            self.hparams,
            seed=seed,
            actors=self.plan.actors,
            num_validators=self.plan.num_validators,
            training=self.plan.is_trained,
            stage=self.stage,
            weather=Weather(self._reader, self._own, self._chain),
            schedule=self.schedule,
        )
        self.settings: Mapping[str, Sequence[Any]] = {
            **SETTINGS,
            "data.other_dataset": (None, self.world.add_dataset()),
        }
        self._upgrades: Counter[int] = Counter()  # uid -> how often its process was started again
        self.last = START_WINDOW + self.plan.windows - 1
        self.members = self.world.running
        self.honest = [member for member in self.members if member.role in (*VALIDATING, "honest")]
        self.healthy = [member for member in self.honest if member.uid not in self.plan.faulty]

    def opens(self, window: int) -> float:
        """When a window opens."""
        rules, block = self.hparams.windows, first_block(window, self.hparams.windows)
        return GENESIS_TIME + block * rules.block_seconds if self.schedule is None else self.schedule.time(block)

    def run(self) -> None:
        """Every window.

        Raises:
            ViolationError: An invariant does not hold; the run ends there.
        """
        participants = [partial(self._live, member) for member in self.members]
        self.stage.run([*participants, self._move_stake, self._change_settings, self._check_windows])
        self._check_end()

    # What stands between the members and their surroundings.

    def _episodes(self, uid: int, kind: FaultKind, view: Callable[[str], Any]) -> list[tuple[float, float, Any]]:
        mine = [fault for fault in self.plan.faults if (fault.uid, fault.kind) == (uid, kind)]
        return [(self.opens(fault.first), self.opens(fault.last + 1), view(fault.name)) for fault in mine]

    def _reader(self, observer: Member | None, owner: Member | None, store: ObjectStore) -> ObjectStore:
        if owner is not None and observer is not owner:
            store = self._seen(owner, FaultKind.BUCKET, store, observer)
        return self._counted(observer, store)

    def _own(self, owner: Member, store: ObjectStore) -> ObjectStore:
        return self._counted(owner, self._seen(owner, FaultKind.WRITES, store, owner))

    def _seen(self, owner: Member, kind: FaultKind, store: ObjectStore, observer: Member | None) -> ObjectStore:
        episodes = self._episodes(owner.uid, kind, lambda name: BUCKETS[name](store, self.clock, observer))
        return IntermittentStore(store, self.clock, episodes) if episodes else store

    def _counted(self, observer: Member | None, store: ObjectStore) -> ObjectStore:
        switch = None if observer is None else self._switches.get(observer.uid)
        return store if switch is None else FaultyStore(store, before=lambda operation, key: switch.count())

    def _chain(self, observer: Member, chain: Chain) -> Chain:
        episodes = self._episodes(observer.uid, FaultKind.CHAIN, lambda name: ENDPOINTS[name](chain))
        chain = IntermittentChain(chain, episodes) if episodes else chain
        if self.plan.has_outages:
            chain = self._with_outages(observer, PrunedChain(chain, kept=PRUNED_AFTER))
        for fault in self.plan.faults:
            if (fault.uid, fault.kind) == (observer.uid, FaultKind.CLOCK):
                chain = SkewedChain(chain, fault.amount)
        switch = self._switches.get(observer.uid)
        return chain if switch is None else CountingChain(chain, switch)

    def _with_outages(self, observer: Member, chain: Chain) -> UnreachableChain:
        since = GENESIS_TIME + keyed_seed("templar.outages", self.plan.seed, observer.uid) % 1000
        return UnreachableChain(chain, since, seconds=9.0, every=277.0)

    # What the members do.

    def _live(self, member: Member) -> None:
        """Run a member's process, and start it again after it was killed."""
        away = START_WINDOW
        kills = [fault for fault in self.plan.faults if (fault.uid, fault.kind) == (member.uid, FaultKind.PROCESS)]
        for window in range(START_WINDOW, self.last + 1):
            if window > START_WINDOW:
                self.clock.sleep_until(self.opens(window))
            if window < away:
                continue
            armed = next((fault for fault in kills if fault.first == window), None)
            if armed is not None:
                self._switches[member.uid].left = armed.amount
            try:
                self._drive(member, window)
            except Killed:
                self._bury(member)
                away = window + 1 if armed is None else armed.last + 1
                if armed is not None and armed.first == armed.last:
                    self._drive(member, window)
        self._arrive(member)

    def _drive(self, member: Member, window: int) -> None:
        """Start the process unless it runs, and take the window's steps; try again while the window lasts."""
        clock, is_hostile, is_faulty = self.clock, member not in self.honest, member.uid in self.plan.faulty
        for pause in (*PAUSES, None):
            try:
                if member.uid not in self.nodes:
                    self.nodes[member.uid] = self.world.node(member)
                self._forget_settings(member)
                if drive_window(self.nodes[member.uid], window).action is not Action.CATCHING_UP or is_hostile:
                    return
            except TransientError:
                pass
            except Exception as error:
                if isinstance(error, PermanentError) and error.reason is Reason.BLOCK_UNKNOWN and is_faulty:
                    return  # its only endpoint has pruned what it must replay, and there is no checkpoint yet
                if isinstance(error, PermanentError) and error.reason is Reason.PLAN_UNKNOWN and self.plan.has_releases:
                    self.stopped += 1
                    return
                if not is_hostile:
                    raise self._violation(window, f"{member.name}: {type(error).__name__}: {error}") from error
            if pause is None or clock.now() + pause > self.opens(window + 1) + self.hparams.windows.seconds / 2:
                return
            clock.sleep_until(clock.now() + pause)

    def _forget_settings(self, member: Member) -> None:
        """Let a process know the settings of its release alone."""
        if self.plan.has_releases:
            state = self.nodes[member.uid].state
            unknown = frozenset([*self.settings][1 + self._upgrades[member.uid] :])
            state.plan = OlderPlan(state.plan.genesis, state.plan.entries, unknown)

    def _known_settings(self) -> Mapping[str, Sequence[Any]]:
        """The settings that an owner changes: those that all but a tenth of the processes know."""
        if not self.plan.has_releases:
            return self.settings
        oldest = sorted(self._upgrades[member.uid] for member in self.members)[len(self.members) // 10]
        return {name: self.settings[name] for name in [*self.settings][: 1 + oldest]}

    def _bury(self, member: Member) -> None:
        """Return what the kernel does for a process that was killed."""
        node = self.nodes.pop(member.uid, None)
        self.kills += 1
        self._upgrades[member.uid] += 1
        if node is not None:
            node._lock.release()

    def _arrive(self, member: Member) -> None:
        """Let a node that fell behind come to the others' state; it has two windows for that."""
        self._switches.get(member.uid, KillSwitch()).left = None
        deadline = self.opens(self.last + 4)
        while member in self.honest and self.clock.now() < deadline:
            try:
                node = self.nodes.get(member.uid) or self.world.node(member)
                self.nodes[member.uid] = node
                if catch_up(node, self.last, deadline=deadline) >= self.last:
                    return
            except TransientError:
                self.clock.sleep_until(self.clock.now() + PAUSES[-1])

    def _move_stake(self) -> None:
        """Move the validators' stake once in an epoch."""
        validators = [member for member in self.members if member.role in VALIDATING]
        for epoch, stakes in enumerate(self.plan.stakes):
            if epoch:
                self.clock.sleep_until(self.opens(START_WINDOW + epoch * EPOCH_WINDOWS))
            for member, stake in zip(validators, stakes, strict=True):
                self.world.chain.set_stake(member.hotkey.address, stake)

    def _change_settings(self) -> None:
        """Let the owner, who starts the network, change settings once in an epoch, in any weather."""
        owner, start = next(each for each in self.members if each.role in VALIDATING), self.world.birth.start
        store, draw = self.stage.open_store(owner.account_id), random.Random(self.plan.seed)
        rules = self.hparams.windows
        for window in range(START_WINDOW, self.last - CALM_WINDOWS, EPOCH_WINDOWS):
            self.clock.sleep_until(self.opens(window) + rules.commit_guard_seconds)
            neuron = self.world.chain.metagraph().by_hotkey(owner.hotkey.address)
            plan = max((node.state.plan for node in self.nodes.values()), key=lambda each: len(each.entries))
            changes = {name: draw.choice(values) for name, values in self._known_settings().items()}
            number, first = len(plan.entries) + 1, window + rules.plan_notice_windows + 1
            entry = PlanEntry(number=number, previous=plan.head(start), first_window=first, changes=changes)
            propose(store, start, cast("NeuronInfo", neuron), owner.hotkey, entry)

    # What must hold.

    def _check_windows(self) -> None:
        for window in range(START_WINDOW, self.last + 1):
            self.clock.sleep_until(self.opens(window + 2) - 1)
            self._check_roots(window)
            self._check_liveness(window)
            for member in self.honest:
                store = self.stage.open_store(member.account_id)
                evidence = evidence_in(store, member.uid, window) if member.role == "validator" else None
                if evidence is not None:
                    self._check_pay(member, evidence)
            self.on_window(window)

    def _check_roots(self, window: int) -> None:
        """One root after each window, and none that changes."""
        for member in self.honest:
            if (node := self.nodes.get(member.uid)) is None:
                continue
            for each, root in node.journal.roots(START_WINDOW, window).items():
                if self.roots.setdefault(each, root) != root:
                    raise self._violation(each, f"{member.name} has the root {root[:12]}, not {self.roots[each][:12]}")

    def _check_liveness(self, window: int) -> None:
        """Healthy nodes go on, and lose no payload of a healthy miner while a publisher is healthy."""
        late = [member.name for member in self.healthy if self.nodes[member.uid].journal.applied(window) is None]
        if late:
            raise self._violation(window, f"not applied in time by {', '.join(late)}")
        chain, opening = self.world.chain, first_block(window, self.hparams.windows)
        ranks, announced = self.hparams.windows.roster_ranks, chain.metagraph(opening).validators()
        publishers = network_view.drawn_by_stake(announced, chain.block_hash(opening), ranks)
        nodes = [self.nodes[member.uid] for member in self.honest if member.uid in self.nodes]
        known = [node.journal.result(window, "settle") for node in nodes]
        settled = next((Settlement.from_json(text) for text in known if text is not None), None)
        uids = () if settled is None else settled.uids
        self.null_windows += not uids
        if all(neuron.uid in self.plan.faulty for neuron in publishers):
            return
        miners = (member for member in self.healthy if member.role == "honest")
        lost = [each.name for each in miners if each.uid not in uids and not self._was_cut_off(each, window)]
        if lost:
            raise self._violation(window, f"the roster {list(uids)} is without {', '.join(lost)}")

    def _was_cut_off(self, member: Member, window: int) -> bool:
        """Whether an outage hid that the close had moved until it was too late to put the reveal again."""
        if self.schedule is None or not self.plan.has_outages:
            return False
        closing, pause = first_block(window + 1, self.hparams.windows), LONGEST_PAUSE_SECONDS
        closed, moved = self.schedule.time(closing), self.schedule.resolved_at(closing)
        given_up = math.floor(closed) + self.hparams.windows.time_window_delta_seconds + 1
        outages = self._with_outages(member, self.world.chain)
        return moved > closed and all(outages.is_down(at) for at in (moved + pause, given_up - pause))

    def _check_pay(self, validator: Member, evidence: Evidence) -> None:
        """No healthy miner is penalised, and nobody is paid whose payloads never counted, or were never measured."""
        healthy = {each.uid for each in self.healthy if not self._was_cut_off(each, evidence.window)}
        for record in evidence.miners:
            if record.uid in healthy and record.slashes:
                reasons = [slash.reason for slash in record.slashes]
                raise self._violation(evidence.window, f"{validator.name} penalises uid {record.uid}: {reasons}")
        cards = {record.uid: record.after for record in evidence.miners}
        counted = {uid for uid, card in cards.items() if card.last_reveal is not None and card.measured > 0}
        for paid in evidence.weights:
            if paid.weight > 0 and paid.uid not in {*counted, self.hparams.weights.burn_uid}:
                raise self._violation(evidence.window, f"{validator.name} pays uid {paid.uid} for nothing")
        if any(paid.uid in counted for paid in evidence.weights):
            self.paying.add(validator.uid)

    def _check_end(self) -> None:
        """Everybody with honest code has come to one root, and nobody convicts one of them."""
        for member in self.honest:
            node = self.nodes.get(member.uid)
            if node is None or node.state.window != self.last or node.state.root != self.roots[self.last]:
                at = "nothing" if node is None else f"window {node.state.window}, root {node.state.root[:12]}"
                raise self._violation(self.last, f"{member.name} ended at {at}")
        state = self.nodes[self.honest[0].uid].state
        self.changes, self.outer_steps = len(state.plan.entries), state.outer_steps
        validators = (member for member in self.healthy if member.role == "validator")
        unpaid = [member.name for member in validators if member.uid not in self.paying]
        if self.plan.is_trained and unpaid:
            raise self._violation(self.last, f"nobody was ever paid by {', '.join(unpaid)}")
        names = {member.hotkey.address: member.name for member in self.world.members}
        honest = {member.uid for member in self.honest}
        for each in read_accusations(self.world.observer(), range(START_WINDOW, self.last + 1), names):
            if each.is_proven and each.finding.suspects[0].uid in honest:
                raise self._violation(
                    each.finding.window, f"{each.reporter} convicts uid {each.finding.suspects[0].uid}"
                )

    def _violation(self, window: int, what: str) -> ViolationError:
        return ViolationError(f"seed {self.plan.seed}, window {window}: {what}")


@dataclass(frozen=True)
class FaultReport:
    """The result of a plan; everything but the last two follows from the plan."""

    plan: FaultPlan
    violation: str | None  # the first one; the run ended there
    windows: int  # how many were applied
    root: str | None  # after the last window; None if the run ended before it
    null_windows: int
    kills: int
    changes: int  # entries of the plan that were adopted
    stopped: int  # windows of processes whose release did not know a setting
    outer_steps: int  # windows that changed the parameters
    seconds: float
    windows_per_second: float


def run_plan(plan: FaultPlan, on_window: Callable[[int], None] = lambda window: None) -> FaultReport:
    """Run the network of a plan, and say what came of it. The same plan gives the same report, but for the times."""
    with sharing(True), tempfile.TemporaryDirectory(prefix="templar-faults-", dir=memory_folder()) as folder:
        network, violation = FaultyNetwork(plan, Path(folder), fault_hparams(), on_window), None
        started = time.perf_counter()
        try:
            network.run()
        except ViolationError as error:
            violation = str(error)
        seconds = time.perf_counter() - started
        for node in network.nodes.values():
            node.stop()
    return FaultReport(
        plan=plan,
        violation=violation,
        windows=max(network.roots, default=0),
        root=network.roots.get(network.last),
        null_windows=network.null_windows,
        kills=network.kills,
        changes=network.changes,
        stopped=network.stopped,
        outer_steps=network.outer_steps,
        seconds=round(seconds, 3),
        windows_per_second=round(plan.windows / seconds, 3),
    )


def fault_hparams() -> HParams:
    """The times of 150M in windows of 50 blocks, with the model of `simulation`, measured on more sequences than there.

    On four sequences an honest indicator is +1 in 88 windows of 100, and about one honest miner in a hundred falls
    below `own_data_min_average` within 30 windows; on sixteen it is +1 in 92.
    """
    windows = load_hparams("150M").windows.model_dump() | {"blocks_per_window": 50, "plan_notice_windows": 2}
    return load_hparams("simulation", overrides={"windows": windows, "scoring": {"eval_sequences": EVAL_SEQUENCES}})
