"""Both recipes: right, staged, and the same on any number of threads."""

import copy
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from training_cases import tokens

from templar import interrupt
from templar.agreement.state import parameters_digest
from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings, load_hparams
from templar.training import train
from templar.training.loss import token_losses
from templar.training.model import build_model, parameters_of
from templar.training.optimizers import OptimizerState
from templar.training.schedule import inner_learning_rate
from templar.training.train import StepSeries, StepState, Trainer, TrainResult
from tests.support.errors import raising, stopped
from tests.support.ranked_training import forever, times
from tests.support.threads import threads

HPARAMS = load_hparams("simulation", overrides={"training": {"batch_size": 4, "micro_batch_size": 2, "inner_steps": 3}})
TRAINING, MODEL = HPARAMS.training, HPARAMS.model
DEMO = TRAINING.model_copy(update={"recipe": "demo"})


def sparseloco(net, sequences, **changes):
    """Train the parameters of a model, with a trainer of its own."""
    arguments = {
        "training": TRAINING,
        "outer_steps": 2,
        "optimizer": OptimizerState.zeros(parameters_of(net)),
        "keep_going": forever,
    }
    trainer = Trainer(changes.pop("model", MODEL), changes.pop("settings", None))
    return trainer.learn(parameters_of(net), sequences, **(arguments | changes))


def demo(net, sequences, keep_going=forever):
    return sparseloco(net, sequences, training=DEMO, keep_going=keep_going)


@pytest.fixture
def net():
    return build_model(HPARAMS.model)


@pytest.mark.parametrize("recipe", ["sparseloco", "demo"])
def test_training_does_not_depend_on_threads(recipe):
    hparams = load_hparams("local", overrides={"training": {"inner_steps": 2}})
    net, sequences = build_model(hparams.model), tokens(2 * hparams.training.batch_size, hparams=hparams)

    training = hparams.training.model_copy(update={"recipe": recipe})

    def train():
        return sparseloco(net, sequences, training=training, model=hparams.model)

    with threads(1):
        one = train()
    with threads(2):
        two = train()
    assert parameters_digest(one.update) == parameters_digest(two.update)
    assert (one.first_loss, one.last_loss) == (two.first_loss, two.last_loss)
    if recipe == "sparseloco":
        assert parameters_digest(one.optimizer.exp_avg_sq) == parameters_digest(two.optimizer.exp_avg_sq)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_inner_steps_are_those_of_torchs_optimizers(net, optimizer):
    """Against a plain loop over whole batches; Muon rounds to bfloat16, so its gradients must have the same bits."""
    sequences, whole = tokens(12), {"micro_batch_size": 4} if optimizer == "muon" else {}
    training = TRAINING.model_copy(update={"optimizer": optimizer, **whole})
    result = sparseloco(net, sequences, training=training)
    plain = build_model(HPARAMS.model)
    settings = TRAINING.adamw
    matrices = [param for name, param in plain.named_parameters() if "proj" in name and optimizer == "muon"]
    rest = [param for name, param in plain.named_parameters() if "proj" not in name or optimizer == "adamw"]
    adamw = torch.optim.AdamW(rest, betas=(settings.beta1, settings.beta2), weight_decay=0.1)
    muon = torch.optim.Muon(matrices, weight_decay=0.1) if matrices else adamw
    losses, norms, rates = [], [], []
    for step in range(3):
        loss = token_losses(plain, sequences[4 * step : 4 * step + 4]).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), TRAINING.max_grad_norm)))
        rates.append(rate := inner_learning_rate(TRAINING, 2, step))
        muon.param_groups[0]["lr"] = TRAINING.muon_learning_rate * rate / settings.learning_rate
        adamw.param_groups[0]["lr"] = rate
        for each in {adamw, muon}:
            each.step()
            each.zero_grad()
        losses.append(loss.item())
    before = parameters_of(net)
    for name, param in parameters_of(plain).items():
        torch.testing.assert_close(result.update[name], before[name] - param, rtol=1e-3, atol=1e-6)
    assert list(result.losses) == pytest.approx(losses, rel=1e-5)
    assert list(result.norms) == pytest.approx(norms, rel=1e-3)
    assert list(result.rates) == rates
    assert (result.num_steps, result.num_sequences, result.stopped_early) == (3, 12, False)
    short, wrapped = tokens(5), torch.cat([tokens(5)] * 3)[:12]
    assert parameters_digest(sparseloco(net, short).update) == parameters_digest(sparseloco(net, wrapped).update)


def test_training_is_staged_and_continues_from_its_state(net):
    before = parameters_digest(parameters_of(net))
    start = OptimizerState.zeros(parameters_of(net))
    first = sparseloco(net, tokens(12), optimizer=start)
    assert parameters_digest(parameters_of(net)) == before
    assert all(param.grad is None for param in net.parameters())
    assert (start.num_steps, any(tensor.any() for tensor in start.exp_avg.values())) == (0, False)
    kept = parameters_digest(first.optimizer.exp_avg)
    second = sparseloco(net, tokens(12), optimizer=first.optimizer)
    assert (first.optimizer.num_steps, second.optimizer.num_steps) == (3, 6)
    assert parameters_digest(first.optimizer.exp_avg) == kept != parameters_digest(second.optimizer.exp_avg)
    assert parameters_digest(first.update) != parameters_digest(second.update)


def test_a_miner_may_change_its_optimizer_at_any_time(net):
    adamw = sparseloco(net, tokens(12))
    muon = sparseloco(net, tokens(12), optimizer=adamw.optimizer, settings=TrainerSettings(optimizer="muon"))
    again = sparseloco(net, tokens(12), optimizer=muon.optimizer)
    assert [each.optimizer.num_steps for each in (adamw, muon, again)] == [3, 6, 9]
    assert parameters_digest(adamw.update) != parameters_digest(muon.update) != parameters_digest(again.update)
    matrices = {name for name in adamw.optimizer.exp_avg_sq if "proj" in name}
    assert muon.optimizer.exp_avg_sq.keys() == adamw.optimizer.exp_avg_sq.keys() - matrices
    kept = Kept(1)
    with pytest.raises(Died):
        sparseloco(net, tokens(12), optimizer=muon.optimizer, progress=kept)
    kept.dies_after = None
    assert bits(sparseloco(net, tokens(12), optimizer=muon.optimizer, progress=kept)) == bits(again)


def test_an_early_stop_takes_whole_steps_only(net):
    result = sparseloco(net, tokens(12), keep_going=times(5))  # two steps of two micro-batches, and half of a third
    two = sparseloco(net, tokens(12), training=TRAINING.model_copy(update={"inner_steps": 2}), outer_steps=3)
    assert (result.num_steps, result.num_sequences, result.stopped_early) == (2, 8, True)
    assert two.stopped_early is False
    assert parameters_digest(result.update) == parameters_digest(two.update)  # 3 * 2 is 2 * 3 in the schedule


def test_a_miner_with_all_the_time_takes_larger_batches(net):
    several = sparseloco(net, tokens(40), training=TRAINING.model_copy(update={"max_step_batches": 3}))
    larger = sparseloco(net, tokens(40), training=TRAINING.model_copy(update={"batch_size": 12}))
    assert several.num_steps == larger.num_steps == TRAINING.inner_steps
    assert several.num_sequences == larger.num_sequences == 12 * TRAINING.inner_steps
    assert several.first_loss == pytest.approx(larger.first_loss)
    for name, update in several.update.items():
        torch.testing.assert_close(update, larger.update[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("seconds", "batches"), [(3, (1, 1, 1)), (20, (3, 3, 4)), (14, (2, 2, 3)), (99, (4, 4, 4))])
def test_a_step_takes_the_batches_that_its_share_of_the_time_has_room_for(net, seconds, batches):
    """A micro-batch takes a second, a batch two."""
    training, kept, passed = TRAINING.model_copy(update={"max_step_batches": 4}), Kept(), 0

    def micro_batch():
        nonlocal passed
        passed += 1
        return True

    timed = {"keep_going": micro_batch, "seconds_left": lambda: seconds - passed}
    found = sparseloco(net, tokens(48), training=training, progress=kept, **timed)
    assert kept.num_batches == [*accumulate(batches)]
    assert found.num_sequences == sum(batches) * training.batch_size


def test_demo_averages_the_gradient(net):
    sequences = tokens(12)
    result = demo(net, sequences)
    token_losses(net, sequences).mean().backward()
    for name, param in net.named_parameters():
        torch.testing.assert_close(result.update[name], param.grad, rtol=1e-4, atol=1e-7)
    assert (result.num_steps, result.num_sequences, result.stopped_early) == (3, 12, False)
    assert result.optimizer is None


def test_demo_ends_with_its_sequences_and_counts_whole_batches(net):
    sequences = tokens(5)
    result = demo(net, sequences)
    assert (result.num_steps, result.num_sequences, result.stopped_early) == (2, 8, False)
    filled = demo(net, torch.cat([sequences, sequences])[:8])
    assert parameters_digest(result.update) == parameters_digest(filled.update)
    stopped = demo(net, sequences, times(3))
    one = demo(net, sequences[:4])
    assert (stopped.num_steps, stopped.stopped_early) == (1, True)
    assert parameters_digest(stopped.update) == parameters_digest(one.update)


@pytest.mark.parametrize("learn", [sparseloco, demo])
def test_no_time_no_data_and_a_foreign_optimizer_state(net, learn):
    with raising(PermanentError, Reason.NO_TIME_LEFT):
        learn(net, tokens(4), keep_going=times(1))
    with pytest.raises(ValueError, match="no sequences"):
        learn(net, tokens(0))
    with pytest.raises(ValueError, match="exactly the model's parameters"):
        sparseloco(net, tokens(4), optimizer=OptimizerState.zeros({"p": torch.zeros(1)}))


@pytest.mark.parametrize("learn", [sparseloco, demo])
def test_a_stop_and_a_bad_loss_leave_the_model_alone(net, learn):
    before = parameters_digest(parameters_of(net))

    def stop_in_the_second_step():
        if not go():
            interrupt.request_stop()
        return True

    go = times(3)
    with stopped():
        learn(net, tokens(12), keep_going=stop_in_the_second_step)
    assert parameters_digest(parameters_of(net)) == before
    with torch.no_grad():
        net.get_output_embeddings().weight[3, 3] = float("inf")
    poisoned = parameters_digest(parameters_of(net))
    with raising(PermanentError, Reason.NON_FINITE_LOSS):
        learn(net, tokens(12))
    assert parameters_digest(parameters_of(net)) == poisoned
    assert all(param.grad is None for param in net.parameters())


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 2.0**100])
def test_an_update_that_is_out_of_all_proportion_is_not_published(net, factor, monkeypatch):
    def poisoned(net, sequences):
        losses = token_losses(net, sequences)
        losses.register_hook(lambda gradient: gradient * factor)
        return losses

    monkeypatch.setattr(train, "token_losses", poisoned)
    with raising(PermanentError, Reason.NON_FINITE_UPDATE, "lm_head"):
        demo(net, tokens(4))


def test_the_report_of_many_steps_stays_small_and_has_the_first_and_the_last():
    losses, norms = tuple(9 - 0.01 * step for step in range(500)), tuple(1.0 + (step == 77) for step in range(500))
    many = TrainResult({}, None, losses, 500, stopped_early=False, norms=norms)
    series = StepSeries.of(many)
    assert (len(series.inner_step), series.inner_step[0], series.inner_step[-1]) == (64, 0, 499)
    assert {later - step for step, later in pairwise(series.inner_step)} == {7, 8}
    assert (series.loss[-1], len(series.grad_norm), series.inner_lr) == (4.01, 64, ())
    assert series.norms == (1.0, pytest.approx(1.002), 2.0), "also of a step that is not in the series"
    for count in (1, 64):
        assert StepSeries.of(replace(many, losses=losses[:count], norms=())).inner_step == tuple(range(count))


# Training that was interrupted.


class Died(BaseException):
    """The process is gone."""


class Kept:
    """Keeps each state in memory, as a file would, and dies after the save that leaves this many steps."""

    def __init__(self, dies_after=None):
        self.state: StepState | None = None
        self.num_batches: list[int] = []  # after each step
        self.dies_after = dies_after

    def save(self, state):
        self.state = copy.deepcopy(state)
        self.num_batches.append(state.num_batches)
        if len(state.losses) == self.dies_after:
            raise Died

    def restore(self):
        return self.state


def bits(result):
    """Everything that training leaves, but for what it took."""
    moments = (result.optimizer.exp_avg, result.optimizer.exp_avg_sq) if result.optimizer else ()
    return (
        [parameters_digest(each) for each in (result.update, *moments)],
        result.optimizer and result.optimizer.num_steps,
        (result.losses, result.norms, result.rates),
        (result.num_steps, result.num_sequences, result.stopped_early),
    )


@pytest.mark.parametrize("recipe", ["sparseloco", "demo"])
@pytest.mark.parametrize("dies_after", [1, 2, 3, 4])
def test_training_that_goes_on_gives_the_same_bits(net, recipe, dies_after):
    steps = {"inner_steps": 4, "max_step_batches": 2 if recipe == "sparseloco" else 1}
    training = TRAINING.model_copy(update={"recipe": recipe, **steps})
    before = sparseloco(net, tokens(16, seed=1), training=TRAINING).optimizer  # moments that are not zero
    calm = sparseloco(net, tokens(16), training=training, optimizer=before)
    kept = Kept(dies_after)
    with pytest.raises(Died):
        sparseloco(net, tokens(16), training=training, optimizer=before, progress=kept)
    kept.dies_after = None
    resumed = sparseloco(net, tokens(16), training=training, optimizer=before, progress=kept)
    assert bits(resumed) == bits(calm)
    assert calm.figures is not None
    assert resumed.figures is not None
    assert resumed.figures.tokens == calm.figures.tokens * (4 - dies_after) // 4, "the speed is of this call's tokens"


def test_what_was_done_before_an_interruption_counts_when_no_time_is_left(net):
    kept = Kept(2)
    with pytest.raises(Died):
        sparseloco(net, tokens(12), progress=kept)
    result = sparseloco(net, tokens(12), progress=kept, keep_going=times(0))
    assert (result.num_steps, result.stopped_early) == (2, True)
    assert bits(result) == bits(sparseloco(net, tokens(12), keep_going=times(4)))


def test_a_training_that_begins_elsewhere_is_measured_from_the_agreed_parameters(net):
    """The step taken is that of a trainer whose parameters are the beginning; the way there counts as well."""
    sequences, params = tokens(4), {name: tensor.clone() for name, tensor in parameters_of(net).items()}
    begin = {name: param + 0.01 * torch.ones_like(param) for name, param in params.items()}
    one = TRAINING.model_copy(update={"inner_steps": 1})
    away = sparseloco(net, sequences, training=one, begin=begin)
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(begin[name])
    there = sparseloco(net, sequences, training=one)
    for name, update in away.update.items():
        assert torch.allclose(update, there.update[name] + params[name] - begin[name], atol=1e-6), name
