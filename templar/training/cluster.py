"""Several devices that train as one: a group of processes under torch's launcher, on one host or several.

Rank 0 holds the neuron, and `ClusterTrainer` is its trainer. The other ranks `follow`: between two trainings they look
into the launcher's store for the next one, so no collective waits for a window. The header of a training is JSON;
tensors travel one by one, by collectives. Nothing is unpickled.

The group lives and ends as one. A rank that dies, has no memory, or stays away from a collective for `PATIENCE_SECONDS`
ends one call of `learn` with a reason, and then the group with its neuron's process: what keeps the neuron running
starts both again.
"""

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from threading import Event

import psutil
import torch
from pydantic import TypeAdapter
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from templar.errors import PermanentError, Reason
from templar.hparams import Model, TrainerSettings, Training
from templar.interrupt import StoppedError, check_stop, end_soon
from templar.resources import given_threads
from templar.store.files import replacing
from templar.tensorfile import Zeros
from templar.training.device import bad_environment, choose_device
from templar.training.group import ReplicatedGroup, ShardedGroup
from templar.training.memory import MicroBatches
from templar.training.model import parameter_shapes
from templar.training.optimizers import OptimizerState
from templar.training.train import FOREVER, Trainer, TrainProgress, TrainResult, check_inputs

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 120.0  # the longest that a rank waits for the others in a collective
IN_STEP = frozenset({Reason.NON_FINITE_LOSS, Reason.NON_FINITE_UPDATE, Reason.NO_TIME_LEFT})
"""Failures that all ranks come to at the same step, and that the group survives."""
MICRO_BATCH_FILE = "micro_batch.json"
"""In the neuron's folder: the size that is left after out-of-memory, where the operator has not set one."""
_POLL_SECONDS = 0.05
_CHARACTERS = 200  # of an error of torch, the first so many are told


@dataclass(frozen=True)
class Setup:
    """The model that every rank builds."""

    model: Model
    settings: TrainerSettings  # of one rank; a CUDA device has no number in it
    sharded: bool
    patience_seconds: float


@dataclass(frozen=True)
class Job:
    """The header of one training; parameters, sequences and moments follow by collectives."""

    setup: Setup
    shape: tuple[int, int]  # of the sequences
    training: Training
    micro_batch: int
    outer_steps: int
    optimizer_steps: int


@dataclass(frozen=True)
class Failed:
    """A rank is not in step with the others any more."""

    reason: Reason
    message: str


_JOB, _FAILED = TypeAdapter(Job), TypeAdapter(Failed)


class GroupEndedError(PermanentError):
    """A training failed, and the group ends with this process: this window is not trained again."""


class Member:
    """This process's place in its group. Its ranks meet in a private folder, those of several hosts at a rendezvous."""

    def __init__(self, folder: Path | None) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        interface = interface_to(f"{address}:{port}", is_own=False)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # an operator may know a better one
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # else it takes every name that begins so
        self.store: Store = (
            next(rendezvous("env://"))[0] if folder is None else FileStore(str(folder / "store"), self.size)
        )
        self._number = 0  # of the next job
        self._setup: Setup | None = None
        self._trainer: Trainer | None = None

    def wait_for_others(self, keep_going: Callable[[], bool]) -> None:
        """Wait until all other ranks have started; `no_time_left` if that takes too long."""
        while not all(self.store.check([f"ready/{rank}"]) for rank in range(1, self.size)):
            check_stop()
            if not keep_going():
                problem = "the other ranks were not ready before the window's training ended: see the worker's log"
                raise PermanentError(Reason.NO_TIME_LEFT, problem)
            time.sleep(_POLL_SECONDS)

    def give(self, job: Job) -> None:
        """Let the other ranks begin a job, as rank 0."""
        self.store.set(f"job/{self._number}", _JOB.dump_json(job).decode())
        self._number += 1

    def follow(self, stopping: Event) -> int:
        """Do each job that rank 0 sets, as another rank; the exit code of this process."""
        for slow in ("torch.distributed.fsdp", "transformers.models.llama.modeling_llama"):  # nobody waits for it later
            import_module(slow)
        self.store.set(f"ready/{self.rank}", "")
        while (job := self._next_job(stopping)) is not None:
            zeros = Zeros(parameter_shapes(job.setup.model))  # of these only names and shapes count
            optimizer = OptimizerState(job.optimizer_steps, zeros, zeros)
            try:
                self.work(job, zeros, torch.empty(job.shape, dtype=torch.int32), optimizer, lambda: True)
            except StoppedError as stop:
                log.info("%s", stop)
            except Exception as error:  # rank 0 says why
                failed = failure_of(error)
                if failed.reason not in IN_STEP:
                    log.exception("rank %d has failed", self.rank)
                    with suppress(RuntimeError):  # the store has ended with its host
                        self.store.set(f"failed/{self.rank}", _FAILED.dump_json(failed).decode())
                    return 1
                log.info("%s", failed.message)
        return 0

    def failures(self) -> list[tuple[int, Failed]]:
        """What other ranks failed with, by rank."""
        with suppress(RuntimeError):
            there = [rank for rank in range(1, self.size) if self.store.check([f"failed/{rank}"])]
            return [(rank, _FAILED.validate_json(self.store.get(f"failed/{rank}"))) for rank in there]
        return []

    def end_group(self) -> None:
        """End the other ranks of this host; torch's launcher then ends this process, with SIGTERM."""
        end_soon()
        others = [each for each in psutil.Process(os.getppid()).children() if each.pid != os.getpid()]
        for each in others:
            with suppress(psutil.Error):
                each.kill()
        if not others:
            os.kill(os.getpid(), signal.SIGTERM)

    def dismiss(self) -> None:
        """Let the other ranks end."""
        self.store.set("end", "")

    def _next_job(self, stopping: Event) -> Job | None:
        key = f"job/{self._number}"
        while not self.store.check([key]):
            if stopping.wait(_POLL_SECONDS) or self.store.check(["end"]):
                return None
        self._number += 1
        return _JOB.validate_json(self.store.get(key))

    def work(
        self,
        job: Job,
        params: Mapping[str, Tensor],
        sequences: Tensor,
        optimizer: OptimizerState,
        keep_going: Callable[[], bool],
        *,
        begin: Mapping[str, Tensor] | None = None,
        seconds_left: Callable[[], float] = lambda: FOREVER,
    ) -> TrainResult:
        """Train with all other ranks, which call the same; the tensors that count are those of rank 0."""
        # 1. What rank 0 has.
        trainer = self._built(job.setup)
        settings = trainer.settings.model_copy(update={"micro_batch": job.micro_batch})
        trainer.micro_batches = MicroBatches(trainer.model, settings, trainer.device, ranks=self.size)
        distributed.broadcast(sequences, src=0)
        # 2. Train, all in step.
        result, failure = None, None
        try:
            result = trainer.learn(
                params,
                sequences,
                training=job.training,
                outer_steps=job.outer_steps,
                optimizer=optimizer,
                keep_going=keep_going,
                begin=begin,
                seconds_left=seconds_left,
            )
        except PermanentError as error:
            if error.reason not in IN_STEP:
                raise
            failure = error
        # 3. Nobody is done before all are; the figures have the memory of the largest rank.
        peak = torch.tensor(trainer.device.peak_bytes())
        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX)
        if result is None or result.figures is None:
            raise failure or TypeError("training has figures")
        return replace(result, figures=replace(result.figures, peak_bytes=int(peak)))

    def _built(self, setup: Setup) -> Trainer:
        """The trainer of this rank; the first one joins the group."""
        if self._trainer is None or setup != self._setup:
            is_cuda, settings = setup.settings.device != "cpu", setup.settings
            place = f"cuda:{os.environ['LOCAL_RANK']}" if is_cuda else "cpu"
            if is_cuda:
                torch.cuda.set_device(place)
            if not distributed.is_initialized():
                distributed.init_process_group(
                    "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                    store=PrefixStore("group", self.store),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=timedelta(seconds=setup.patience_seconds),
                )
            group = (ShardedGroup if setup.sharded else ReplicatedGroup)(setup.model, settings.hosts)
            threads = max(1, (settings.threads or given_threads()) // self.host_ranks)
            own = settings.model_copy(update={"device": place, "threads": threads})
            self._trainer, self._setup = Trainer(setup.model, own, group), setup
        return self._trainer


_here: list[Member] = []  # the place of this process, if it is rank 0 of a group


def enter(folder: Path | None) -> Member:
    """Be rank 0 of a group: from now on `open_trainer` trains on all ranks."""
    _here[:] = [Member(folder)]
    return _here[0]


def open_trainer(model: Model, settings: TrainerSettings, folder: Path) -> "Trainer | ClusterTrainer":
    """The trainer for the number of ranks that the settings ask for; `folder` is the neuron's.

    `bad_environment` if the machine has not so many devices, or this process is not rank 0 of so many ranks.
    """
    ranks = rank_count(settings) * settings.hosts
    if ranks == 1:
        return Trainer(model, settings)
    if not _here or _here[0].size != ranks:
        alone = "this process is alone" if not _here else f"its group has {_here[0].size}"
        raise bad_environment(
            f"TEMPLAR_RANKS and TEMPLAR_HOSTS ask for {ranks} ranks, and {alone}: run the neuron with `templar neuron "
            "start`, which starts its worker under torch's launcher"
        )
    return ClusterTrainer(model, settings, _here[0], folder)


def rank_count(settings: TrainerSettings) -> int:
    """The number of ranks of a host; `auto` takes one per CUDA device, and one on a CPU.

    `bad_environment` if there are fewer CUDA devices, or the settings name one of them.
    """
    number = torch.cuda.device_count() if settings.device != "cpu" and torch.cuda.is_available() else 0
    for name, wanted in (("RANKS", settings.ranks), ("HOSTS", settings.hosts)):
        if wanted not in ("auto", 1) and ":" in settings.device:
            raise bad_environment(f"TEMPLAR_{name} is {wanted}, and TEMPLAR_DEVICE {settings.device}: set cuda")
    if settings.ranks == "auto":
        return 1 if ":" in settings.device else max(1, number)
    if settings.ranks > 1 and settings.ranks > number and (number or settings.device == "cuda"):
        raise bad_environment(
            f"TEMPLAR_RANKS is {settings.ranks}, and this machine has {number} CUDA devices: set auto, a number up to "
            f"{max(1, number)}, or TEMPLAR_DEVICE=cpu"
        )
    return settings.ranks


def interface_to(rendezvous: str, *, is_own: bool) -> str:
    """The network interface on which this host reaches a rendezvous, ADDRESS:PORT.

    `bad_environment` if there is no way to it, or it should be this host's own and is not.
    """
    name, _, port = rendezvous.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        try:
            address = socket.gethostbyname(name)
            probe.connect((address, int(port)))
        except (OSError, OverflowError) as error:
            raise bad_environment(f"there is no way to the rendezvous {rendezvous}: {error}") from None
        here = str(probe.getsockname()[0])
    if is_own and here != address:
        raise bad_environment(f"TEMPLAR_RENDEZVOUS {rendezvous} is not on this host: set one, as 10.0.0.1:29500")
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == here for each in addresses):
            return interface
    raise bad_environment(f"no network interface has the address {here}, which leads to {rendezvous}")


class ClusterTrainer:
    """As `Trainer`, on all ranks of the group that this process is rank 0 of."""

    def __init__(self, model: Model, settings: TrainerSettings, member: Member, folder: Path) -> None:
        self.model, self.device, self._member = model, choose_device(settings), member
        self.micro_batches = MicroBatches(model, settings, self.device, ranks=member.size)
        self._hosts, self._adaptive = settings.hosts, settings.micro_batch == "auto"
        place, precision = self.device.place.type, self.device.precision
        self._rank_settings = settings.model_copy(
            update={"ranks": 1, "device": place, "precision": precision, "repeatable": False}
        )
        self._setup: Setup | None = None

        # Sizes that an earlier process found. What is unreadable is found again.
        self._note, self._scene = folder / MICRO_BATCH_FILE, f"{member.size} ranks on {self.device.name}"
        if self._adaptive:
            with suppress(OSError, ValueError, TypeError, KeyError):
                note = json.loads(self._note.read_bytes())
                if note["scene"] == self._scene:
                    self.micro_batches.found |= {(share, length): size for share, length, size in note["sizes"]}
        else:
            self._note.unlink(missing_ok=True)

    def check(self, training: Training, *, length: int) -> None:
        """As `Trainer.check`."""
        self.micro_batches.check(training, length)
        self._setup_for(length)

    def learn(
        self,
        params: Mapping[str, Tensor],
        sequences: Tensor,
        *,
        training: Training,
        outer_steps: int,
        optimizer: OptimizerState,
        keep_going: Callable[[], bool],
        progress: TrainProgress | None = None,
        begin: Mapping[str, Tensor] | None = None,
        seconds_left: Callable[[], float] = lambda: FOREVER,
    ) -> TrainResult:
        """As `Trainer.learn`, without progress; GroupEndedError: `out_of_memory`, `trainer_failed`."""
        del progress
        check_inputs(self.model, params, sequences)  # before the other ranks begin
        length = sequences.shape[1]
        setup, size = self._setup_for(length), self.micro_batches.size(training, length)
        job = Job(setup, (len(sequences), length), training, size, outer_steps, optimizer.num_steps)
        self._member.wait_for_others(keep_going)
        try:
            self._member.give(job)
            words = sequences.to(torch.int32).contiguous()
            result = self._member.work(
                job, params, words, optimizer, keep_going, begin=begin, seconds_left=seconds_left
            )
        except Exception as error:
            if isinstance(error, PermanentError) and error.reason in IN_STEP:
                raise
            failed = self._failure(error, training, length)
            self._member.end_group()
            raise GroupEndedError(failed.reason, failed.message) from error
        if result.figures is None:
            raise TypeError("training has figures")
        where = "" if self._hosts == 1 else f" on {self._hosts} hosts"
        ranks = f"{self._member.size} ranks{where}, {'sharded' if setup.sharded else 'replicated'}"
        why = "; ".join(part for part in (self.device.why, ranks) if part)
        return replace(result, figures=replace(result.figures, choice=why))

    def _setup_for(self, length: int) -> Setup:
        """The model that the ranks build: decided once, while they have none yet."""
        if self._setup is None:
            self._setup = Setup(self.model, self._rank_settings, self.micro_batches.sharded(length), PATIENCE_SECONDS)
        return self._setup

    def _failure(self, error: Exception, training: Training, length: int) -> Failed:
        """The reason for which the group ends: the first that is not just the end of another rank."""
        found = [(0, failure_of(error)), *self._member.failures()]
        rank, failed = next((each for each in found if each[1].reason is Reason.OUT_OF_MEMORY), found[0])
        if failed.reason is not Reason.OUT_OF_MEMORY:
            said = "; ".join(f"rank {rank}: {failed.message}" for rank, failed in found)
            return Failed(
                Reason.TRAINER_FAILED,
                f"{said}: nothing is published in this window, and the neuron's process starts again; if that repeats, "
                "see `templar neuron logs --process worker`, and train without TEMPLAR_RANKS and TEMPLAR_HOSTS",
            )
        if not self._adaptive:
            return replace(failed, message=f"rank {rank}: {failed.message}")
        size = self.micro_batches.size(training, length)
        try:
            self.micro_batches.halve(training, length, error)
        except PermanentError as refusal:  # there is no smaller one
            return Failed(refusal.reason, refusal.message)
        sizes = [(*key, size) for key, size in self.micro_batches.found.items()]
        with replacing(self._note) as part:
            part.write(json.dumps({"scene": self._scene, "sizes": sizes}).encode())
        problem = f"the ranks ran out of memory with micro-batches of {size}: nothing is published in this window"
        smaller = self.micro_batches.size(training, length)
        return Failed(Reason.OUT_OF_MEMORY, f"{problem}, and the next one takes {smaller}")


def failure_of(error: BaseException) -> Failed:
    """The reason of an error, and what says most of it."""
    cause = error.__cause__ if isinstance(error, PermanentError) and error.reason is Reason.TRAINER_FAILED else None
    if isinstance(error, PermanentError) and cause is None:
        return Failed(error.reason, error.message)
    first_line = str(cause or error).strip().partition("\n")[0][:_CHARACTERS]
    return Failed(Reason.TRAINER_FAILED, f"{type(cause or error).__name__}: {first_line}")


def main() -> int:
    """Follow rank 0 until it ends: `python -m templar.training.cluster [FOLDER]`, under torch's launcher."""
    form = f"%(asctime)s rank {os.environ['RANK']} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    stopping = Event()
    for signum in (signal.SIGTERM, signal.SIGINT):  # a training under way goes on as long as rank 0 does
        signal.signal(signum, lambda *_: stopping.set())
    return Member(Path(sys.argv[1]) if len(sys.argv) > 1 else None).follow(stopping)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads of a broken group may wait for ever
