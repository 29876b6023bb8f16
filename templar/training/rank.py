"""One rank of a group that trains together: it takes jobs until the worker, or another host of the group, is gone.

Torch's launcher starts it: `python -m torch.distributed.run ... -m templar.training.rank SOCKET`. The rank ends at once
when the socket closes or nobody listens there, so none outlives the process that has started the launcher, and with the
launcher (on Linux). On the worker's host jobs come over that socket, and on other hosts from the first rank.
"""

import ctypes
import logging
import os
import queue
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from safetensors.torch import load_file

from templar.errors import PermanentError, Reason
from templar.tensorfile import StoredTensors
from templar.training import jobs
from templar.training.group import ReplicatedGroup, join_group
from templar.training.host_files import HostFiles
from templar.training.hosts import Meeting, meet
from templar.training.jobs import Done, Failed, Hello, Host, Job, Ready, Stop
from templar.training.memory import MicroBatches
from templar.training.train import Trainer

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARACTERS = 2000


class Rank:
    """The socket's side of a rank, read by a thread of its own: a rank that waits in a collective still ends."""

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._jobs, self.stopped = path, queue.SimpleQueue[Job](), threading.Event()
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError:  # the worker was killed while this process started
            self._end_after_worker()
        self.send(Hello(number, os.getpid()))
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: jobs.Message) -> None:
        """Tell the worker; if it is gone, the other thread ends this process when it has tidied up."""
        try:
            with self._sending:
                jobs.send(self._socket, message)
        except OSError:
            threading.Event().wait()

    def next(self) -> Job:
        """Wait for what the worker wants next."""
        return self._jobs.get()

    def take(self, job: Job) -> None:
        """Let a job be the next one."""
        self.stopped.clear()
        self._jobs.put(job)

    def end(self, failed: Failed) -> NoReturn:
        """Say why the group is over, and end this process; the launcher ends the others of this host."""
        log.error("%s", failed.message)
        self.send(failed)
        os._exit(1)

    def _listen(self) -> NoReturn:
        try:
            while True:
                message = jobs.receive(self._socket)
                if isinstance(message, Stop):
                    self.stopped.set()
                elif isinstance(message, Job):
                    self.take(message)
        finally:
            self._end_after_worker()

    def _end_after_worker(self) -> NoReturn:
        """Remove the folders, end the launcher, which would wait for its file in there, and so end all ranks."""
        launcher = _launcher(self._path)
        if launcher is not None:
            with suppress(psutil.Error):
                launcher.suspend()  # it would write to the folder
        with suppress(OSError, ValueError):  # another rank was faster
            shutil.rmtree(Path(Host.read(self._path.parent).tensors).resolve(), ignore_errors=True)
        shutil.rmtree(self._path.parent, ignore_errors=True)
        if launcher is not None:
            with suppress(psutil.Error):
                launcher.kill()
        os._exit(1)


def main() -> NoReturn:
    """Join the group and work for ever."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _end_with_launcher()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # the launcher ends ranks so
    path, number, host_ranks = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    rank, host = Rank(path, number), Host.read(path.parent)

    # 1. Meet the others, and build the model, while the worker does something else.
    try:
        meeting = meet(host, path.parent, number, host_ranks, on_job=rank.take, on_end=rank.end)
    except PermanentError as error:
        rank.end(Failed(error.reason, error.message[:_MESSAGE_CHARACTERS]))
    try:
        trainer, group = build(meeting, number)
        files = HostFiles(host, meeting) if meeting.setup.hosts > 1 else None
    except Exception as error:  # another host would not know why this one is gone
        log.exception("rank %d cannot join", meeting.rank)
        reason = error.reason if isinstance(error, PermanentError) else Reason.TRAINER_FAILED
        failed = Failed(reason, f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS])
        with suppress(OSError):
            meeting.tell(failed)
        rank.end(failed)
    rank.send(Ready())
    log.info("rank %d is ready", meeting.rank)

    # 2. Train.
    while True:
        result = answer(rank, trainer, group, files, rank.next())
        with suppress(OSError):  # the first rank is gone, and this process ends
            meeting.tell(result)
        rank.send(result)


def build(meeting: Meeting, local_rank: int) -> tuple[Trainer, ReplicatedGroup]:
    """Join the group, and build the model."""
    setup = meeting.setup
    is_cuda = setup.settings.device != "cpu"
    place = f"cuda:{local_rank}" if is_cuda else "cpu"
    if is_cuda:
        torch.cuda.set_device(place)
    group = join_group(
        meeting.store,
        meeting.rank,
        setup.ranks,
        setup.model,
        hosts=setup.hosts,
        sharded=setup.sharded,
        is_cuda=is_cuda,
    )
    threads = int(os.environ["OMP_NUM_THREADS"])  # this host's, which may have another number than the worker's
    settings = setup.settings.model_copy(update={"device": place, "threads": threads})
    return Trainer(setup.model, settings, group), group


def answer(rank: Rank, trainer: Trainer, group: ReplicatedGroup, files: HostFiles | None, job: Job) -> Done | Failed:
    """Train, and say what came of it; a failure that the others do not share ends the group on the worker's side."""
    settings = trainer.settings.model_copy(update={"micro_batch": job.micro_batch})
    trainer.micro_batches = MicroBatches(trainer.model, settings, trainer.device, ranks=group.size)

    def keep_going() -> bool:  # the first rank is asked before each micro-batch
        jobs.give_sign(group.folder)
        return not rank.stopped.is_set()

    try:
        if files is not None:
            job = files.bring(job)
        group.folder = Path(job.folder)
        result = trainer.learn(
            StoredTensors(group.folder / jobs.PARAMETERS_FILE),
            load_file(group.folder / jobs.SEQUENCES_FILE)[jobs.SEQUENCES],
            training=job.training,
            outer_steps=job.outer_steps,
            optimizer=jobs.optimizer_of(job, trainer.model),
            keep_going=keep_going,
        )
    except PermanentError as error:
        message = error.message
        if error.reason is Reason.TRAINER_FAILED and error.__cause__ is not None:  # the worker says what to do about it
            message = f"{type(error.__cause__).__name__}: {error.__cause__}"
        return Failed(error.reason, message[:_MESSAGE_CHARACTERS])
    except Exception as error:  # a rank that cannot say why it failed helps nobody
        log.exception("rank %d cannot train", group.rank)
        return Failed(Reason.TRAINER_FAILED, f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS])
    if result.figures is None:
        raise TypeError("training has figures")
    return Done(
        first_loss=result.first_loss,
        mean_loss=result.mean_loss,
        last_loss=result.last_loss,
        num_steps=result.num_steps,
        num_sequences=result.num_sequences,
        stopped_early=result.stopped_early,
        figures=result.figures,
    )


def _launcher(path: Path) -> psutil.Process | None:
    """The launcher of the group with this socket; None if it has ended, and this process has another parent."""
    with suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        if str(path) in parent.cmdline():
            return parent
    return None


def _end_with_launcher() -> None:
    """Have Linux kill this process when the launcher ends, whose main thread has started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
