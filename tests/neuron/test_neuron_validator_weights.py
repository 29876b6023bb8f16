"""Weights on chain: set once when they are due; a refusal costs no window."""

import itertools
import json
import logging
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import bittensor as bt
import bittensor_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.adversary.chains import ChainView
from lab.hotkeys import hotkey_from_seed
from templar import interrupt
from templar.chain.base import WeightsSchedule
from templar.chain.bittensor import BittensorChain
from templar.chain.clock import SimulatedClock
from templar.chain.extrinsics import ExtrinsicRefusedError, quantise_weights
from templar.chain.ledger import Ledger, create_ledger
from templar.chain.remote import CallLimits
from templar.errors import Reason, TransientError
from templar.interrupt import StoppedError
from templar.neuron.journal import Journal, Status
from templar.neuron.validator import BEGUN, HIDDEN, PAUSES, STEP, WeightsReport, _may_wait, are_due, weigh
from templar.window import Action, drive_window
from tests.support.network import tiny
from tests.support.substrate import KeyPairWallet, MemorySubstrate

SEED = bytes(range(32))
KEY = hotkey_from_seed(SEED)
OTHERS = [hotkey_from_seed(bytes([number]) * 32).address for number in (1, 2, 3)]
START = 1_800_000_000.0
WINDOW = 2
LIMIT = 100
"""A rate limit in blocks that no window outlasts."""
WANTED = {1: 0.5, 2: 0.3, 3: 0.2}
OTHER = {1: 0.1, 2: 0.9}


class Killed(BaseException):
    """The process dies here."""


class Scene:
    """A validator's weights and nothing else of it: a real journal, a real chain, in the window after `WINDOW`."""

    name = "validator"

    def __init__(self, chain, path, operator, substrate=None):
        self.chain, self.path, self.hparams, self.journal = chain, path, tiny(), None
        self.operator = operator  # who registers and stakes
        self.substrate = substrate  # the subnet below the SDK, where the chain is Bittensor's
        self.blocks = self.hparams.windows.blocks_per_window
        operator.register(KEY.address, stake=10.0, validator_permit=True)
        for address in OTHERS:
            operator.register(address)
        self.restart()
        self.sleep_into(WINDOW + 1)

    def restart(self):
        """Another process over the same journal."""
        if self.journal is not None:
            self.journal.close()
        self.journal = Journal(self.path)

    def sleep_into(self, window, blocks=6):
        """Let it be some blocks after a window opened."""
        self.chain.wait_for_block(window * self.blocks + blocks, finalized=False)

    def weigh(self, window=WINDOW, wanted=WANTED):
        """The step, in a window whose evidence has these weights."""
        weights = [SimpleNamespace(uid=uid, weight=weight) for uid, weight in wanted.items()]
        return weigh(self, SimpleNamespace(window=window, uid=0, hotkey=KEY.address, weights=weights))

    def weigh_later(self, windows=1, wanted=OTHER):
        """The step, so many windows later."""
        self.sleep_into(WINDOW + 1 + windows)
        return self.weigh(WINDOW + windows, wanted)

    def shows(self, wanted):
        """Whether the chain shows these weights."""
        return self.chain.weights().get(0, {}) == pytest.approx(wanted, abs=1e-4)


@pytest.fixture
def clock():
    return SimulatedClock(START)


@pytest.fixture
def local(tmp_path, clock):
    """A scene on a ledger."""
    path = tmp_path / "ledger"
    create_ledger(path, netuid=1, block_seconds=1.0, genesis_time=START, seed=1)
    ledger = Ledger(path, hotkey=KEY, clock=clock, durable=False)
    scene = Scene(ledger, tmp_path / "journal.sqlite", ledger)
    yield scene
    scene.journal.close()
    scene.operator.close()


@pytest.fixture
def real(tmp_path, clock):
    """A scene on Bittensor's SDK over a subnet in memory, whose epochs are too short to wait for their end."""
    substrate = MemorySubstrate(clock, netuid=1, block_seconds=1.0)
    wallet = KeyPairWallet(bittensor_core.Keypair.create_from_seed(SEED))
    limits = CallLimits(attempts=2, read_seconds=60)
    chain = BittensorChain("local", 1, wallet=wallet, substrates=lambda *_: substrate, clock=clock, limits=limits)
    scene = Scene(chain, tmp_path / "journal.sqlite", substrate, substrate)
    substrate.tempo = 2 * scene.blocks
    yield scene
    scene.journal.close()
    chain.close()


class Scripted(ChainView):
    """A chain whose next answers to weights are errors, or functions of the chain behind it and the weights."""

    def __init__(self, inner, *answers):
        super().__init__(inner)
        self.answers, self.sent = list(answers), []

    def set_weights(self, weights):
        self.sent.append((dict(weights), self.head()))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            super().set_weights(weights)
        else:
            answer(self._inner, weights)


def scripted(scene, *answers):
    scene.chain = Scripted(scene.chain, *answers)
    return scene.chain


def permanent(cause):
    return ExtrinsicRefusedError(Reason.CHAIN_REFUSED, "the chain's words", cause=cause)


def passing(reason):
    return TransientError(reason, "it may pass")


def lost(chain, weights):
    """An extrinsic that is included, and nobody hears of it."""
    chain.set_weights(weights)
    raise passing(Reason.CHAIN_FATE_UNKNOWN)


OUTCOMES = ["set", "refused", "nobody", "skipped", "cut off"]


@settings(max_examples=30)
@given(every=st.integers(1, 6), first=st.integers(1, 20), outcomes=st.lists(st.sampled_from(OUTCOMES), max_size=20))
def test_weights_are_due_in_every_nth_window_and_after_a_refusal(tmp_path_factory, every, first, outcomes):
    journal = Journal(tmp_path_factory.mktemp("due") / "journal.sqlite", durable=False)
    owed = False
    for window, outcome in enumerate(outcomes, first):
        due = owed or window % every == 0
        assert are_due(journal, window, every=every) is due
        if window % every == 0:
            owed = False  # its own outcome counts
        if not due or outcome in ("nobody", "skipped"):
            continue
        journal.enter(window, BEGUN, "7")
        if outcome != "cut off":
            reason = "null" if outcome == "set" else '"chain_refused"'
            journal.enter(window, STEP, f'{{"window": {window}, "weights": {{}}, "reason": {reason}}}')
        owed = outcome != "set"
    journal.close()


def test_no_positive_score_is_not_a_refusal(local):
    chain = scripted(local)
    report = local.weigh(wanted={})
    assert (report.weights, report.reason, report.refused) == ({}, Reason.NOBODY_EARNED, False)
    assert report.summary == "no weights [nobody_earned]"
    assert chain.sent == []
    assert local.weigh(WINDOW + 1) is None
    assert local.weigh(WINDOW + 2, wanted={1: 0.0}).reason is Reason.WEIGHTS_MALFORMED


@pytest.mark.parametrize("kind", ["local", "real"])
def test_weights_are_set_once_and_read_back(request, kind):
    scene = request.getfixturevalue(kind)
    chain = scripted(scene)
    report = scene.weigh()
    assert (report.window, report.reason, report.tries, report.summary) == (WINDOW, None, 1, "weights set")
    assert report.weights == pytest.approx(WANTED, abs=1e-4)
    assert scene.shows(WANTED)
    assert scene.weigh(wanted=OTHER) == report, "what was set for a window stands"
    scene.restart()
    assert scene.weigh(wanted=OTHER) == report
    assert len(chain.sent) == 1
    assert scene.weigh_later(1) is None
    assert scene.weigh_later(2) != report
    assert scene.shows(OTHER)


def others(chain, weights):
    """A chain that enters other weights than were sent."""
    chain.set_weights(OTHER)


TRIES: dict[str, tuple[list[Any], Reason | None, list[int]]] = {
    "refused twice": ([passing(Reason.CHAIN_RATE_LIMITED)] * 2, None, [1, 2]),
    "unreachable twice": ([passing(Reason.CHAIN_UNREACHABLE)] * 2, None, [1, 2]),
    "of unknown fate twice": ([passing(Reason.CHAIN_FATE_UNKNOWN)] * 2, None, [1, 2]),
    "others once": ([others], None, [2]),
    "others as often as the window has time for": ([others] * 9, Reason.WEIGHTS_DIFFER, [2, 3]),
    "answered": ([], None, []),
    "taken without an answer": ([lost], None, []),
}
"""The chain's answers, the reason of the report, and the blocks between two tries: one of them includes others."""


@pytest.mark.parametrize(("answers", "reason", "pauses"), TRIES.values(), ids=TRIES)
@pytest.mark.parametrize("is_behind", [False, True])
def test_weights_are_sent_until_the_chain_shows_them(local, monkeypatch, *, answers, reason, pauses, is_behind):
    """With an endpoint for the reads that is one read behind: weights are read before they are sent again."""
    chain = scripted(local, *answers)
    real, stale = chain.weights, [{}] if is_behind else []
    monkeypatch.setattr(chain, "weights", lambda: stale.pop() if stale else real())
    report = local.weigh()
    assert (report.reason, report.tries, len(chain.sent)) == (reason, len(pauses) + 1, len(pauses) + 1)
    blocks = [block for _, block in chain.sent]
    assert [later - earlier for earlier, later in itertools.pairwise(blocks)] == pauses
    assert local.shows(WANTED if reason is None else OTHER)
    assert reason is None or "uids [1, 2, 3]" in report.detail


def test_a_lasting_refusal_is_left_to_the_next_window_in_time_for_the_last_steps(local):
    chain = scripted(local, *[passing(Reason.CHAIN_UNREACHABLE)] * 99)
    for windows in range(3):
        report = local.weigh_later(windows)
        assert (report.reason, report.weights) == (Reason.CHAIN_UNREACHABLE, {})
        assert local.chain.head() < (WINDOW + windows + 2) * local.blocks - 4
        tries = len(chain.sent)
        assert local.weigh(WINDOW + windows) == report
        assert len(chain.sent) == tries
    chain.answers.clear()
    assert local.weigh_later(3, WANTED).reason is None
    assert local.shows(WANTED), "those of the newest window"
    assert local.weigh(WINDOW + 5) is None


def test_a_chain_that_answers_nothing_ends_in_a_report(local, clock, monkeypatch):
    scripted(local)
    away = [passing(Reason.CHAIN_UNREACHABLE)] * (len(PAUSES) + 1)

    def before(call):
        if away:
            raise away.pop()

    monkeypatch.setattr(local.chain, "before", before)
    began = clock.now()
    report = local.weigh()
    assert (report.reason, report.tries) == (Reason.CHAIN_UNREACHABLE, 0)
    assert clock.now() - began == sum(PAUSES)
    assert local.weigh_later().reason is None


def test_the_chains_limit_is_waited_for_to_the_block(real):
    real.chain.set_weights(OTHER)  # earlier, in another window
    set_in, real.substrate.weights_rate_limit = real.substrate.versions[-1][0], 6
    chain = scripted(real)
    assert real.weigh().reason is None
    assert [block for _, block in chain.sent][1:] == [set_in + 6]
    assert [sent.params["dests"] for sent in real.substrate.submissions] == [[1, 2], [1, 2, 3]]


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
def test_a_limit_that_outlasts_the_window_is_not_waited_for(real, clock, hidden):
    real.chain.set_weights(OTHER)
    real.substrate.weights_rate_limit, real.substrate.commit_reveal = 20, hidden
    before = real.chain.head(), clock.now()
    report = real.weigh()
    assert (report.reason, report.tries, report.weights) == (Reason.CHAIN_RATE_LIMITED, 1, {})
    assert "Retry in ~" in report.detail
    assert (real.chain.head(), clock.now()) == before
    assert real.weigh_later(1, WANTED).reason is None
    assert hidden or real.shows(WANTED)


@pytest.mark.parametrize(
    ("name", "reason"), [("NotEnoughStakeToSetWeights", Reason.NOT_ENOUGH_STAKE), ("Payment", Reason.CANNOT_PAY_FEES)]
)
def test_a_refusal_ends_the_tries_of_the_window_and_names_its_reason(real, clock, caplog, name, reason):
    began = clock.now()
    real.substrate.refuse_next(bt.ChainError(f"words of {name}", name))
    report = real.weigh()
    assert (report.refused, report.reason, report.tries) == (True, reason, 1)
    assert f"words of {name}" in report.detail
    assert report.summary == f"weights refused [{reason}]"
    assert clock.now() == began
    (error,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert f"NOT set [{reason}], the next window tries again" in error.getMessage()

    assert real.weigh(wanted=OTHER) == report, "running the step twice changes nothing"
    assert len(real.substrate.submissions) == 1
    assert real.weigh_later().reason is None
    assert real.shows(OTHER)


def stopped(chain, weights):
    interrupt.request_stop()
    raise passing(Reason.CHAIN_UNREACHABLE)


@pytest.mark.parametrize(("answer", "error"), [(ZeroDivisionError(), ZeroDivisionError), (stopped, StoppedError)])
def test_an_unexpected_exception_and_a_stop_are_raised_and_a_later_call_goes_on(local, answer, error):
    scripted(local, answer)
    try:
        with pytest.raises(error):
            local.weigh()
    finally:
        interrupt.clear_stop()
    assert local.journal.result(WINDOW, STEP) is None
    assert local.weigh().reason is None


@pytest.fixture
def hiding(real):
    """A scene whose subnet hides weights."""
    real.substrate.commit_reveal = True
    return real


@pytest.mark.parametrize("fate", ["known", "unknown"])
def test_hidden_weights_are_not_read_back_but_recognised_among_those_that_the_chain_hides(hiding, fate):
    if fate == "unknown":
        hiding.substrate.weights_rate_limit = LIMIT
        scripted(hiding, lost)
    report = hiding.weigh()
    assert (report.reason, report.weights, report.tries) == (None, WANTED, 1)
    assert hiding.chain.weights().get(0, {}) == {}
    assert hiding.weigh() == report
    assert len(hiding.substrate.submissions) == 1


@pytest.mark.parametrize("revealed", [WANTED, OTHER, None], ids=["as sent", "others", "dropped"])
def test_hidden_weights_are_followed_until_the_chain_reveals_or_drops_them(hiding, revealed, caplog):
    assert hiding.weigh().reason is None
    for windows in (1, 3):
        assert hiding.weigh_later(windows) is None, "they are hidden, and none are due"
    hiding.substrate.reveal(None if revealed is None else quantise_weights(revealed))
    report = hiding.weigh_later(5, {1: 1.0})
    if revealed == WANTED:
        assert (report, hiding.journal.results(HIDDEN)) == (None, {WINDOW: ""})
        assert "dropped" not in caplog.text
        return
    assert report.reason is None, "weights are set again at once, although none are due"
    assert report.summary == "weights set, earlier ones were dropped"
    assert report.detail.startswith(f"the chain has dropped the weights of window {WINDOW} [weights_differ]")
    assert report.detail in caplog.text
    assert hiding.weigh_later(7) is None, "it is said once"


DROPS = {
    Reason.NO_VALIDATOR_PERMIT: lambda scene: scene.operator.set_stake(KEY.address, 10.0, validator_permit=False),
    Reason.NOT_ENOUGH_STAKE: lambda scene: scene.substrate.settings.update(StakeThreshold=10**12),
    Reason.WEIGHTS_MALFORMED: lambda scene: scene.substrate.settings.update(MaxWeightsLimit=30_000),
    Reason.NOT_REGISTERED: lambda scene: scene.operator.deregister(KEY.address),
}


@pytest.mark.parametrize("cause", list(DROPS))
def test_the_cause_of_dropped_weights_is_named(hiding, cause):
    """The chain says nothing: the rules that they break now say it."""
    assert hiding.weigh().reason is None
    DROPS[cause](hiding)
    hiding.substrate.reveal()
    report = hiding.weigh_later(3)
    assert f"the chain has dropped the weights of window {WINDOW} [{cause}]" in report.detail
    assert (report.reason, report.refused) == (cause, True), "and those of this window break the same rule"
    assert len(hiding.substrate.submissions) == 1


def test_hidden_weights_that_follow_each_other_are_told_apart(hiding):
    """The older commit is looked for while the newer one is hidden."""
    for windows, wanted in ((0, WANTED), (2, OTHER)):
        assert hiding.weigh_later(windows, wanted).reason is None
    first, second = (block for _, block, _, _ in hiding.substrate.versions[-1][1].hidden)
    assert first < second
    hiding.substrate.reveal(quantise_weights(WANTED), before=second)
    assert hiding.weigh_later(3) is None
    assert [window for window, block in hiding.journal.results(HIDDEN).items() if block] == [WINDOW + 2]
    hiding.substrate.reveal(quantise_weights(WANTED))
    assert f"dropped the weights of window {WINDOW + 2}" in hiding.weigh_later(5).detail


@pytest.mark.parametrize("before", [False, True], ids=["switched on", "switched off"])
def test_commit_reveal_may_be_switched_while_weights_are_set(real, before):
    """The other form is taken for what it is: hidden weights are not read back, and others are."""
    real.substrate.commit_reveal = before

    def switch(chain, weights):
        real.substrate.commit_reveal = not before
        chain.set_weights(weights)

    scripted(real, switch)
    report = real.weigh()
    assert (report.reason, report.tries, report.weights) == (None, 1, pytest.approx(WANTED, abs=1e-4))
    assert real.shows(WANTED if before else {})


EVERY = {every: tiny(weights={"windows_per_weights": every}) for every in (1, 2, 3, 4)}


@settings(max_examples=40, deadline=None)
@given(every=st.sampled_from(list(EVERY)), tempo=st.integers(10, 700), offset=st.integers(0, 700))
def test_weights_are_sent_once_per_epoch_and_in_time_for_its_end(every, tempo, offset):
    """Of the windows whose weights are sent within an epoch with a window to spare, the last one is; one more may be
    sent where the epoch has none with a window to spare."""
    hparams, results = EVERY[every], {}
    journal = SimpleNamespace(result=lambda window, step: results.get((window, step)))
    blocks, sent = hparams.windows.blocks_per_window, []
    starts = [offset % tempo + tempo * number for number in range(-1, 1 + 80 * blocks // tempo)]
    for window in range(0, 80, every):
        head = (window + 1) * blocks + 2
        end = next((start for start in starts if start > head), None)
        if end is not None and not _may_wait(journal, hparams, window, WeightsSchedule(end, tempo)):
            sent.append(window)
            report = WeightsReport(window, {}, None)
            results |= {(window, BEGUN): str(head), (window, STEP): json.dumps(asdict(report))}
    for start, end in itertools.pairwise([each for each in starts[1:] if each < 78 * blocks]):
        due = [window for window in range(0, 80, every) if start <= (window + 1) * blocks + 2 < end]
        in_time = [window for window in due if (window + 3) * blocks <= end]
        within = [window for window in due if window in sent]
        assert not in_time or in_time[-1] in within
        assert len(within) <= 1, "once"
        assert within or not due
    assert not _may_wait(journal, hparams, 0, WeightsSchedule())


def test_weights_wait_for_the_last_due_window_of_a_long_epoch_and_a_refusal_is_tried_again_within_it(real):
    chain = scripted(real, permanent(Reason.NOT_ENOUGH_STAKE))
    assert real.weigh().reason is Reason.NOT_ENOUGH_STAKE
    real.substrate.tempo = 8 * real.blocks
    assert real.weigh_later().reason is None, "also where the next due ones would be in time"
    sent = [window for window in range(2, 15) if real.weigh_later(window) is not None]
    assert [WINDOW + window for window in sent] == [12], "windows 8 and 16 begin an epoch"
    assert len(chain.sent) == 3


DEATHS = ["before it begins", "before it sends", "while nobody hears the answer", "before it is entered"]


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_sets_the_weights_once(real, monkeypatch, death, hidden):
    real.substrate.commit_reveal, real.substrate.weights_rate_limit = hidden, LIMIT
    entering, sending = real.journal.enter, real.chain.set_weights

    def enter(window, step, result):
        if step == {DEATHS[0]: BEGUN, DEATHS[3]: STEP}.get(death):
            raise Killed
        entering(window, step, result)

    def send(weights):
        if death != DEATHS[1]:
            sending(weights)
        if death in DEATHS[1:3]:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(real.journal, "enter", enter)
        patch.setattr(real.chain, "set_weights", send)
        with pytest.raises(Killed):
            real.weigh()
    real.restart()
    report = real.weigh()
    assert (report.reason, report.weights) == (None, pytest.approx(WANTED, abs=1e-4))
    assert len(real.substrate.submissions) == 1
    assert real.weigh() == report


def weights_of(evidence):
    return {record.uid: record.weight for record in evidence.weights}


def test_a_network_sets_the_weights_of_its_newest_due_window(network):
    network.run([1, 2, 3])
    validator = network.validator
    wanted = weights_of(network.evidence(2))
    assert sum(wanted.values()) == pytest.approx(1)
    assert network.world.chain.weights() == {validator.exchange.identity(2).uid: pytest.approx(wanted, abs=1e-4)}
    report = validator.set_weights(network.evidence(2))
    assert (report.window, report.reason, report.weights) == (2, None, pytest.approx(wanted, abs=1e-4))
    assert validator.set_weights(network.evidence(3)) is None
    assert validator.set_weights(None) is None


def test_a_refusal_blocks_neither_proof_nor_close_and_a_later_window_sets_the_weights(network):
    validator = network.validator
    chain = Scripted(validator.chain, permanent(Reason.NOT_ENOUGH_STAKE), permanent(Reason.WEIGHTS_VERSION))
    validator.chain = chain
    network.run([1, 2, 3])
    assert network.world.chain.weights() == {}
    for window, reason in ((2, Reason.NOT_ENOUGH_STAKE), (3, Reason.WEIGHTS_VERSION)):
        report = validator.set_weights(network.evidence(window))
        assert report.reason is reason
        assert network.objects(validator, f"proof-{window}-")
        assert validator.journal.status(window) is Status.FINISHED
        assert len(network.roots(window)) == 1

    def restarted():
        again = network.restart(validator)
        for window in (4, 5):
            network.to_window(window, again.chain)
            assert drive_window(again, window).action is Action.RUN

    network.run([4, 5], but=[validator], beside=[restarted])
    uid = network.validator.exchange.identity(4).uid
    assert network.world.chain.weights() == {uid: pytest.approx(weights_of(network.evidence(4)), abs=1e-4)}
    assert network.validator.set_weights(network.evidence(5)) is None
