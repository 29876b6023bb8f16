"""Rosters of the first rank, and the second rank's when the first is silent (docs/protocol.md 8, 11)."""

from dataclasses import replace
from functools import partial

import pytest

from templar.agreement.ballot_box import read_ballots
from templar.agreement.roster import draft_roster
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.commitments import Observed
from templar.exchange.gather import GatherReport
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.peers import publish_peers
from templar.exchange.signed import seal
from templar.neuron.aggregator import OBSERVED, RosterNode
from templar.neuron.journal import Status
from templar.neuron.validator import Validator
from templar.store.directory import DirectoryStore
from templar.window import Action, drive_window, open_window
from tests.support.network import tiny


def uids(network, nodes):
    return [network.uid(node) for node in nodes]


def live_side_by_side(network, window, *nodes):
    """Let nodes go through a window at once."""
    network.clock.run([partial(drive_window, node, window) for node in nodes])


def stored_at(network, node, window):
    ((time, _),) = network.objects(node, f"roster-{window}-").values()
    return time


def test_the_first_rank_publishes_the_revealed_payloads_in_its_slot(network):
    network.run([1, 2])
    aggregator, validator = network.aggregator, network.validator
    times = aggregator.exchange.times(2)
    roster = network.roster(2)
    assert network.rostered(2) == uids(network, network.miners)
    assert stored_at(network, aggregator, 2) in times.roster_slot(0)
    assert network.roster(2, validator) is None
    payloads = [network.objects(miner, "gradient-2-") for miner in network.miners]
    joined = b"".join(data for objects in payloads for _, data in objects.values())
    assert network.objects(aggregator)[aggregate_key(2)][1] == joined
    assert all(entry.committed_at in times.commit_interval for entry in roster.entries)
    assert all(entry.revealed_at in times.reveal_interval for entry in roster.entries)

    # The roster names the decision before, and both validators sign each one.
    first, second = network.roster(1), roster
    assert (first.previous, second.previous) == (None, first.digest)
    assert second.peer_list == network.validator.selection(2).digest
    for window, roster in ((1, first), (2, second)):
        found = read_ballots(network.miners[0].exchange, window, until_decided=False)
        assert found.value == roster.digest
        voters = {word.uid for word in found.words if word.value == roster.digest}
        assert network.uid(aggregator) in voters <= {*uids(network, network.all(RosterNode))}
    assert len(network.roots(2)) == 1


@pytest.mark.parametrize("actor", ["honest", "silent"])
def test_a_window_settles_early_unless_somebody_withholds_a_reveal(build, monkeypatch, actor):
    """The batch of an early vote is drawn by the closing block, for the settling one is not there."""
    drawn, network = set(), build(actors=["honest", "honest", actor], num_validators=2)
    monkeypatch.setattr("templar.neuron.validator.check_effect", lambda *_, is_early, **__: drawn.add(is_early))
    network.run([1])
    times, is_early = network.aggregator.exchange.times(1), actor == "honest"
    assert (stored_at(network, network.aggregator, 1) <= times.settles) is is_early
    assert drawn == {is_early}
    assert len(network.rostered(1)) == (3 if is_early else 2)


def test_the_second_rank_takes_over_while_the_first_is_away(build):
    network = build(num_validators=2)
    aggregator, validator = network.aggregator, network.validator
    network.run([1])
    network.nodes.pop(aggregator.name).stop()
    network.run([2, 3])
    for window in (2, 3):
        assert len(network.roster(window, validator).entries) == 2
        assert stored_at(network, validator, window) in validator.exchange.times(window).roster_slot(1)
    again = network.restart(aggregator)
    assert again.state.window == 1
    network.run([4])
    assert len(network.roots(4)) == 1
    assert again.journal.roots(1, 4) == network.miners[0].journal.roots(1, 4)
    assert network.roster(4, validator) is None
    assert again.state.outer_steps == 4


def test_an_author_that_was_away_before_the_close_leaves_its_slot_to_the_next_rank(network):
    """It restarts after the close and has seen no commitment: it may propose nothing."""
    aggregator, validator = network.aggregator, network.validator
    network.run([1])
    network.kill(aggregator)
    network.reveal(2)
    again = network.restart(aggregator)
    live_side_by_side(network, 2, again, validator)
    assert again.observe_commitments(2).digests is None
    assert network.roster(2, again) is None
    assert network.rostered(2, validator) == uids(network, network.miners)
    assert again.state.root == validator.state.root


def test_a_killed_author_goes_on_with_what_it_saw_and_lists_nothing_else(network):
    aggregator = network.aggregator
    seen, late = network.miners
    network.run([1])
    for miner in (seen, late):
        open_window(miner, 2)
        miner.train(2)
        miner.compress(2)
    open_window(aggregator, 2)
    assert seen.commit(2).reason is None
    observed = aggregator.observe_commitments(2)
    assert set(observed.digests) == {seen.exchange.own_signer.address}
    # The other one's commitment appears after the close, with a time from before it.
    key, times = window_key(Kind.COMMIT, 2, network.uid(late)), aggregator.exchange.times(2)
    root = network.world.root / "buckets" / network.member(late).account_id
    backdated = DirectoryStore(root, clock=lambda: float(times.commit_interval.last))
    backdated.put(key, seal(late._manifest(2).commit, late.exchange.own_signer).encode())
    assert seen.upload(2).reason is None
    assert late.upload(2).reason is None
    assert network.clock.now() < times.settles
    again = network.restart(aggregator)
    assert again.observe_commitments(2) == observed
    report = again.gather(2)
    reasons = {outcome.uid: outcome.reason for outcome in report.outcomes}
    assert reasons == {network.uid(seen): None, network.uid(late): Reason.COMMIT_UNSEEN}
    assert len(network.miners[0].gather(2).submissions) == 2, "by its time alone it counts"
    again.settle_and_publish(2, report)
    assert network.rostered(2) == [network.uid(seen)]


def test_an_author_whose_clock_was_wrong_leaves_its_slot(network):
    """It looked too early and saw nobody: an empty roster of its own would void the window."""
    aggregator, validator = network.aggregator, network.validator
    network.reveal(1)
    aggregator.journal.enter(1, OBSERVED, Observed(1, {}).to_json())
    live_side_by_side(network, 1, aggregator, validator)
    assert network.roster(1) is None
    assert len(network.roster(1, validator).entries) == 2


def test_without_a_quorum_the_network_stands_with_a_reason_until_it_is_back(network):
    network.run([1], but=network.all(RosterNode))
    assert {miner.state.window for miner in network.miners} == {0}
    opening = drive_window(network.miners[0], 2)
    assert (opening.action, opening.reason) == (Action.CATCHING_UP, Reason.DECISION_MISSING)
    network.to_window(4)
    network.run([4, 5])
    assert len(network.roots(5)) == 1
    for node in network.nodes.values():
        assert (node.state.window, node.state.outer_steps) == (5, 2), "three windows of nobody, then full ones"


def test_if_no_rank_publishes_a_roster_the_window_is_null_for_all(build):
    network = build(num_validators=2)
    before = network.miners[0].state.root
    for publisher in (network.aggregator, network.validator):
        network.bucket(publisher).put(aggregate_key(1), b"another process published this")
    network.run([1])
    for node in network.nodes.values():
        assert (node.state.window, node.state.outer_steps, node.state.mark.null) == (1, 0, True)
        assert node.state.root != before
    assert all(miner.private.feedback.num_calls == 0 for miner in network.miners)
    assert len(network.roots(1)) == 1
    assert network.clock.now() <= network.miners[0].exchange.times(2).close, "and no window was missed for it"


def test_a_published_roster_stands_even_if_fewer_payloads_are_gathered_later(network):
    """The process died between publishing and entering it in the journal; then a miner's bucket lost its payload."""
    aggregator = network.aggregator
    network.reveal(1)
    open_window(aggregator, 1)
    first = aggregator.settle_and_publish(1, aggregator.gather(1))
    aggregator.journal._file.execute("DELETE FROM steps")
    victim = network.miners[0]
    network.bucket(victim).delete(network.objects(victim, "gradient-"))
    before = network.objects(aggregator)
    again = network.restart(aggregator)
    assert open_window(again).window == 1
    report = again.gather(1)
    assert len(report.submissions) == 1
    assert again.settle_and_publish(1, report) == first
    assert network.objects(aggregator) == before


def test_an_aggregate_without_its_roster_leaves_the_slot_to_the_next_rank(network):
    """The process died between the two, and now gathers something else: nothing is overwritten."""
    network.reveal(1)
    network.bucket(network.aggregator).put(aggregate_key(1), b"what was gathered before")
    settled = []

    def live(node):
        open_window(node, 1)
        settled.append(node.settle_and_publish(1, node.gather(1)).roster)

    network.clock.run([partial(live, node) for node in network.all(RosterNode)])
    assert network.roster(1) is None
    assert settled == [network.roster(1, network.validator)] * 2
    assert settled[0] is not None


def test_a_roster_node_that_comes_back_after_its_slot_follows_the_others(build):
    network = build(num_validators=2)
    aggregator = network.aggregator
    open_window(aggregator, 1)
    network.run([1], but=[aggregator])
    network.to_window(3)
    again = network.restart(aggregator)
    assert drive_window(again, 1).action is Action.RUN
    assert again.journal.status(1) is Status.FINISHED
    assert network.roster(1, again) is None
    assert network.roots(1) == {network.validator.state.root}
    words = read_ballots(again.exchange, 1, until_decided=False).words
    own = {word.step for word in words if word.uid == again.exchange.identity(1).uid}
    assert own == {"lock"}, "it was decided without this node, which locks what was decided"


def test_no_more_ranks_publish_than_there_are_slots(build):
    network = build(tiny(windows={"roster_ranks": 1}), num_validators=2)
    network.run([1], but=[network.aggregator])
    assert all(node.state.mark.null for node in [*network.all(Validator), *network.miners])


@pytest.mark.parametrize("reason", [Reason.STORE_BUSY, Reason.BUCKET_UNREADABLE])
def test_a_rank_that_could_read_no_peer_leaves_the_slot_to_the_next(network, monkeypatch, reason):
    """An empty roster would make the window null for all."""
    real = network.aggregator.gather

    def gather(window):
        report = real(window)
        unread = (replace(each, submission=None, reason=reason) for each in report.outcomes)
        return replace(report, outcomes=tuple(unread))

    monkeypatch.setattr(network.aggregator, "gather", gather)
    monkeypatch.setattr(network.aggregator, "foresee", lambda report: None)
    network.run([1])
    assert (network.roster(1), len(network.rostered(1, network.validator))) == (None, 2)
    assert len(network.roots(1)) == 1


def test_a_chain_that_is_away_during_a_gather_costs_no_window(network, monkeypatch):
    def away(*_):
        raise TransientError(Reason.CHAIN_UNREACHABLE, "away")

    real = network.aggregator.gather

    def gather(window):
        with monkeypatch.context() as patch:
            patch.setattr(network.aggregator.exchange, "times", away)
            network.aggregator.foresee(GatherReport(window, ()))
        return real(window)

    monkeypatch.setattr(network.aggregator, "gather", gather)
    network.run([1])
    assert len(network.rostered(1)) == 2


@pytest.mark.parametrize("error", [PermanentError, TransientError])
def test_a_local_failure_is_never_a_verdict_on_a_roster(network, monkeypatch, error):
    """A pruned endpoint, for example: the node follows the others, and blames no publisher for it."""
    miner = network.validator
    real = miner.workload.digest

    def digest(window, uid):
        if window == 1:
            raise error(Reason.BLOCK_UNKNOWN, "pruned")
        return real(window, uid)

    monkeypatch.setattr(miner.workload, "digest", digest)
    network.run([1], but=[miner])
    open_window(miner, 1)
    with pytest.raises(error):
        miner.gather(1)
    settlement = miner.settle(1)
    assert (settlement.digest, settlement.passed_over) == (network.roster(1).digest, ())


def test_a_longer_peer_list_than_there_are_places_is_cut(build):
    network = build(tiny(peers={"gather_peer_count": 1, "reserve_peer_count": 1}), actors=["honest"] * 3)
    miners = tuple(uids(network, network.miners))
    publish_peers(network.aggregator.exchange, 1, miners, ())
    publish_peers(network.aggregator.exchange, 2, (), miners)
    network.run([1, 2, 3])
    assert [len(network.miners[0].selection(window).peers) for window in (2, 3)] == [1, 1]
    assert len(network.miners[0].selection(3).reserve) == 1
    assert network.rostered(2) == list(miners[:1])


def rewrite_history(network, monkeypatch):
    """Let the first rank draft a roster that names another one before it; the second rank's is applied."""
    network.run([1])
    real, validator = draft_roster, network.validator

    def lies(exchange, *arguments, **options):
        if exchange.identity(2).uid == network.uid(network.aggregator):
            options["previous"] = "ab" * 32
        return real(exchange, *arguments, **options)

    monkeypatch.setattr("templar.neuron.aggregator.draft_roster", lies)
    network.run([2])
    assert validator.journal.applied(2).roster == network.roster(2, validator).digest
    assert validator.book.evidence(2) is not None
    assert len(network.roots(2)) == 1


def test_a_first_rank_that_rewrites_history_is_passed_over(network, monkeypatch):
    """Its roster does not follow what the majority decided, so the next rank has its turn and scoring goes on."""
    monkeypatch.setattr(RosterNode, "check_own", lambda node, times, roster: None)
    rewrite_history(network, monkeypatch)
    assert network.roster(2, network.aggregator)


def test_a_roster_that_its_readers_reject_is_not_published(network, monkeypatch):
    rewrite_history(network, monkeypatch)
    for prefix in (f"roster-2-{network.uid(network.aggregator)}-", "aggregator-2-"):
        assert network.objects(network.aggregator, prefix) == {}
