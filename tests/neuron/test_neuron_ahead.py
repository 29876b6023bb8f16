"""Windows whose training begins before the window before them is decided."""

import logging
from dataclasses import replace

import pytest

from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.gather import Tier
from templar.interrupt import StoppedError
from templar.neuron.miner import Miner
from templar.window import open_window
from tests.support.network import tiny


def ahead(network, who):
    """Start a miner again as one that trains ahead."""
    names, config = list(network.nodes), network.kill(who).config
    trainer = config.trainer.model_copy(update={"train_ahead": True})
    nodes = {**network.nodes, who.name: Miner(replace(config, trainer=trainer))}
    network.nodes = {name: nodes[name] for name in names}
    return nodes[who.name]


@pytest.fixture
def miner(network):
    return ahead(network, network.miners[0])


def until_second_window(network, miner, then, *, between=lambda: None, reveals=True):
    """Live through the first window with the others, and do something in the second one; what that gave."""
    found = []

    def life():
        open_window(miner, 1)
        assert miner.train(1).reason is None
        miner.compress(1)
        assert miner.commit(1).reason is None
        if reveals:
            assert miner.upload(1).reason is None
        miner.gather(1)
        between()
        miner.apply(miner.settle(1))
        open_window(miner, 2)
        found.append(then())

    network.run([1], but=[miner], beside=[life])
    return found[0]


def noted(miner):
    """Whether each window took over what had begun, as a list that grows."""
    take, found = miner._ahead.take, []

    def taking(*args):
        result = take(*args)
        found.append(result is not None)
        return result

    miner._ahead.take = taking
    return found


@pytest.mark.parametrize("carry", [0.0, 0.4])
def test_a_training_that_began_ahead_is_the_one_that_would_have_begun_later(build_shared, carry):
    """The same roots, and so the same payloads byte for byte; every window after the first begins ahead."""
    plain, early = (build_shared(tiny(gradient={"feedback_carry": carry})) for _ in range(2))
    taken = [noted(ahead(early, miner)) for miner in early.miners]
    for network in (plain, early):
        network.run([1, 2, 3])
    assert early.roots(3) == plain.roots(3)
    assert len(early.roots(3)) == 1
    assert taken == [[False, True, True]] * 2


@pytest.mark.parametrize("everybody", [True, False])
def test_it_begins_when_all_peers_have_revealed_or_no_more_can(network, miner, everybody):
    other, begins = network.miners[1], []
    for each in (miner, other):
        open_window(each, 1)
        each.train(1)
        each.compress(1)
        assert each.commit(1).reason is None
    for each in (miner, other) if everybody else (miner,):
        assert each.upload(1).reason is None
    miner._ahead.begin = lambda window, report: begins.append(
        (window, len(report.submissions), miner.chain.clock.now() < miner.exchange.times(1).settles)
    )
    miner.gather(1)
    assert begins == [(2, 2 if everybody else 1, everybody)]


def test_a_window_that_was_decided_otherwise_begins_anew(network, miner, caplog):
    """The payload of a peer is in the roster, and was not foreseen."""
    begin, taken = miner._ahead.begin, noted(miner)
    miner._ahead.begin = lambda window, report: begin(window, replace(report, outcomes=report.outcomes[:1]))
    assert until_second_window(network, miner, lambda: miner.train(2)).reason is None
    assert taken == [False, False]
    assert f"what was trained ahead is dropped: [{Reason.NOT_APPLIED}]" in caplog.text


def test_who_did_not_reveal_goes_on_with_the_private_state_that_stays(network, miner):
    taken = noted(miner)
    report = until_second_window(network, miner, lambda: miner.train(2), reveals=False)
    assert taken == [False, True]
    assert miner._trained[2].optimizer.num_steps == report.num_steps


def test_a_miner_that_looks_at_less_of_its_data_does_not_get_an_honest_training(network, miner):
    taken = noted(miner)
    until_second_window(network, miner, lambda: miner.learn(2, miner.reading(2)()[:1], lambda: True))
    assert taken == [False, False]


def test_who_stops_ends_what_has_begun(network, miner):
    until_second_window(network, miner, lambda: None)
    begun = miner._ahead._begun
    network.nodes.pop(miner.name).stop()
    assert begun.result.done()


@pytest.mark.parametrize("error", [TransientError(Reason.STORE_UNREACHABLE, "no route"), StoppedError("stopped")])
def test_data_that_was_not_here_is_read_again_by_the_window(network, miner, error, caplog):
    def fails():
        raise error

    def train():
        taken = noted(miner)
        return miner.train(2).reason, taken

    miner.reading = lambda window: fails
    assert until_second_window(network, miner, train) == (None, [False])
    assert f"what was trained ahead is dropped: {error}" in caplog.text


def test_a_training_that_failed_ahead_is_a_report_of_its_window(network, miner):
    learn = miner.trainer.learn

    def fails(*args, **kwargs):
        raise PermanentError(Reason.NON_FINITE_LOSS, "the loss is nan")

    def breaks(window, report, begin=miner._ahead.begin):
        miner.trainer.learn = fails
        begin(window, report)

    def mended():
        miner._ahead._begun.result.exception()
        miner.trainer.learn = learn

    miner._ahead.begin = breaks
    assert until_second_window(network, miner, lambda: miner.train(2), between=mended).reason is Reason.NON_FINITE_LOSS


def test_a_payload_that_cannot_be_read_back_leaves_the_window_as_it_was(network, miner, caplog):
    caplog.set_level(logging.INFO)
    taken, begin = noted(miner), miner._ahead.begin

    def without_files(window, report):
        for outcome in report.outcomes:
            if outcome.tier is Tier.GATHER:
                miner._staged_path(1).rename(miner.spool / "away")
                break
        begin(window, report)
        (miner.spool / "away").rename(miner._staged_path(1))

    miner._ahead.begin = without_files
    assert until_second_window(network, miner, lambda: miner.train(2)).reason is None
    assert taken == [False, False]
    assert "nothing is trained ahead" in caplog.text
