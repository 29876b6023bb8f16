"""The trainer of several devices of one host or several: processes that are warm between windows.

A rank that dies, runs out of memory or does not answer ends one call of `learn` with a reason; the group is killed, and
another one starts at once, so that it is warm at the next call. The ranks of other hosts are started there (`templar
neuron lend`), and join the group again when it starts.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from templar.errors import PermanentError, Reason
from templar.hparams import Model, TrainerSettings, Training
from templar.tensorfile import write_tensors
from templar.training import hosts, jobs
from templar.training.device import bad_environment, choose_device, num_parameters
from templar.training.jobs import IN_STEP, Done, Host, Job, JobFolder, Setup
from templar.training.launch import RANK_MODULE, RankGroup
from templar.training.memory import MicroBatches
from templar.training.model import check_shapes, parameter_shapes
from templar.training.train import OptimizerState, Trainer, TrainProgress, TrainResult

log = logging.getLogger(__name__)

WATCHDOG_SECONDS = 60.0
"""The longest after the deadline that the ranks may neither answer nor write more of the result."""


def open_trainer(model: Model, settings: TrainerSettings, folder: Path) -> "Trainer | RankedTrainer":
    """The trainer for the number of ranks that the settings ask for.

    Args:
        model: The model.
        settings: What the operator chose.
        folder: A private folder for the tensors of several ranks; its content is removed.

    Raises:
        PermanentError: `bad_environment`; the machine has no such device, or not so many, or the rendezvous is no
            address of it.
    """
    if rank_count(settings) == settings.hosts == 1:
        return Trainer(model, settings)
    return RankedTrainer(model, settings, folder)


def rank_count(settings: TrainerSettings) -> int:
    """The number of ranks of a host; `auto` takes one per CUDA device, and one on a CPU.

    Raises:
        PermanentError: `bad_environment`; there are fewer CUDA devices, or the settings name one of them.
    """
    number = torch.cuda.device_count() if settings.device != "cpu" and torch.cuda.is_available() else 0
    for name, wanted in (("RANKS", settings.ranks), ("HOSTS", settings.hosts)):
        if wanted not in ("auto", 1) and ":" in settings.device:
            raise bad_environment(
                f"TEMPLAR_{name} is {wanted}, and TEMPLAR_DEVICE {settings.device} is one device: set cuda"
            )
    if settings.ranks == "auto":
        return 1 if ":" in settings.device else max(1, number)
    if settings.ranks > 1 and settings.ranks > number and (number or settings.device == "cuda"):
        raise bad_environment(
            f"TEMPLAR_RANKS is {settings.ranks}, and this machine has {number} CUDA devices: set auto, a number up to "
            f"{max(1, number)}, or TEMPLAR_DEVICE=cpu"
        )
    return settings.ranks


@contextmanager
def _as_trainer_failed(act: str, remedy: str) -> Iterator[None]:
    """Give what the operating system refuses a reason.

    Raises:
        PermanentError: `trainer_failed`.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = f"this machine cannot {act} ({error}): nothing is published in this window; {remedy}"
        raise PermanentError(Reason.TRAINER_FAILED, problem) from error


class RankedTrainer:
    """As `Trainer`, on several ranks, which read and write files.

    The files lie in shared memory, or on the disk if that has too little room, and go with the last tensors of them.
    """

    def __init__(
        self,
        model: Model,
        settings: TrainerSettings,
        folder: Path,
        *,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        rank_module: str = RANK_MODULE,
    ) -> None:
        """Choose the device; processes start with the first call of `check` or `learn`.

        Raises:
            PermanentError: `bad_environment`; the machine has no such device or precision, or not so many, or the
                rendezvous is no address of it.
        """
        # 1. What one rank runs on.
        self.model, self.host_ranks, self.folder = model, rank_count(settings), folder
        self.size = settings.hosts * self.host_ranks
        self.device = choose_device(settings)
        threads = max(1, self.device.threads // self.host_ranks)
        self.micro_batches = MicroBatches(model, settings, self.device, ranks=self.size)
        self._rank_settings = settings.model_copy(
            update={
                "ranks": 1,
                "device": self.device.place.type,
                "threads": threads,
                "precision": self.device.precision,
                "repeatable": False,
            }
        )
        self._interface = hosts.interface_to(settings.rendezvous, is_own=True) if settings.rendezvous else None
        self._adaptive = settings.micro_batch == "auto"
        self._group: RankGroup | None = None
        self._watchdog_seconds = watchdog_seconds
        self._rank_module = rank_module

        # 2. The folder for tensors; what an earlier process left there is of no use.
        self._tensors = jobs.fresh_folder(folder, jobs.LENT_BYTES * num_parameters(model))

    @property
    def group(self) -> "RankGroup | None":
        """The processes, while there are some."""
        return self._group

    def check(self, training: Training, *, length: int) -> None:
        """Whether the settings suit a recipe and sequences of a length, and the model fits the devices.

        If so, the processes start, so that they are warm when the neuron is ready to train.

        Raises:
            PermanentError: `bad_environment`, `out_of_memory`.
        """
        self.micro_batches.check(training, length)
        if self._group is None:
            self._group = self._start_group(length)

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
    ) -> TrainResult:
        """As `Trainer.learn`; `keep_going` is asked 20 times a second, and the ranks stop at the same micro-batch.

        Several ranks keep no progress.

        Raises:
            ValueError: There are no sequences; names or shapes are not the model's.
            PermanentError: As `Trainer.learn`; `trainer_failed`: a rank or the launcher died, cannot join or did not
                answer, or there is no room for its tensors.
            StoppedError: A stop was asked for.
        """
        del progress
        if len(sequences) == 0:
            raise ValueError("there are no sequences to train on")
        check_shapes(parameter_shapes(self.model), params)
        length = sequences.shape[1]
        size = self.micro_batches.size(training, length)
        lent: JobFolder | None = None
        try:
            # 1. The processes; they may be warm.
            with _as_trainer_failed("start the ranks", "let it run fewer other processes"):
                group = self._ready_group(length, keep_going)
            # 2. The files that they read.
            with _as_trainer_failed("write the ranks' tensors", f"make room in {self._tensors}"):
                lent = JobFolder(self._tensors)
                write_tensors(lent.path / jobs.PARAMETERS_FILE, params)
                save_file({jobs.SEQUENCES: sequences.contiguous()}, lent.path / jobs.SEQUENCES_FILE)
                job = Job(
                    folder=str(lent.path),
                    shape=(len(sequences), length),
                    training=training,
                    micro_batch=size,
                    outer_steps=outer_steps,
                    optimizer_steps=optimizer.num_steps,
                    exp_avg=jobs.lend(optimizer.exp_avg, lent.path / "before_exp_avg.safetensors"),
                    exp_avg_sq=jobs.lend(optimizer.exp_avg_sq, lent.path / "before_exp_avg_sq.safetensors"),
                )
            # 3. Train.
            done = group.work(job, keep_going)
        except BaseException as error:
            if lent is not None:
                lent.remove()
            self._after_failure(error, training, length)
            raise
        # 4. What the ranks have read is not needed any more.
        lent.keep_results()
        return self._result(done, lent, training, optimizer)

    def close(self) -> None:
        """End the processes and remove the files."""
        self._end_group()
        shutil.rmtree(self._tensors, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ready_group(self, length: int, keep_going: Callable[[], bool]) -> "RankGroup":
        if self._group is not None and not self._group.is_alive():
            self._end_group()
        if self._group is None:
            self._group = self._start_group(length)
        self._group.wait_ready(keep_going)
        return self._group

    def _start_group(self, length: int) -> "RankGroup":
        settings = self._rank_settings
        setup = Setup(self.model, settings, self.micro_batches.sharded(length), self.host_ranks)
        return RankGroup(
            Host(str(self._tensors), setup, rendezvous=settings.rendezvous),
            self.host_ranks,
            log_path=self.folder / "ranks.log",
            watchdog_seconds=self._watchdog_seconds,
            threads=settings.threads,
            interface=self._interface,
            module=self._rank_module,
        )

    def _after_failure(self, error: BaseException, training: Training, length: int) -> None:
        """See to the processes; raise what says more about a failure than its error does."""
        if not isinstance(error, PermanentError):
            self._end_group()
            return
        if error.reason not in IN_STEP:
            self._replace_group(length)
        if error.reason is Reason.BAD_ENVIRONMENT:  # of a rank; the window goes on
            raise PermanentError(Reason.TRAINER_FAILED, error.message) from error
        if error.reason is Reason.OUT_OF_MEMORY and self._adaptive:
            raise self._with_smaller(training, length, error) from error

    def _replace_group(self, length: int) -> None:
        """End all processes; if they had met, others start while the window ends: else they would only fail again."""
        had_met = self._group is not None and self._group.has_met
        self._end_group()
        if had_met:
            try:
                self._group = self._start_group(length)
            except OSError as refusal:  # the reason of this window stays
                log.warning("other ranks cannot be started yet, the next window tries again: %s", refusal)

    def _with_smaller(self, training: Training, length: int, error: BaseException) -> PermanentError:
        """Take smaller micro-batches from now on; what to say of the window in which the larger ones did not fit."""
        size = self.micro_batches.size(training, length)
        self.micro_batches.halve(training, length, error)
        return PermanentError(
            Reason.OUT_OF_MEMORY,
            f"the ranks ran out of memory with micro-batches of {size}: nothing is published in this window, and the "
            f"next one takes {self.micro_batches.size(training, length)}",
        )

    def _end_group(self) -> None:
        if self._group is not None:
            self._group.kill()
            self._group = None

    def _result(self, done: Done, lent: JobFolder, training: Training, optimizer: OptimizerState) -> TrainResult:
        new_state = None
        if training.recipe == "sparseloco":
            new_state = OptimizerState(
                optimizer.num_steps + done.num_steps, lent.tensors("exp_avg"), lent.tensors("exp_avg_sq")
            )
        setup = self._group.host.setup if self._group is not None else None
        kind = "sharded" if setup is not None and setup.sharded else "replicated"
        where = "" if self.size == self.host_ranks else f" on {self.size // self.host_ranks} hosts"
        why = "; ".join(part for part in (self.device.why, f"{self.size} ranks{where}, {kind}") if part)
        return TrainResult(
            update=lent.tensors("update"),
            optimizer=new_state,
            first_loss=done.first_loss,
            mean_loss=done.mean_loss,
            last_loss=done.last_loss,
            num_steps=done.num_steps,
            num_sequences=done.num_sequences,
            stopped_early=done.stopped_early,
            figures=replace(done.figures, choice=why),
        )
