"""The files of a job on every host: one rank of each other host receives what the first rank reads."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from templar.tensorfile import StoredTensors, TensorWriter
from templar.training import jobs
from templar.training.device import num_parameters
from templar.training.hosts import Meeting
from templar.training.jobs import Host, Job, Lent
from templar.training.model import parameter_shapes

PASSED_BYTES = 12
"""Of the files of a job on another host, per parameter: the parameters and two moments."""


class HostFiles:
    """Brings the files of a job to every host: local rank 0 gets them for all ranks of its host. All ranks make one."""

    def __init__(self, host: Host, meeting: Meeting) -> None:
        setup = meeting.setup
        self._host, self._meeting, self._model = host, meeting, setup.model
        self._is_local_first = meeting.rank % setup.host_ranks == 0
        self._local_firsts = distributed.new_group(list(range(0, setup.ranks, setup.host_ranks)), backend="gloo")
        self._is_prepared = False

    def bring(self, job: Job) -> Job:
        """The same job with files that lie on this host; every rank of the group calls it.

        Raises:
            RuntimeError: A rank is gone.
            OSError: A rank is gone, or this host has no room for the files.
            PermanentError: `bad_state_file`; the first rank cannot read a file.
        """
        # 1. The ranks of other hosts get the job; files are written when nobody reads those of the job before.
        if self._meeting.first is not None:
            self._meeting.first.pass_on(job)
        _wait_for_all()
        # 2. Local rank 0 of each other host writes what the first rank reads.
        home = Path(self._host.tensors)
        exp_avg, exp_avg_sq = home / "exp_avg.safetensors", home / "exp_avg_sq.safetensors"
        if self._is_local_first:
            self._prepare()
            parameters = Lent(str(Path(job.folder) / jobs.PARAMETERS_FILE))
            for lent, path in (
                (parameters, home / jobs.PARAMETERS_FILE),
                (job.exp_avg, exp_avg),
                (job.exp_avg_sq, exp_avg_sq),
            ):
                self._pass_tensors(job, lent, path)
            self._pass_sequences(job, home)
        # 3. Nobody reads before all is there.
        _wait_for_all()
        if self._host.number == 0:
            return job
        return replace(
            job,
            folder=str(home),
            exp_avg=None if job.exp_avg is None else Lent(str(exp_avg)),
            exp_avg_sq=None if job.exp_avg_sq is None else Lent(str(exp_avg_sq)),
        )

    def _prepare(self) -> None:
        if self._host.number and not self._is_prepared:
            jobs.fresh_folder(Path(self._host.tensors).parent, PASSED_BYTES * num_parameters(self._model))
            self._is_prepared = True

    def _pass_tensors(self, job: Job, lent: Lent | None, path: Path) -> None:
        if lent is None:
            return
        shapes = parameter_shapes(self._model)
        if self._host.number == 0:
            source = StoredTensors(Path(lent.path), lent.prefix)
            for name in shapes:
                distributed.broadcast(source[name], src=0, group=self._local_firsts)
                jobs.give_sign(Path(job.folder))
            return
        with TensorWriter(path, shapes, {}) as file:
            for name, shape in shapes.items():
                tensor = torch.empty(shape)
                distributed.broadcast(tensor, src=0, group=self._local_firsts)
                file.write(name, tensor)

    def _pass_sequences(self, job: Job, home: Path) -> None:
        if self._host.number == 0:
            sequences = load_file(Path(job.folder) / jobs.SEQUENCES_FILE)[jobs.SEQUENCES].to(torch.int32)
            distributed.broadcast(sequences, src=0, group=self._local_firsts)
            return
        sequences = torch.empty(job.shape, dtype=torch.int32)
        distributed.broadcast(sequences, src=0, group=self._local_firsts)
        save_file({jobs.SEQUENCES: sequences}, home / jobs.SEQUENCES_FILE)


def _wait_for_all() -> None:
    distributed.all_reduce(torch.zeros(1))
