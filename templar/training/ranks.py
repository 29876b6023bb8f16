"""The trainer of several devices of one host: a group of processes under torch's launcher, warm between windows.

The launcher is a child process, for it replaces signal handlers. Ranks are controlled over a Unix-domain socket and end
when it closes, so none outlives this process. A rank that dies, runs out of memory or does not answer ends one call of
`learn` with a reason; the group is killed, and another one starts at once, so that it is warm at the next call.
"""

import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from templar.errors import PermanentError, Reason
from templar.hparams import Model, TrainerSettings, Training
from templar.interrupt import check_stop
from templar.tensorfile import write_tensors
from templar.training import jobs
from templar.training.device import MicroBatches, choose_device, num_parameters
from templar.training.jobs import Done, Failed, Hello, Job, JobFolder, Message, Ready, Setup, Stop
from templar.training.model import check_shapes, parameter_shapes
from templar.training.train import OptimizerState, Trainer, TrainProgress, TrainResult

log = logging.getLogger(__name__)

RANK_MODULE = "templar.training.rank"
START_SECONDS = 600.0
"""How long a worker that needs the ranks waits until they have met."""
WATCHDOG_SECONDS = 60.0
"""How long after the deadline the ranks may take to answer, besides the time for the files of the result."""
FILE_BYTES_PER_SECOND = 100e6
"""A disk writes at least so fast: update and two moments take 12 bytes per parameter."""
IN_STEP = frozenset({Reason.NON_FINITE_LOSS, Reason.NON_FINITE_UPDATE, Reason.NO_TIME_LEFT})
"""Failures after which all ranks have answered, and the group goes on."""
_POLL_SECONDS = 0.05
_SEND_SECONDS = 30.0
_END_SECONDS = 10.0
"""A killed process is gone after milliseconds, unless the kernel is busy with it."""
_LONGEST_SOCKET_PATH = 100
_ENVIRONMENT = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "LANG",
    "CUDA_VISIBLE_DEVICES",
    "VIRTUAL_ENV",
)
_ENVIRONMENT_PREFIXES = ("CUDA_", "NCCL_", "TORCH", "NVIDIA_", "LC_")
"""What ranks inherit. They need no keys of stores and wallets, so they get none."""


def open_trainer(model: Model, settings: TrainerSettings, folder: Path) -> "Trainer | RankedTrainer":
    """The trainer for the number of ranks that the settings ask for.

    Args:
        model: The model.
        settings: What the operator chose.
        folder: A private folder for the tensors of several ranks; its content is removed.

    Raises:
        PermanentError: `bad_environment`; the machine has no such device, or not so many.
    """
    if rank_count(settings) == 1:
        return Trainer(model, settings)
    return RankedTrainer(model, settings, folder)


def rank_count(settings: TrainerSettings) -> int:
    """The number of ranks; `auto` takes one per CUDA device, and one on a CPU.

    Raises:
        PermanentError: `bad_environment`; there are fewer CUDA devices, or the settings name one of them.
    """
    number = torch.cuda.device_count() if settings.device != "cpu" and torch.cuda.is_available() else 0
    if settings.ranks == "auto":
        return 1 if ":" in settings.device else max(1, number)
    if settings.ranks > 1 and ":" in settings.device:
        raise _bad(f"TEMPLAR_RANKS is {settings.ranks}, and TEMPLAR_DEVICE {settings.device} is one device: set cuda")
    if settings.ranks > 1 and settings.ranks > number and (number or settings.device == "cuda"):
        raise _bad(
            f"TEMPLAR_RANKS is {settings.ranks}, and this machine has {number} CUDA devices: set auto, a number up to "
            f"{max(1, number)}, or TEMPLAR_DEVICE=cpu"
        )
    return settings.ranks


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
            PermanentError: `bad_environment`; the machine has no such device or precision, or not so many.
        """
        # 1. What one rank runs on.
        self.model, self.size, self.folder = model, rank_count(settings), folder
        self.device = choose_device(settings)
        threads = max(1, self.device.threads // self.size)
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
        self._adaptive = settings.micro_batch == "auto"
        self._group: RankGroup | None = None
        self._watchdog_seconds = watchdog_seconds + 12 * num_parameters(model) / FILE_BYTES_PER_SECOND
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
            PermanentError: As `Trainer.learn`, and `trainer_failed`: a rank or the launcher died or did not answer.
            StoppedError: A stop was asked for.
        """
        del progress
        if len(sequences) == 0:
            raise ValueError("there are no sequences to train on")
        check_shapes(parameter_shapes(self.model), params)
        length = sequences.shape[1]
        size = self.micro_batches.size(training, length)
        lent = jobs.JobFolder(self._tensors)
        folder = lent.path
        try:
            # 1. The processes; they may be warm.
            group = self._ready_group(length, keep_going)
            # 2. The files that they read.
            write_tensors(folder / jobs.PARAMETERS_FILE, params)
            save_file({jobs.SEQUENCES: sequences.contiguous()}, folder / jobs.SEQUENCES_FILE)
            job = Job(
                folder=str(folder),
                training=training,
                micro_batch=size,
                outer_steps=outer_steps,
                optimizer_steps=optimizer.num_steps,
                exp_avg=jobs.lend(optimizer.exp_avg, folder / "before_exp_avg.safetensors"),
                exp_avg_sq=jobs.lend(optimizer.exp_avg_sq, folder / "before_exp_avg_sq.safetensors"),
            )
            # 3. Train.
            done = group.work(job, keep_going)
        except BaseException as error:
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
        return RankGroup(
            Setup(self.model, self._rank_settings, self.micro_batches.sharded(length), str(self._tensors)),
            self.size,
            log_path=self.folder / "ranks.log",
            watchdog_seconds=self._watchdog_seconds,
            module=self._rank_module,
        )

    def _after_failure(self, error: BaseException, training: Training, length: int) -> None:
        # 1. After some failures all processes go on; otherwise none does.
        reason = error.reason if isinstance(error, PermanentError) else None
        if reason in IN_STEP:
            return
        had_met = self._group is not None and self._group.has_met
        self._end_group()
        # 2. The next ones start while the window ends. Those that never met would only fail again.
        if reason is not None and had_met:
            try:
                self._group = self._start_group(length)
            except OSError as refusal:  # the reason of this window stays
                log.warning("other ranks cannot be started yet, the next window tries again: %s", refusal)
        if reason is Reason.OUT_OF_MEMORY and self._adaptive:
            self.micro_batches.halve(training, length, error)

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
        kind = "sharded" if self._group is not None and self._group.setup.sharded else "replicated"
        why = "; ".join(part for part in (self.device.why, f"{self.size} ranks, {kind}") if part)
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


class RankGroup:
    """The launcher, its ranks and the socket that they are connected to."""

    def __init__(self, setup: Setup, size: int, *, log_path: Path, watchdog_seconds: float, module: str) -> None:
        self.setup, self._size, self._log_path, self._watchdog_seconds = setup, size, log_path, watchdog_seconds
        self.processes: dict[int, psutil.Process] = {}
        """The ranks that have connected."""
        self._ended_log = log_path.with_name("ranks-ended.log")
        self._connections: dict[int, socket.socket] = {}
        self._ready: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._place = _short_folder()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._place / "s"))
        self._listener.listen(size)
        setup.write(self._place)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._give_up = float("inf")
        self.launcher = self._launch(module)

    def is_alive(self) -> bool:
        """Whether the launcher and all ranks that have connected live."""
        if self.launcher.poll() is not None:
            return False
        try:
            return all(process.status() != psutil.STATUS_ZOMBIE for process in self.processes.values())
        except psutil.Error:
            return False

    @property
    def has_met(self) -> bool:
        """Whether all ranks are ready for jobs."""
        return len(self._ready) == self._size

    def wait_ready(self, keep_going: Callable[[], bool]) -> None:
        """Wait until all ranks have met.

        Raises:
            PermanentError: `no_time_left`; they go on meeting. `trainer_failed`.
        """
        self._give_up = min(self._give_up, time.monotonic() + START_SECONDS)
        while True:
            if not keep_going():
                raise PermanentError(Reason.NO_TIME_LEFT, "the ranks were not ready before the window's training ended")
            if self.has_met:
                return
            if time.monotonic() > self._give_up:
                raise self._failure(f"{len(self._ready)} of {self._size} ranks were ready after {START_SECONDS:.0f} s")
            for number, message in self._messages():
                if isinstance(message, Failed):
                    raise PermanentError(message.reason, f"rank {number}: {message.message}")
                if isinstance(message, Ready):
                    self._ready.add(number)

    def work(self, job: Job, keep_going: Callable[[], bool]) -> Done:
        """Let all ranks do a job, and return what the first one says.

        Raises:
            PermanentError: What a rank failed with; `trainer_failed`.
        """
        # 1. All get the job.
        for number in self._connections:
            self._send(number, job)
        # 2. All answer. A failure that one rank may have had alone is not waited on.
        answers: dict[int, Done | Failed] = {}
        give_up = float("inf")
        while len(answers) < self._size:
            if give_up == float("inf") and not keep_going():
                self._send(0, Stop())
                give_up = time.monotonic() + self._watchdog_seconds
            if time.monotonic() > give_up:
                silent = sorted(self._connections.keys() - answers.keys())
                raise self._failure(f"ranks {silent} did not answer {self._watchdog_seconds:.0f} s after the deadline")
            for number, message in self._messages():
                if isinstance(message, Failed) and message.reason not in IN_STEP:
                    raise self._error_of(number, message)
                if isinstance(message, Done | Failed):
                    answers[number] = message
        # 3. They must agree.
        first = answers[0]
        for number, found in sorted(answers.items()):
            if isinstance(found, Failed):
                raise self._error_of(number, found)
            if isinstance(first, Done) and found.num_steps != first.num_steps:
                raise self._failure(f"rank {number} took {found.num_steps} steps, and rank 0 took {first.num_steps}")
        if not isinstance(first, Done):  # it was raised above
            raise TypeError("rank 0 failed without an error")
        return first

    def kill(self) -> None:
        """End all processes at once."""
        # 1. The launcher, which would wait for its ranks; then those that have connected or not.
        victims = list(self.processes.values())
        with suppress(psutil.Error):
            victims += psutil.Process(self.launcher.pid).children(recursive=True)
        if self.launcher.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.launcher.pid, signal.SIGKILL)
        for victim in victims:  # each rank leads a session of its own
            with suppress(psutil.Error):
                victim.kill()
        self.launcher.wait()
        psutil.wait_procs(victims, timeout=_END_SECONDS)
        # 2. The log, for the next ones write their own; and the socket.
        with suppress(OSError):
            self._log_path.replace(self._ended_log)
        self._selector.close()
        for connection in (self._listener, *self._connections.values()):
            connection.close()
        shutil.rmtree(self._place, ignore_errors=True)

    def _launch(self, module: str) -> "subprocess.Popen[bytes]":
        given = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
        }
        package = str(Path(__file__).resolve().parents[2])
        given["PYTHONPATH"] = os.pathsep.join(part for part in (package, given.get("PYTHONPATH", "")) if part)
        given["OMP_NUM_THREADS"] = str(self.setup.settings.threads)
        if sys.platform == "linux":  # ranks of one host meet on its loopback interface
            given |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        # The rendezvous is a file in the private folder, for torch unpickles what it finds there; it needs no port.
        given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(self._size)),
            *("--max-restarts", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", str(self._place / "rendezvous")),
            *("--rdzv-conf", "store_type=file", "--rdzv-id", secrets.token_hex(8), "--local-addr", "127.0.0.1"),
            *("--log-dir", str(self._place / "logs")),  # else it leaves a folder behind
            *("-m", module, str(self._place / "s")),
        ]
        with self._log_path.open("wb") as output:
            return subprocess.Popen(  # noqa: S603 - the command is this program's own
                command,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is the worker's to handle, and all of this is killed as one
            )

    def _messages(self) -> list[tuple[int, Message]]:
        """What ranks say within a moment.

        Raises:
            PermanentError: `trainer_failed`; one of the processes is gone.
            StoppedError: A stop was asked for.
        """
        check_stop()
        if self.launcher.poll() is not None:
            raise self._failure(f"the launcher ended with status {self.launcher.returncode}")
        found: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self._listener:
                self._accept()
                continue
            try:
                found.append((key.data, jobs.receive(self._connections[key.data])))
            except (OSError, ValueError) as error:
                raise self._failure(f"rank {key.data} is gone: {error}") from None
        return found

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SEND_SECONDS)
        try:
            hello = jobs.receive(connection)
            process = psutil.Process(hello.pid if isinstance(hello, Hello) else None)
        except (OSError, ValueError, psutil.Error) as error:
            connection.close()
            raise self._failure(f"a rank could not connect: {error}") from None
        if not isinstance(hello, Hello) or not 0 <= hello.rank < self._size or hello.rank in self._connections:
            connection.close()
            raise self._failure(f"not the first word of a rank: {hello}")
        self.processes[hello.rank] = process
        self._connections[hello.rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, hello.rank)

    def _send(self, number: int, message: Message) -> None:
        try:
            jobs.send(self._connections[number], message)
        except OSError as error:
            raise self._failure(f"rank {number} is gone: {error}") from None

    def _error_of(self, number: int, failed: Failed) -> PermanentError:
        problem = f"rank {number}: {failed.message}"
        is_own = failed.reason is not Reason.TRAINER_FAILED  # else a rank saw the end of another one first
        return PermanentError(failed.reason, problem) if is_own else self._failure(problem)

    def _failure(self, problem: str) -> PermanentError:
        return PermanentError(
            Reason.TRAINER_FAILED,
            f"{problem}: nothing is published in this window, and other ranks start for the next one; the log of these "
            f"is {self._ended_log}",
        )


def _short_folder() -> Path:
    """A new private folder; the path of a socket has at most 108 bytes, and 104 on macOS."""
    folder = Path(tempfile.mkdtemp(prefix="templar-"))
    if len(os.fsencode(folder)) + 2 <= _LONGEST_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="templar-", dir="/tmp"))


def _bad(message: str) -> PermanentError:
    return PermanentError(Reason.BAD_ENVIRONMENT, message)
