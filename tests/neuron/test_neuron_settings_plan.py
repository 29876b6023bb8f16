"""The plan: settings change at a window in every node, also in those that were away, restarted or audit."""

from itertools import product

import pytest

from templar.agreement.settings_plan import SettingsPlan, proposal, propose, proposed_entry
from templar.agreement.state import AgreedState, parameters_digest
from templar.audit.evidence_audit import Auditor
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.objects import AdoptedEntry, Approval, Manifest, PlanEntry, StartWindow
from templar.exchange.signed import seal, unseal
from templar.neuron.catchup import catch_up
from templar.reports.published_plan import published_plan
from tests.docs.second_implementation import Spec
from tests.support.errors import raising
from tests.support.network import Network, tiny
from tests.support.subnet import member

HPARAMS = tiny(windows={"plan_notice_windows": 2}, weights={"windows_per_weights": 2})
CHANGES = {
    "training.adamw.learning_rate": 0.002,
    "training.inner_steps": 1,
    "training.outer_learning_rate": 0.5,
    "training.optimizer": "muon",
    "gradient.momentum_decay": 0.5,
    "scoring.eval_sequences": 2,
    "peers.gather_peer_count": 2,
}
OWNERS = [member(uid) for uid in range(3)]
START = StartWindow(
    netuid=1,
    genesis="0" * 64,
    uid=0,
    hotkey=OWNERS[0].hotkey.address,
    start_window=1,
    hparams=HPARAMS.digest,
    tokenizer="a" * 64,
    dataset="b" * 64,
    root="c" * 64,
    owners=tuple(each.hotkey.address for each in OWNERS[:2]),
    owners_needed=2,
)


def entry_after(plan, first_window, changes=CHANGES, start=START):
    return PlanEntry(
        number=len(plan.entries) + 1, previous=plan.head(start), first_window=first_window, changes=changes
    )


def signed(entry, owners):
    """An entry with the approvals of these owners."""
    approvals = []
    for each in owners:
        unsigned = Approval(uid=each.uid, hotkey=each.hotkey.address, signature="00" * 64)
        signature = seal(proposal(START, unsigned, entry), each.hotkey).signature
        approvals.append(unsigned.model_copy(update={"signature": signature}))
    return AdoptedEntry(entry=entry, approvals=tuple(approvals))


SWAPPED = {"plan.owner_2": OWNERS[2].hotkey.address}


@pytest.mark.parametrize(
    ("firsts_of_plan", "changes", "is_legal"),
    [
        ((), CHANGES, True),
        ((8,), CHANGES, True),
        ((8, 11), CHANGES, True),
        ((), SWAPPED, True),
        ((), SWAPPED | {"plan.owner_1": OWNERS[1].hotkey.address}, True),
        ((), {"plan.owner_2": OWNERS[0].hotkey.address}, False),
        ((), {"plan.owner_3": OWNERS[2].hotkey.address}, False),
        ((), {"plan.owner_2": "nobody"}, False),
    ],
)
@pytest.mark.parametrize("swapped", [None, 6, 8])
def test_an_entry_is_adopted_by_the_rules_of_the_page(firsts_of_plan, changes, is_legal, swapped):
    plan, window, others, adoptions = SettingsPlan(HPARAMS), 7, OWNERS[:1] + OWNERS[2:], 0
    for first in firsts_of_plan:
        plan = plan.after(entry_after(plan, first))
    if swapped is not None and not firsts_of_plan:
        plan = plan.after(entry_after(plan, swapped, SWAPPED))
    entries = [each.model_dump(mode="json") for each in plan.entries]
    rules = {"genesis": START.digest, "notice": 2, "owners": START.owners, "owners_needed": 2}
    heads, firsts = {plan.head(START), START.digest, "d" * 64}, (1, 8, 9, 10, 11, 12, 13, 207, 208)
    signers = (OWNERS[:2], OWNERS, OWNERS[:1], others, [*OWNERS[:1] * 2, *OWNERS[1:2]], [])
    for number, before, first, owners in product((1, 2, 3, 4), heads, firsts, signers):
        entry = PlanEntry(number=number, previous=before, first_window=first, changes=changes)
        found = signed(entry, owners)
        adopted = Spec.adopts(entries, found.model_dump(mode="json"), window, rules)
        assert (plan.adopted(found, window, START) != plan) is adopted
        if entry in plan.entries:
            plan.check(found, window, START)  # it adds nothing
        elif not adopted:
            with raising(RejectedError, Reason.PLAN_INVALID, f"entry {number}"):
                plan.check(found, window, START)
        else:
            adoptions += 1
            assert set(plan.after(entry).owners(START, first)) <= {each.hotkey.address for each in OWNERS}
            changed = entry.model_copy(update={"changes": {"weights.burn_rate": 0.1}})
            with raising(RejectedError, Reason.BAD_SIGNATURE):
                plan.check(found.model_copy(update={"entry": changed}), window, START)
    assert bool(adoptions) is is_legal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scoring.validator_offset": 2**40}, "scoring.validator_offset: this release changes no such setting"),
        ({"model.hidden_size": 16}, "model.hidden_size: this release changes no such setting"),
        ({"training.adamw.momentum": 0.9}, "training.adamw.momentum: unknown key"),
        ({"training.inner_steps": 0}, "training.inner_steps: Input should be greater"),
        ({"weights.burn_rate": "all"}, "weights.burn_rate: Input should be a valid number"),
        ({"training.batch_size": 6}, "batch_size is not a multiple of micro_batch_size"),
    ],
)
def test_a_node_stops_before_an_entry_that_it_does_not_know(network, changes, words):
    plan = SettingsPlan(network.hparams)
    plan = plan.after(entry_after(plan, 9, changes))
    assert plan.at(8) is network.hparams
    node = network.miners[0]
    state = AgreedState(node.state.params, node.state.mark, node.layout, network.hparams)
    state.plan = plan
    for window in range(state.window + 1, 9):
        state.apply(window, [])
    before = state.mark, parameters_digest(state.params)
    for stops in (lambda: plan.at(9), lambda: state.apply(9, [])):
        with raising(PermanentError, Reason.PLAN_UNKNOWN, "entry 1 of the plan, from window 9 on", words):
            stops()
    assert (state.mark, parameters_digest(state.params)) == before


def changed_run(folder, *, restarts):
    """A network whose settings change at window 6, and again, with its text, at 8; its roots by window."""
    network = Network(folder, HPARAMS, actors=("honest",) * 3)
    anneal = {"training.adamw.learning_rate": 0.001, "data.other_dataset": network.world.add_dataset()}
    owner, start, away = network.aggregator, network.world.birth.start, network.member(network.miners[2])
    me = owner.exchange.newest_metagraph().by_hotkey(owner.exchange.own_signer.address)
    roots = []
    for window in range(1, 10):
        if window in (2, 5):
            first, changes = (6, CHANGES) if window == 2 else (8, anneal)
            entry = entry_after(network.aggregator.state.plan, first, changes, start)
            propose(network.bucket(me.uid), start, me, network.member(me.uid).hotkey, entry)
        if restarts:
            for node in list(network.nodes.values()):
                network.restart(node)
        network.run([window], but=[away] if 4 <= window <= 7 else [])
        here = [node for node in network.nodes.values() if node.name != away.name]
        found = {node.journal.applied(window).root for node in here}
        assert len(found) == 1
        roots += found
    return network, roots


def test_settings_change_at_a_window_and_kills_change_no_byte(tmp_path):
    network, roots = changed_run(tmp_path / "one", restarts=False)
    other, again = changed_run(tmp_path / "two", restarts=True)
    try:
        assert roots == again
        # The one that was away took the change as it replayed; all have the plan.
        late = next(node for node in network.nodes.values() if node.name == network.members[-1].name)
        assert network.roots(9) == {roots[-1]}
        assert {len(node.state.plan.entries) for node in network.nodes.values()} == {2}
        assert late.hparams.training.adamw.learning_rate == 0.001
        assert late.hparams.training.optimizer == "muon"

        # Miners took one step from window 6 on, and the validator measured less.
        miner = network.miners[0]
        manifests = {
            window: unseal(data, Manifest).body.steps
            for window in (5, 6, 9)
            for _, data in network.objects(miner, f"manifest-{window}-").values()
        }
        assert manifests == {5: 2, 6: 1, 9: 1}
        assert miner.workload.dataset.digest == miner.hparams.data.other_dataset != network.world.birth.start.dataset

        # Who comes from genesis, or audits, finds the same.
        network.to_window(11)
        observer = network.observer()
        assert catch_up(observer, 9, deadline=observer.chain.clock.now() + 60) == 9
        assert observer.state.root == roots[-1]
        shown = published_plan(observer.config.reading(observer.birth), observer.birth, tmp_path / "nobody")
        assert (shown.plan, shown.known_to) == (late.state.plan, 9)
        auditor = Auditor(network.observer())
        for window in (5, 6, 8, 7):
            audit = auditor.audit(window)
            assert audit.verified, audit.summary
    finally:
        network.stop()
        other.stop()


def refuse(training):
    raise PermanentError(Reason.OUT_OF_MEMORY, f"a batch of {training.batch_size}")


def test_what_a_later_window_lacks_is_said_while_there_is_time(network, caplog):
    """And the node stops before that window, with its state as it is."""
    node = network.miners[0]
    plan = SettingsPlan(network.hparams)
    entry = entry_after(plan, 9, {"data.other_dataset": "e" * 64}, network.world.birth.start)
    node.workload.prepare(plan.after(entry), 5, node.check_settings)
    assert "from window 9 on nothing will run here: [dataset_missing]" in caplog.text
    node.trainer.micro_batches.check = lambda training, length: refuse(training)
    node.workload.prepare(plan.after(entry_after(plan, 9)), 5, node.check_settings)
    assert "from window 9 on nothing will run here: [out_of_memory] a batch of 4" in caplog.text
    before = node.workload.dataset, node.hparams
    node.state.plan = plan.after(entry)
    node.use_settings(8)
    node.workload.open_dataset, really = lambda data: before[0], node.workload.open_dataset
    with raising(PermanentError, Reason.DATASET_MALFORMED, "is not the network's eeeeeeeeeeee"):
        node.use_settings(9)
    node.workload.open_dataset = really
    with raising(PermanentError, Reason.DATASET_MISSING):
        node.use_settings(9)
    assert (node.workload.dataset, node.hparams) == before


def test_a_validator_votes_for_no_entry_that_it_cannot_follow(network):
    network.run([1])
    node, plan = network.validator, SettingsPlan(network.hparams)
    entry = entry_after(plan, 9, {"training.momentum": 0.9}, network.world.birth.start)
    roster = network.roster(1).model_copy(update={"plan": AdoptedEntry(entry=entry, approvals=())})
    with raising(RejectedError, Reason.PLAN_UNKNOWN, "[plan_unknown] entry 1 of the plan, from window 9 on"):
        node.approve_roster(node.exchange.times(1), roster)
    entry = entry_after(plan, 9, {"data.other_dataset": "e" * 64}, network.world.birth.start)
    roster = roster.model_copy(update={"plan": AdoptedEntry(entry=entry, approvals=())})
    with raising(RejectedError, Reason.PLAN_UNKNOWN, "[dataset_missing]"):
        node.approve_roster(node.exchange.times(1), roster)


def test_numbers_that_are_equal_in_python_are_other_entries():
    one, same, other = (entry_after(SettingsPlan(HPARAMS), 9, {"weights.burn_rate": value}) for value in (1, 1, 1.0))
    assert one == same
    assert one != other
    assert len({one, same, other}) == 2


def test_an_owner_whose_bucket_hangs_is_left_out_and_one_that_has_gone(tmp_path):
    network = Network(tmp_path, HPARAMS, actors=("honest",))
    try:
        nodes = network.aggregator, network.validator
        swapped, other = (each.exchange.own_signer.address for each in nodes)
        start = network.world.birth.start.model_copy(
            update={"owners": (OWNERS[2].hotkey.address, other, *START.owners)}
        )
        members, plan = network.aggregator.exchange.newest_metagraph(), SettingsPlan(HPARAMS)
        plan = plan.after(entry_after(plan, 1, {"plan.owner_1": swapped}, start))
        for node in nodes:
            me = members.by_hotkey(node.exchange.own_signer.address)
            propose(network.bucket(me.uid), start, me, node.exchange.own_signer, entry_after(plan, 9, start=start))
        found = proposed_entry(network.aggregator.buckets, members, start, plan, 1, seconds=5.0)
        assert [each.uid for each in found.approvals] == sorted(map(network.uid, nodes))
        network.blind(network.aggregator, network.validator)
        (left,) = proposed_entry(network.aggregator.buckets, members, start, plan, 1, seconds=5.0).approvals
        assert left.uid == network.uid(network.aggregator)
    finally:
        network.stop()
