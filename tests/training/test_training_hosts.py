"""Ranks of several hosts train as one does, strangers change nothing, and a host that is gone costs one call."""

import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.processes import free_port
from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings, load_hparams
from templar.training import hosts, jobs
from templar.training.jobs import Failed, Hello, Message, SecretProof, Setup, Visit, Welcome
from templar.training.memory import estimated_bytes
from templar.training.ranks import RankedTrainer
from templar.training.train import Trainer
from tests.support.errors import raising
from tests.support.ranked_training import (
    ENDLESS,
    HPARAMS,
    MODEL,
    ONE,
    TRAINING,
    assert_close,
    learn,
    processes,
    settings,
    wait_until_gone,
)

pytestmark = pytest.mark.timeout(300)
CLOSED = "the other side has closed the connection"
GUEST = Visit(host=1, local_rank=0, host_ranks=1, program=hosts.program())


def several(rendezvous: str, ranks: int = 1, sharding: str = "replicated") -> TrainerSettings:
    return settings(ranks, sharding, hosts=2, rendezvous=rendezvous)


@pytest.fixture
def rendezvous() -> str:
    return f"127.0.0.1:{free_port()}"


class Lender:
    """`templar neuron lend` on what plays another host."""

    def __init__(self, rendezvous: str, ranks: int, folder: Path) -> None:
        self.folder = folder
        command = ["-m", "deployments", "neuron", "lend", "--rendezvous", rendezvous, "--number", "1"]
        self._command = [sys.executable, *command, "--ranks", str(ranks), "--device", "cpu", "--folder", str(folder)]
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)

    def said(self, text: str) -> None:
        """Read what it prints until a line has this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"it ended and did not say {text!r}")

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, without the launcher."""
        (launcher,) = psutil.Process(self.process.pid).children()
        return launcher.children()


@contextmanager
def lent(rendezvous: str, ranks: int, folder: Path) -> Iterator[Lender]:
    """Devices that are lent, and none of their processes and files in the end."""
    lender = Lender(rendezvous, ranks, folder)
    victims = [psutil.Process(lender.process.pid)]
    try:
        yield lender
        victims += victims[0].children(recursive=True)
        tensors = (folder / "lent" / "tensors").resolve()
        lender.process.send_signal(signal.SIGTERM)
        assert lender.process.wait(timeout=60) == 0
        assert not tensors.exists()
    finally:
        lender.process.kill()
        lender.process.wait()
        wait_until_gone(victims)


@pytest.mark.slow
def test_ranks_of_two_hosts_train_as_one_does_and_a_dead_one_costs_a_call(rendezvous: str, tmp_path: Path) -> None:
    with (
        lent(rendezvous, 1, tmp_path / "lent") as lender,
        closing(RankedTrainer(MODEL, several(rendezvous), tmp_path / "ranks", watchdog_seconds=5)) as trainer,
    ):
        # 1. Four inner steps; then four more, from the moments of the first call.
        first, expected = learn(trainer), learn(Trainer(MODEL, ONE))
        assert_close(first, expected)
        again = learn(trainer, optimizer=first.optimizer)
        assert_close(again, learn(Trainer(MODEL, ONE), optimizer=expected.optimizer))
        assert again.figures is not None
        assert again.figures.choice.endswith("2 ranks on 2 hosts, replicated")
        lender.said("trained 4 steps")
        # 2. Nothing listens elsewhere than at the rendezvous' address.
        both = [*processes(trainer), *lender.ranks()]
        listening = [each for process in both for each in process.net_connections() if each.status == "LISTEN"]
        assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
        # 3. A rank of the other host dies in the middle of a call, and between two calls.
        (victim,) = lender.ranks()
        count = 0

        def keep_going() -> bool:
            nonlocal count
            count += 1
            if count == 10:
                victim.kill()
            return count < 400

        with pytest.raises(PermanentError) as caught:
            learn(trainer, training=ENDLESS, keep_going=keep_going)
        assert caught.value.reason is Reason.TRAINER_FAILED
        assert_close(learn(trainer), expected)
        (victim,) = lender.ranks()
        victim.kill()
        wait_until_gone(processes(trainer)[1:])
        assert_close(learn(trainer), expected)
        # 4. The miner's own ranks die: the other host joins the next group.
        victims = [*processes(trainer), *lender.ranks()]
        victims[1].kill()
        wait_until_gone(victims)
        assert_close(learn(trainer), expected)


@pytest.mark.long
def test_each_of_two_hosts_has_a_sharded_model(rendezvous: str, tmp_path: Path) -> None:
    with (
        lent(rendezvous, 2, tmp_path / "lent"),
        closing(RankedTrainer(MODEL, several(rendezvous, 2, "sharded"), tmp_path / "ranks")) as trainer,
    ):
        first, expected = learn(trainer), learn(Trainer(MODEL, ONE))
        assert_close(first, expected)
        assert_close(
            learn(trainer, optimizer=first.optimizer), learn(Trainer(MODEL, ONE), optimizer=expected.optimizer)
        )


@pytest.mark.long
def test_two_hosts_with_a_device_each_share_one_sharded_model(rendezvous: str, tmp_path: Path) -> None:
    with (
        lent(rendezvous, 1, tmp_path / "lent"),
        closing(RankedTrainer(MODEL, several(rendezvous, 1, "sharded"), tmp_path / "ranks")) as trainer,
    ):
        assert_close(learn(trainer), learn(Trainer(MODEL, ONE)))


@pytest.fixture(scope="module")
def first() -> "First":
    return First()


class First:
    """The first rank of two hosts, without a group."""

    def __init__(self) -> None:
        self.ended: queue.SimpleQueue[Failed] = queue.SimpleQueue()
        self.port = free_port()
        self.setup = Setup(MODEL, several(self.rendezvous), sharded=False, host_ranks=1)
        self.rank = hosts.FirstRank(self.rendezvous, self.setup, self._end)

    @property
    def rendezvous(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, connection: socket.socket, word: Message) -> Message:
        jobs.send(connection, word)
        return jobs.receive(connection)

    def _end(self, failed: Failed) -> NoReturn:
        self.ended.put(failed)
        threading.Event().wait()  # as a process that has ended, it says nothing more
        raise AssertionError


def test_a_stranger_that_sends_slowly_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_VISIT_SECONDS", 0.2)
    first = First()
    with first.connect() as stranger, first.connect() as connection:
        stranger.sendall(b"\0\1")  # of a length in 4 bytes
        assert isinstance(first.ask(connection, GUEST), Welcome)
        assert stranger.recv(1) == b""
        connection.close()
        assert first.ended.get(timeout=60).reason is Reason.TRAINER_FAILED


@given(st.binary(max_size=100) | st.binary(max_size=100).map(lambda data: len(data).to_bytes(4, "little") + data))
def test_a_strangers_bytes_are_refused_and_change_nothing(first: First, data: bytes) -> None:
    with first.connect() as connection:
        connection.sendall(data)
        with suppress(OSError):  # it closed before it had read everything
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    assert first.ended.empty()


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        (Hello(1, 1), "not the first word of a rank: hello"),
        (replace(GUEST, program="another"), "it runs another, and the first rank templar .*: install the same"),
        (replace(GUEST, host=2), "it is on host 2, and there are 2, from 0: set another --number"),
        (replace(GUEST, host=0), "it is on host 0"),
        (replace(GUEST, host_ranks=8), "its host has 8 ranks, and the first one 1: set --ranks to that"),
        (replace(GUEST, local_rank=-1), "its host has 1 ranks"),
    ],
)
def test_a_rank_that_does_not_belong_here_is_told_why(first: First, word: Message, remedy: str) -> None:
    with first.connect() as connection:
        answer = first.ask(connection, word)
    assert isinstance(answer, Failed)
    assert answer.reason is Reason.BAD_ENVIRONMENT
    with pytest.raises(AssertionError, match=remedy):
        raise AssertionError(answer.message)
    assert first.ended.empty()


@pytest.mark.parametrize(
    ("farewell", "expected"),
    [
        (Failed(Reason.OUT_OF_MEMORY, "no room"), Failed(Reason.OUT_OF_MEMORY, "rank 1 on another host: no room")),
        (None, Failed(Reason.TRAINER_FAILED, f"rank 1 on another host is gone: {CLOSED}")),
    ],
)
def test_a_rank_of_another_host_ends_the_group_with_its_reason(farewell: Failed | None, expected: Failed) -> None:
    first = First()
    with first.connect() as connection:
        # 1. It is welcome, and a second one with its number is not.
        assert first.ask(connection, GUEST) == Welcome(first.setup, "127.0.0.1", first.rank.store.port)
        with first.connect() as second:
            answer = first.ask(second, GUEST)
        assert isinstance(answer, Failed)
        assert "host 1 has joined already" in answer.message
        # 2. It fails, or is gone.
        if farewell is not None:
            jobs.send(connection, farewell)
    assert first.ended.get(timeout=60) == expected


class TestSecret:
    """With a secret, neither side trusts another that does not know it."""

    @pytest.fixture(autouse=True)
    def secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(hosts.SECRET, "only these hosts know it")

    def test_a_rank_that_knows_it_is_welcome(self) -> None:
        first = First()
        connection, welcome = hosts._ask(("127.0.0.1", first.port), replace(GUEST, nonce="once"))
        with connection:
            assert welcome == Welcome(first.setup, "127.0.0.1", first.rank.store.port)

    def test_a_rank_that_does_not_know_it_learns_nothing(self) -> None:
        first = First()
        with first.connect() as overheard:
            known = first.ask(overheard, GUEST)
            assert isinstance(known, SecretProof)
            right = hosts._prove("guest", GUEST, known.nonce)
        for wrong in (known, right, replace(right, proof=""), replace(right, proof="\u00e9"), GUEST):
            with first.connect() as connection:
                assert isinstance(first.ask(connection, GUEST), SecretProof)
                answer = first.ask(connection, wrong)
            assert isinstance(answer, Failed)
            assert f"set the same {hosts.SECRET} on all hosts" in answer.message
        assert first.ended.empty()

    @pytest.mark.parametrize("known", ["", "another"])
    def test_a_first_rank_that_does_not_know_it_is_refused(self, known: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def pretend() -> None:
                connection, _ = server.accept()
                with connection:
                    jobs.receive(connection)
                    welcome = Welcome(Setup(MODEL, ONE, sharded=False, host_ranks=1), "127.0.0.1", 1)
                    jobs.send(connection, SecretProof("0" * 64, "nonce") if known else welcome)

            thread = threading.Thread(target=pretend)
            thread.start()
            with raising(PermanentError, Reason.BAD_ENVIRONMENT, f"the first rank has another {hosts.SECRET}"):
                hosts._ask(server.getsockname(), GUEST)
            thread.join()


def test_a_rendezvous_that_cannot_be_one(tmp_path: Path, rendezvous: str) -> None:
    wrong = {
        "192.0.2.1:29500": "is no address of this host|there is no way to",  # documentation's, RFC 5737
        "no-such-host.invalid:29500": "does not know the address",
        "127.0.0.1:0": "a port from 1 to 65535",
        "127.0.0.1:70000": "a port from 1 to 65535",
    }
    for each, problem in wrong.items():
        with pytest.raises(PermanentError, match=problem) as caught:
            RankedTrainer(MODEL, several(each), tmp_path / "ranks")
        assert caught.value.reason is Reason.BAD_ENVIRONMENT
    # A port that is taken is found when the ranks start: the first one says so.
    with (
        socket.create_server(("127.0.0.1", int(rendezvous.rpartition(":")[2]))),
        closing(RankedTrainer(MODEL, several(rendezvous), tmp_path / "ranks")) as trainer,
        pytest.raises(PermanentError, match="cannot be listened on") as caught,
    ):
        learn(trainer)
    assert caught.value.reason is Reason.TRAINER_FAILED, "the window goes on without a payload"


def test_a_miner_whose_other_hosts_are_away_says_how_they_join(rendezvous: str, tmp_path: Path) -> None:
    give_up = time.monotonic() + 1
    with (
        closing(RankedTrainer(MODEL, several(rendezvous), tmp_path / "ranks")) as trainer,
        pytest.raises(PermanentError, match=f"join at {rendezvous}: run `templar neuron lend`") as caught,
    ):
        learn(trainer, keep_going=lambda: time.monotonic() < give_up)
    assert caught.value.reason is Reason.NO_TIME_LEFT


@pytest.mark.parametrize(("ranks", "shards"), [(1, 2), (2, 2), (8, 8)])
def test_a_sharded_model_is_divided_among_the_ranks_of_a_host(
    tmp_path: Path, rendezvous: str, monkeypatch: pytest.MonkeyPatch, ranks: int, shards: int
) -> None:
    training, model = TRAINING.model_copy(update={"batch_size": 16}), load_hparams("1B").model
    with closing(RankedTrainer(model, several(rendezvous, ranks, "auto"), tmp_path / "ranks")) as trainer:
        length = HPARAMS.data.sequence_length
        one, part = (
            estimated_bytes(model, several(rendezvous), trainer.device, micro_batch=1, length=length, shards=each)
            for each in (1, shards)
        )
        free = (one + part) // 2 * ranks
        monkeypatch.setattr("templar.training.device.psutil.virtual_memory", lambda: type("", (), {"available": free}))
        assert trainer.micro_batches.sharded(length)
        small = training.model_copy(update={"micro_batch_size": 1})
        trainer.micro_batches.check(small, length)
        free = (part - 1) * ranks
        with pytest.raises(PermanentError) as caught:
            trainer.micro_batches.check(small, length)
        assert caught.value.reason is Reason.OUT_OF_MEMORY


def test_settings_name_the_rendezvous_and_the_hosts_together() -> None:
    for wrong in ({"hosts": 2}, {"rendezvous": "10.0.0.1:29500"}):
        with pytest.raises(ValueError, match="hosts above 1 and rendezvous belong together"):
            settings(**wrong)
    with pytest.raises(ValueError, match="repeatable training takes one rank"):
        TrainerSettings(hosts=2, rendezvous="10.0.0.1:29500")
