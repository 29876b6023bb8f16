"""Rosters of the first rank, and the second rank's when the first is silent (docs/protocol.md 8, 11)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from templar.agreement.decisions import majority, read_decision
from templar.agreement.roster import RosterDraft, draft_roster, fetch_roster
from templar.agreement.slots import Settlement
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.gather import GatherReport
from templar.exchange.object_keys import aggregate_key
from templar.exchange.objects import Roster
from templar.exchange.peers import publish_peers
from templar.neuron.aggregator import RosterNode
from templar.neuron.journal import Status
from templar.neuron.node import Node
from templar.window import Action, drive_window, open_window
from tests.support.network import Network, tiny


def roster_of(node: Node, window: int) -> Roster | None:
    found = fetch_roster(node.exchange, node.exchange.identity(window), window)
    return None if found is None else found.body


def stored_at(network: Network, node: Node, window: int) -> int:
    ((time, _),) = network.objects(network.name(node), f"roster-{window}-").values()
    return time


def reveal(network: Network, window: int) -> None:
    """Let every miner commit and reveal; then the window is closed."""
    for miner in network.miners:
        open_window(miner, window)
        miner.train(window)
        miner.compress(window)
        assert miner.commit(window).in_time
    for miner in network.miners:
        assert miner.upload(window).in_time


def test_the_first_rank_publishes_the_revealed_payloads_in_its_slot(network: Network) -> None:
    network.run([1, 2])
    aggregator, validator = network.aggregator, network.validator
    times = aggregator.exchange.times(2)
    roster = roster_of(aggregator, 2)
    assert roster is not None
    assert [entry.uid for entry in roster.entries] == [miner.exchange.identity(2).uid for miner in network.miners]
    assert stored_at(network, aggregator, 2) in times.roster_slot(0)
    assert roster_of(validator, 2) is None
    payloads = [network.objects(network.name(miner), "gradient-2-") for miner in network.miners]
    joined = b"".join(data for objects in payloads for _, data in objects.values())
    assert network.objects(network.name(aggregator))[aggregate_key(2)][1] == joined
    assert all(entry.committed_at in times.commit_interval for entry in roster.entries)
    assert all(entry.revealed_at in times.reveal_interval for entry in roster.entries)

    # The roster names the decision before, and both validators sign each one.
    first, second = roster_of(aggregator, 1), roster
    assert first is not None
    assert (first.previous, second.previous) == (None, first.digest)
    assert second.peer_list == network.validator.selection(2).digest
    for window, roster in ((1, first), (2, second)):
        found = majority(network.miners[0].exchange, window)
        assert (found.roster, len(found.uids)) == (roster.digest, 2)
    assert len(network.roots(2)) == 1


def test_the_second_rank_takes_over_when_the_first_is_silent(network: Network) -> None:
    aggregator, validator = network.aggregator, network.validator
    network.run([1])
    network.run([2, 3], but=[network.name(aggregator)])
    for window in (2, 3):
        roster = roster_of(validator, window)
        assert roster is not None
        assert len(roster.entries) == 2
        assert stored_at(network, validator, window) in validator.exchange.times(window).roster_slot(1)
    network.run([4])
    assert len(network.roots(4)) == 1
    assert None not in network.roots(4)
    assert roster_of(validator, 4) is None
    assert aggregator.state.outer_steps == 4


def test_without_any_publisher_the_window_is_null_for_all(network: Network) -> None:
    silent = [network.name(node) for node in network.all(RosterNode)]
    before = network.miners[0].state.root
    network.run([1], but=silent)
    for miner in network.miners:
        assert (miner.state.window, miner.state.outer_steps, miner.state.mark.null) == (1, 0, True)
        assert miner.state.root != before
    assert len({miner.state.root for miner in network.miners}) == 1


def test_without_any_payload_the_roster_is_empty_and_the_window_null(folder: Path) -> None:
    network = Network(folder, actors=["silent", "silent"])
    network.run([1, 2])
    roster = roster_of(network.aggregator, 2)
    assert roster is not None
    assert (roster.entries, roster.previous) == ((), None)
    assert len(network.roots(2)) == 1
    for node in network.nodes.values():
        assert (node.state.outer_steps, node.state.mark.null) == (0, True)
    assert majority(network.miners[0].exchange, 2).roster is None
    network.stop()


def test_a_roster_may_have_one_payload(folder: Path) -> None:
    network = Network(folder, actors=["honest"])
    network.run([1])
    assert network.miners[0].state.outer_steps == 1
    assert len(network.roots(1)) == 1
    network.stop()


def test_steps_that_are_repeated_change_nothing(network: Network) -> None:
    aggregator = network.aggregator
    reveal(network, 1)
    open_window(aggregator, 1)
    report = aggregator.gather(1)
    first = aggregator.settle_and_publish(1, report)
    aggregator.decide(first)
    before = network.objects(network.name(aggregator))
    assert aggregator.settle_and_publish(1, report) == first
    assert aggregator.decide(first).in_time
    assert aggregator.apply(first) == aggregator.apply(first)
    assert network.objects(network.name(aggregator)) == before


def test_a_published_roster_stands_even_if_fewer_payloads_are_gathered_later(network: Network) -> None:
    """The process died between publishing and entering it in the journal; then a miner's bucket lost its payload."""
    aggregator = network.aggregator
    name = network.name(aggregator)
    reveal(network, 1)
    open_window(aggregator, 1)
    first = aggregator.settle_and_publish(1, aggregator.gather(1))
    aggregator.journal._file.execute("DELETE FROM steps")
    victim = network.name(network.miners[0])
    network.bucket(victim).delete(network.objects(victim, "gradient-"))
    before = network.objects(name)
    again = network.restart(name)
    assert isinstance(again, RosterNode)
    assert open_window(again).window == 1
    report = again.gather(1)
    assert len(report.submissions) == 1
    assert again.settle_and_publish(1, report) == first
    assert network.objects(name) == before


def test_an_aggregate_without_its_roster_leaves_the_slot_to_the_next_rank(network: Network) -> None:
    """The process died between the two, and now gathers something else: nothing is overwritten."""
    aggregator, validator = network.aggregator, network.validator
    reveal(network, 1)
    network.bucket(network.name(aggregator)).put(aggregate_key(1), b"what was gathered before")
    settled: list[Settlement] = []

    def live(node: RosterNode) -> None:
        open_window(node, 1)
        settled.append(node.settle_and_publish(1, node.gather(1)))

    network.clock.run([lambda: live(aggregator), lambda: live(validator)])
    assert roster_of(aggregator, 1) is None
    roster = roster_of(validator, 1)
    assert roster is not None
    assert [each.roster for each in settled] == [roster, roster]


def test_a_roster_node_that_comes_back_after_its_slot_follows_the_others(network: Network) -> None:
    aggregator = network.aggregator
    name = network.name(aggregator)
    open_window(aggregator, 1)
    network.run([1], but=[name])
    network.world.chain.wait_for_block(3 * network.hparams.windows.blocks_per_window)
    again = network.restart(name)
    assert isinstance(again, RosterNode)
    assert drive_window(again, 1).action is Action.RUN
    assert again.journal.status(1) is Status.FINISHED
    assert roster_of(again, 1) is None
    assert network.roots(1) == {network.validator.state.root}
    assert read_decision(again.exchange, again.exchange.identity(1), 1) is None, "too late to decide"


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_as_many_ranks_as_there_are_slots_publish(folder: Path, ranks: int) -> None:
    network = Network(folder, tiny(windows={"roster_ranks": ranks}))
    silent = network.name(network.aggregator)
    network.run([1], but=[silent])
    assert network.validator.state.mark.null == (ranks == 1)
    assert len({node.state.root for name, node in network.nodes.items() if name != silent}) == 1
    drive_window(network.miners[0], 2)
    network.stop()


@pytest.mark.parametrize("reason", [Reason.STORE_BUSY, Reason.BUCKET_UNREADABLE])
def test_a_rank_that_could_read_no_peer_leaves_the_slot_to_the_next(
    network: Network, monkeypatch: pytest.MonkeyPatch, reason: Reason
) -> None:
    """An empty roster would make the window null for all."""
    aggregator, real = network.aggregator, network.aggregator.gather

    def gather(window: int) -> GatherReport:
        report = real(window)
        unread = (replace(each, submission=None, reason=reason) for each in report.outcomes)
        return replace(report, outcomes=tuple(unread))

    monkeypatch.setattr(aggregator, "gather", gather)
    network.run([1])
    assert roster_of(aggregator, 1) is None
    roster = roster_of(network.validator, 1)
    assert roster is not None
    assert len(roster.entries) == 2
    assert len(network.roots(1)) == 1


@pytest.mark.parametrize("error", [PermanentError, TransientError])
def test_a_local_failure_is_never_a_verdict_on_a_roster(
    network: Network, monkeypatch: pytest.MonkeyPatch, error: type[TemplarError]
) -> None:
    """A pruned endpoint, for example: the node catches up, and never takes the window for null."""
    miner = network.miners[0]
    real = miner.workload.digest

    def digest(window: int, uid: int) -> str | None:
        if window == 1:
            raise error(Reason.BLOCK_UNKNOWN, "pruned")
        return real(window, uid)

    monkeypatch.setattr(miner.workload, "digest", digest)
    name = network.name(miner)
    network.run([1], but=[name])
    open_window(miner, 1)
    with pytest.raises(TransientError):
        miner.settle(1)
    assert miner.journal.result(1, "settle") is None
    with pytest.raises(error):
        miner.gather(1)


def test_a_longer_peer_list_than_there_are_places_is_cut(folder: Path) -> None:
    network = Network(folder, tiny(peers={"gather_peer_count": 1, "reserve_peer_count": 1}), actors=["honest"] * 3)
    uids = tuple(miner.exchange.identity(1).uid for miner in network.miners)
    publish_peers(network.aggregator.exchange, 1, uids, ())
    publish_peers(network.aggregator.exchange, 2, (), uids)
    network.run([1, 2, 3])
    assert [len(network.miners[0].selection(window).peers) for window in (2, 3)] == [1, 0]
    assert len(network.miners[0].selection(3).reserve) == 1
    roster = roster_of(network.aggregator, 2)
    assert roster is not None
    assert [entry.uid for entry in roster.entries] == list(uids[:1])
    network.stop()


def test_a_first_rank_that_rewrites_history_is_passed_over(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its roster does not follow what the majority decided, so the next rank has its turn and scoring goes on."""
    network.run([1])
    real = draft_roster

    def lies(exchange: Exchange, *arguments: Any, **options: Any) -> RosterDraft:
        if exchange.identity(2).uid == network.member(network.name(network.aggregator)).uid:
            options["previous"] = "ab" * 32
        return real(exchange, *arguments, **options)

    monkeypatch.setattr("templar.neuron.aggregator.draft_roster", lies)
    network.run([2])
    validator = network.validator
    applied = validator.journal.applied(2)
    own = roster_of(validator, 2)
    assert applied is not None
    assert own is not None
    assert applied.roster == own.digest
    assert validator.book.evidence(2) is not None
    assert len(network.roots(2)) == 1
