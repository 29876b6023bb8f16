"""Steps of the next window that a miner takes while a window settles."""

import logging
from copy import deepcopy
from dataclasses import replace
from threading import Event

import pytest
import torch

from templar.errors import PermanentError, Reason, TransientError
from templar.interrupt import StoppedError
from templar.neuron.ahead import StepsAhead
from templar.neuron.miner import Miner
from templar.training.optimizers import OptimizerState
from templar.training.train import StepState, Trainer, TrainResult
from templar.window import open_window
from tests.support.network import tiny

STEPS = 20  # of a window, of which two may be taken ahead


def ahead(network, who):
    """Start a miner again as one that trains ahead."""
    names, config = list(network.nodes), network.kill(who).config
    trainer = config.trainer.model_copy(update={"train_ahead": True})
    nodes = {**network.nodes, who.name: Miner(replace(config, trainer=trainer))}
    network.nodes = {name: nodes[name] for name in names}
    return nodes[who.name]


def compressed(miner, window):
    """Train and compress a window, and wait until the steps ahead are taken; what the training gave."""
    open_window(miner, window)
    assert miner.train(window).reason is None
    kept = deepcopy(miner._trained[window])  # its memory is used up by the steps ahead
    miner.compress(window)
    miner._ahead._steps._thread.join()
    return kept


def settled(miner, window):
    assert miner.commit(window).in_time
    assert miner.upload(window).in_time
    miner.apply(miner.settle(window))


@pytest.fixture
def network(build):
    return build(tiny(training={"inner_steps": STEPS}))


def test_a_window_goes_on_from_the_agreed_parameters_and_what_was_learnt_ahead(network, caplog):
    """The whole window is taken ahead here: its update is what training moves the own parameters, negated, and the
    share of the error feedback that each training begins with."""
    caplog.set_level(logging.INFO)
    miner, found = ahead(network, network.miners[0]), {}
    miner._ahead._most = STEPS

    def two_windows():
        before = dict(miner.state.params)
        one = compressed(miner, 1)
        own = {name: before[name] - update for name, update in one.update.items()}
        left_over = miner._training_sequences(1)
        left_over = left_over[torch.arange(one.num_sequences, 2 * one.num_sequences) % len(left_over)]
        trainer, training = Trainer(miner.hparams.model), miner.hparams.training
        found["alone"] = trainer.learn(
            *(own, left_over), training=training, outer_steps=1, optimizer=one.optimizer, keep_going=lambda: True
        )
        settled(miner, 1)
        open_window(miner, 2)
        miner.train(2)
        found["two"] = miner._trained[2]

    network.run([1], but=[miner], beside=[two_windows])
    alone, two = found["alone"], found["two"]
    assert network.rostered(1) == [network.uid(each) for each in network.miners]
    assert two.losses == alone.losses
    assert two.num_sequences == alone.num_sequences
    share, buffers = network.hparams.feedback_carry, miner.private.feedback.buffers
    for name, update in alone.update.items():
        torch.testing.assert_close(two.update[name], share * buffers[name] + update, rtol=0, atol=1e-6)
        assert torch.equal(two.optimizer.exp_avg[name], alone.optimizer.exp_avg[name])
    assert two.optimizer.num_steps == 2 * STEPS
    assert "goes on from 20 steps ahead" in caplog.text


def test_steps_ahead_are_a_part_of_their_window(network):
    """A tenth of the steps is taken ahead, the others after it, and all of them count once."""
    miner, found = ahead(network, network.miners[0]), []

    def window():
        compressed(miner, 1)
        assert miner._ahead._steps._result.num_steps == STEPS // 10
        settled(miner, 1)
        open_window(miner, 2)
        found.append((miner.train(2), miner._trained[2].optimizer.num_steps))

    network.run([1], but=[miner], beside=[window])
    ((report, optimizer_steps),) = found
    assert (report.num_steps, optimizer_steps) == (STEPS, 2 * STEPS)
    assert report.num_sequences == STEPS * network.hparams.training.batch_size


def test_steps_ahead_are_dropped_if_the_own_payload_was_not_applied(network, caplog):
    miner, found = ahead(network, network.miners[0]), []

    def left_out():
        compressed(miner, 1)
        assert miner.commit(1).in_time
        miner.apply(miner.settle(1))
        open_window(miner, 2)
        found.append((miner.train(2), miner._trained[2].optimizer.num_steps))

    network.run([1], but=[miner], beside=[left_out])
    ((report, optimizer_steps),) = found
    assert (report.num_steps, optimizer_steps) == (STEPS, STEPS)
    assert f"steps ahead are dropped: [{Reason.NOT_APPLIED}]" in caplog.text


def test_a_network_whose_miners_train_ahead_agrees(network):
    for miner in network.miners:
        ahead(network, miner)
    network.run([1, 2, 3])
    assert len(network.roots(3)) == 1
    assert network.rostered(3) == [network.uid(miner) for miner in network.miners]


def test_who_stops_ends_the_steps_ahead(network):
    miner = ahead(network, network.miners[0])
    miner._ahead._most = STEPS
    open_window(miner, 1)
    miner.train(1)
    miner.compress(1)
    thread = miner._ahead._steps._thread
    network.nodes.pop(miner.name).stop()
    assert not thread.is_alive()


class Learning:
    """A training whose steps a test takes one by one."""

    def __init__(self):
        self.step, self.taken, self.seen = Event(), Event(), []

    def __call__(self, steps):
        losses = ()
        while steps.keep_going():
            self.step.wait()
            self.step.clear()
            self.seen.append(steps.sequences.tolist())
            losses = (*losses, 1.0)
            steps.save(StepState(losses, len(losses), {}, None))
            self.taken.set()
        return TrainResult({}, OptimizerState(0, {}, {}), losses, len(losses), stopped_early=True)

    def take(self, number=1):
        for _ in range(number):
            self.taken.clear()
            self.step.set()
            self.taken.wait()


def began(learning, most=5):
    return StepsAhead(2, None, torch.zeros(2, 1), most, learning)


def test_the_data_of_the_window_is_trained_on_once_it_is_open():
    learning = Learning()
    steps = began(learning)
    learning.take()
    steps.open(lambda: torch.ones(3, 1))
    learning.take(4)
    assert steps.result().num_steps == 5
    assert learning.seen == [[[0], [0]]] * 2 + [[[1], [1]]] * 3


def test_data_that_cannot_be_read_yet_leaves_the_steps_as_they_are(caplog):
    caplog.set_level(logging.INFO)

    def read():
        raise TransientError(Reason.STORE_UNREACHABLE, "no route")

    learning = Learning()
    steps = began(learning, most=2)
    steps.open(read)
    learning.take(2)
    assert steps.result().num_steps == 2
    assert learning.seen[1] == [[0], [0]]
    assert "no route" in caplog.text


@pytest.mark.parametrize("error", [PermanentError(Reason.OUT_OF_MEMORY, "full"), StoppedError("stopped")])
def test_a_training_that_fails_has_no_steps_and_says_why(error, caplog):
    def learn(steps):
        raise error

    assert began(learn).result() is None
    assert str(error) in caplog.text


def test_a_fault_of_the_program_is_raised_where_the_steps_are_wanted():
    def learn(steps):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        began(learn).result()
