"""Several windows in a row without a payload or a score are told once, and again when they have doubled."""

from types import SimpleNamespace
from unittest import mock
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Failed, Running
from prefect.types._datetime import now
from rich.console import Console

from deployments.automations import CRASHED, REMEDIES
from deployments.local import command
from deployments.neuron import status
from deployments.neuron.folder import Address
from deployments.neuron.status import FIRST_TOLD, NUM_WINDOWS, Teller, _found, show_network_status, streak_of
from tasks.alerts import Alert
from templar.errors import Reason
from templar.window import Missed

DONE = Completed(message="window 9: published 20417 bytes, applied (3, 4), root 9bb9f335e3e7")
UNTRAINED = Failed(name="NothingPublished", message="window 8: not trained [no_time_left], applied (3, 4), root 9b")
UNSCORED = Failed(name="NothingScored", message="window 8: not measured [dataset_missing], applied (3,), root 9b")
BROKEN = Failed(
    message="Flow run encountered an exception: PermanentError: [access_denied] bucket ab: put answered 403"
)
BEHIND = Completed(name="CatchingUp", message="window 8 [decision_missing] at window 5, wanted 7: not decided")
PASSED = Completed(name="Skipped", message="window 8 [window_passed] the chain is in window 12")
FINISHED = Completed(name="Skipped", message="window 8 [window_finished] this neuron has finished it")


def runs(*states):
    """Runs with these states, the newest first."""
    windows = reversed(range(len(states)))
    return [
        FlowRun(flow_id=uuid4(), name=f"default window {window}", state=state)
        for window, state in zip(windows, states, strict=True)
    ]


def late(neuron):
    return REMEDIES[Alert.LATE].format(neuron=neuron)


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (UNTRAINED, f"published nothing in 3 windows in a row [no_time_left]: {late('default')}"),
        (UNSCORED, f"scored nothing in 3 windows in a row [dataset_missing]: {REMEDIES[Alert.WINDOW_MISSED]}"),
        (BROKEN, f"took no part in 3 windows in a row [access_denied]: {REMEDIES[Alert.KEY_REFUSED]}"),
        (BEHIND, f"took no part in 3 windows in a row [decision_missing]: {REMEDIES[Alert.BEHIND]}"),
        (PASSED, f"took no part in 3 windows in a row [window_passed]: {REMEDIES[Alert.WINDOW_MISSED]}"),
        (Crashed(message="killed"), f"took no part in 3 windows in a row: {CRASHED}"),
    ],
)
def test_a_line_names_neuron_count_reason_and_remedy(state, line):
    streak = streak_of("default", runs(state, state, state, DONE))
    assert streak is not None
    assert streak.line == f"neuron 'default' {line}"
    assert "\n" not in streak.line


def test_a_streak_ends_at_a_window_that_went_well():
    for states, windows in (
        ((UNTRAINED,) * 2, None),
        ((UNTRAINED, UNTRAINED, DONE, UNTRAINED), None),
        ((DONE, *(UNTRAINED,) * 5), None),
        ((UNTRAINED, BEHIND, BROKEN), 3),
        ((UNTRAINED,) * 7, 7),
    ):
        streak = streak_of("default", runs(*states))
        assert (None if streak is None else streak.windows) == windows


def test_what_is_no_window_of_its_own_neither_counts_nor_ends_a_streak():
    """A run that is under way, was cancelled, waits for another try or found its window finished; a second run."""
    ignored = (Running(), Cancelled(), AwaitingRetry(), FINISHED, None)
    streak = streak_of("default", runs(*ignored, UNTRAINED, FINISHED, UNTRAINED, UNTRAINED))
    assert streak is not None
    assert streak.windows == 3
    twice = [run for run in runs(UNTRAINED, UNTRAINED) for _ in range(2)]
    assert streak_of("default", twice) is None


def test_every_state_that_says_a_duty_was_missed_has_words():
    for missed in Missed:
        state = Failed(name=missed.value, message=f"window 8: not so [{Reason.NO_TIME_LEFT}]")
        streak = streak_of("default", runs(*(state,) * FIRST_TOLD))
        assert streak is not None
        assert "took no part" not in streak.line


@pytest.fixture
def client(prefect_api):
    with prefect_api.client() as client:
        yield client


class Windows:
    def __init__(self, client):
        self.neuron = f"streaky-{uuid4().hex[:8]}"
        self._client, self._window = client, 0
        self._flow = flow(name="miner-window")(lambda: None)

    def end(self, *states):
        for state in states:
            self._window += 1
            name, tags = f"{self.neuron} window {self._window}", [f"neuron:{self.neuron}"]
            run = self._client.create_flow_run(self._flow, name=name, tags=tags)
            for each in (Running(), state):
                own = each.model_copy(update={"id": uuid4(), "timestamp": now()})
                self._client.set_flow_run_state(run.id, own, force=True)


@pytest.fixture
def windows(client):
    return Windows(client)


def test_a_streak_is_told_once_and_again_when_it_has_doubled(windows):
    told: list[str] = []
    teller = Teller([windows.neuron], told.append)
    counts = []
    for state in (DONE, *[UNTRAINED] * 13, DONE, *[UNSCORED] * 4):
        windows.end(state)
        teller.look()
        counts.append(len(told))
    assert counts == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4]
    what = f"neuron {windows.neuron!r} published nothing"
    assert [line.partition(" in a row")[0] for line in told] == [
        f"{what} in 3 windows",
        f"{what} in 6 windows",
        f"{what} in 12 windows",
        f"neuron {windows.neuron!r} scored nothing in 3 windows",
    ]


def test_an_outage_of_the_server_and_its_refusals_are_outlived(prefect_api, windows, monkeypatch):
    monkeypatch.setattr(status, "LOOK_SECONDS", 0.0)
    windows.end(*[UNTRAINED] * 3)
    told: list[str] = []

    class Unlucky(Teller):
        looks = 0

        def look(self):
            self.looks += 1
            if self.looks == 1:
                raise TimeoutError("the server does not answer")
            if self.looks == 2:
                raise ValueError("the server refuses it")
            super().look()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        status._tell(Unlucky([windows.neuron], told.append), Address(prefect_api.server.api_url))
    assert len(told) == 1
    assert late(windows.neuron) in told[0]


def test_status_tells_of_a_streak_that_goes_on(prefect_api, windows, capsys):
    windows.end(DONE, *[UNTRAINED] * 7)
    found = _found([], [], Address(prefect_api.server.api_url), [windows.neuron], asks=True)
    (line,) = found["warnings"]
    assert line.startswith(f"neuron {windows.neuron!r} published nothing in 7 windows in a row [no_time_left]: ")
    assert len(found["neurons"][windows.neuron]) == NUM_WINDOWS
    process = {"name": "window clock", "pid": 1, "log": "log"}
    show_network_status(found | {"runs": True, "processes": [process]}, Console(width=400))
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("end", "last"), [(False, "'x' missed"), (KeyboardInterrupt, "`make down`")])
def test_up_that_follows_stays_until_the_network_is_down_or_ctrl_c(end, last, monkeypatch, capsys):
    class Network:
        plan, address = SimpleNamespace(brought_up=["default"]), "there"
        is_running = mock.PropertyMock(side_effect=[True, end])

    def tell(neurons, address, say):
        say(f"neuron 'x' missed [no_time_left]: {neurons} {address}")

    monkeypatch.setattr(command, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(command, "tell_of_streaks", tell)
    command.follow(Network())  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "neuron 'x' missed [no_time_left]: ['default'] there" in out.splitlines()
    assert last in out.splitlines()[-1]
