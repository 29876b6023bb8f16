"""Which window a node works on, and whether it can (docs/architecture.md D9)."""

import pytest

from lab.simulate.world import START_WINDOW
from templar.chain.base import Role
from templar.errors import PermanentError, Reason
from templar.neuron.journal import Status
from templar.neuron.node import Node
from templar.window import Action, Opening, drive_window, open_window
from tests.support.errors import raising


def assert_skipped(opening, window, reason):
    assert (opening.window, opening.action, opening.reason) == (window, Action.SKIP, reason)
    assert opening.detail


def test_the_first_window_is_waited_for(network):
    """Neurons come up before their network's first window."""
    miner = network.miners[0]
    assert miner.chain.head() < START_WINDOW * network.hparams.windows.blocks_per_window
    assert (
        open_window(miner)
        == open_window(miner)
        == open_window(miner, START_WINDOW)
        == Opening(START_WINDOW, Action.RUN)
    )
    assert miner.journal.open_claims() == (START_WINDOW,)
    assert miner.chain.head() == START_WINDOW * network.hparams.windows.blocks_per_window
    assert miner.journal.status(START_WINDOW) is Status.CLAIMED


def test_a_window_before_the_first_is_skipped_and_one_far_ahead_not_waited_for(network):
    miner = network.miners[0]
    assert_skipped(open_window(miner, START_WINDOW - 1), START_WINDOW - 1, Reason.WINDOW_PASSED)
    network.to_window(1)
    opening = open_window(miner, 3)
    assert_skipped(opening, 3, Reason.WINDOW_NOT_OPEN)
    assert opening.detail == "window 3 opens in 36 blocks"
    assert miner.journal.status(3) is None


def test_a_finished_window_is_skipped_and_the_next_one_taken(network):
    network.run([1])
    for node in network.nodes.values():
        assert_skipped(open_window(node, 1), 1, Reason.WINDOW_FINISHED)
    miner = network.miners[0]
    assert miner.chain.head() < 3 * network.hparams.windows.blocks_per_window
    assert open_window(miner) == Opening(2, Action.RUN)


@pytest.mark.parametrize(("kind", "late"), [("miners", 0), ("aggregator", 1), ("validator", 1)])
def test_a_window_that_passed_unclaimed_is_skipped(network, kind, late):
    """A miner has nothing left to do after the close; a node that signs decisions may come one window late."""
    found = getattr(network, kind)
    node: Node = found[0] if isinstance(found, list) else found
    network.run([1, 2, 3], but=[node])
    network.to_window(4)
    passed = 3 - late
    assert_skipped(open_window(node, passed), passed, Reason.WINDOW_PASSED)
    assert node.journal.status(passed) is None
    assert node.state.window == START_WINDOW - 1


def test_a_roster_node_takes_a_window_that_closed_just_now(network):
    validator = network.validator
    network.run([1], but=[validator])
    network.to_window(2)
    assert open_window(validator, 1) == Opening(1, Action.RUN)


def test_a_claimed_window_is_resumed_however_late(network):
    miner = network.miners[0]
    assert open_window(miner, 1).action is Action.RUN
    miner.fetch_pages(1)
    network.run([1, 2, 3], but=[miner])
    network.to_window(4)
    again = network.restart(miner)
    assert open_window(again) == Opening(1, Action.RUN)
    assert open_window(again, 1) == Opening(1, Action.RUN)


def test_a_claimed_window_that_was_applied_is_resumed_until_it_is_finished(network):
    """The process died between the step that applies and the last one."""
    miner = network.miners[0]

    def dies():
        open_window(miner, 1)
        miner.gather(1)
        miner.apply(miner.settle(1))

    network.run([1], but=[miner], beside=[dies])
    again = network.restart(miner)
    assert again.state.window == 1
    assert open_window(again) == Opening(1, Action.RUN)
    assert isinstance(again, type(miner))
    assert drive_window(again, 1).action is Action.RUN
    assert again.journal.status(1) is Status.FINISHED
    assert open_window(again).window == 2


def test_a_claimed_window_that_the_state_is_beyond_is_closed(network):
    miner = network.miners[0]
    open_window(miner, 1)
    network.run([1, 2], but=[miner])
    network.to_window(3)
    assert open_window(miner, 3).action is Action.RUN
    assert_skipped(open_window(miner, 1), 1, Reason.WINDOW_FINISHED)
    assert miner.journal.status(1) is Status.FINISHED


def test_a_node_that_was_away_replays_what_it_missed_and_runs(network):
    miner = network.miners[0]
    network.run([1, 2, 3], but=[miner])
    network.to_window(4)
    assert open_window(miner, 4) == Opening(4, Action.RUN)
    assert miner.state.window == 3
    assert miner.state.root == network.validator.state.root
    assert network.objects(miner, "proof-3-"), "or it would count as out of sync for one window more"


def test_a_newcomer_takes_part_from_the_window_after_its_registration_on(network):
    network.run([1])
    newcomer = network.join("newcomer")
    assert newcomer.chain.head() > 2 * network.hparams.windows.blocks_per_window
    opening = open_window(newcomer)
    assert_skipped(opening, 2, Reason.NOT_REGISTERED)
    assert opening.detail == "registered after window 2 had opened: takes part from window 3 on"
    network.run([2, 3, 4])
    assert_skipped(open_window(newcomer, 2), 2, Reason.WINDOW_FINISHED)
    assert newcomer.journal.status(3) is Status.FINISHED
    assert len(network.roots(4)) == 1
    assert network.objects("newcomer", "gradient-3-")
    assert not network.objects("newcomer", "proof-2-"), "nobody could sign it"


def test_a_node_whose_role_another_announcement_replaced_skips_a_window_and_announces_it_again(network):
    network.run([1])
    miner = network.miners[0]
    address = miner.exchange.own_signer.address
    miner.chain.set_role(Role.VALIDATOR)
    network.run([2], but=[miner])
    network.to_window(3)
    opening = open_window(miner)
    assert_skipped(opening, 3, Reason.ROLE_MISSING)
    assert opening.detail == "window 3 opened with the role validator on chain, not miner: takes part from window 4 on"
    neuron = miner.chain.metagraph().by_hotkey(address)
    assert neuron.role is Role.MINER
    network.run([3], but=[miner])
    assert open_window(miner, 4).action is Action.RUN


def test_stake_from_a_stranger_keeps_no_miner_from_mining(network):
    network.run([1])
    miner = network.miners[0]
    uid = network.member(miner).uid
    network.world.chain.set_stake(miner.exchange.own_signer.address, 1e6, validator_permit=True)
    network.run([2, 3])
    rosters = {window: network.roster(window) for window in (2, 3)}
    assert all(roster is not None and uid in {each.uid for each in roster.entries} for roster in rosters.values())
    assert [neuron.uid for neuron in miner.exchange.publishers(3)] == [network.member(network.aggregator).uid, 2]
    assert len(network.roots(3)) == 1


def test_a_node_that_lost_its_registration_fails_for_good(network):
    miner = network.miners[0]
    network.world.chain.deregister(miner.exchange.own_signer.address)
    network.to_window(2)
    with raising(PermanentError, Reason.NOT_REGISTERED, "any more: register it"):
        open_window(miner, 2)
