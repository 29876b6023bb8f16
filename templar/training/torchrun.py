"""A program under torch's launcher (torchrun): `python -m templar.training.torchrun SETTINGS FOLDER MODULE ...`.

SETTINGS are the JSON of `TrainerSettings`. FOLDER is made anew, for the launcher's files and for the place where the
ranks of one host meet: those need no port but on the loopback interface. Rank 0 runs the module. Where the settings ask
for one rank alone, this process does.
"""

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings
from templar.resources import given_threads
from templar.store.files import locked
from templar.training import rank
from templar.training.cluster import interface_to, rank_count

SHUTDOWN_SECONDS = 50  # from SIGTERM to SIGKILL: a worker's grace and the end of an interrupted window take 40 s


def launch(settings: TrainerSettings, folder: Path, command: Sequence[str]) -> int:
    """Run a module, with its arguments, on rank 0 of a group; the exit code, which is 0 after a signal.

    PermanentError: `already_running`; `bad_environment`, as `rank_count` and `interface_to`.
    """
    # 1. One rank needs no launcher.
    if rank_count(settings) == settings.hosts == 1:
        rank.run_module(command)
        return 0

    # 2. Where the ranks meet. Torch unpickles what lies at its rendezvous: that of one host is a private file.
    if settings.hosts == 1:
        words = ["--nnodes", "1", "--nproc-per-node", str(rank_count(settings)), "--local-addr", "127.0.0.1"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(folder / "rendezvous")]
        words += ["--rdzv-id", secrets.token_hex(8)]
        # The launcher notes in that file that it lives: rarely, for nobody reads it.
        words += ["--rdzv-conf", "store_type=file,keep_alive_interval=3600"]
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:
        interface_to(settings.rendezvous, is_own=True)
        words = _between_hosts(settings, "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(given_threads()))  # torch's launcher would set 1, for the neuron too

    # 3. The launcher, in this process.
    words += ["--max-restarts", "0", "--log-dir", str(folder / "logs"), "--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    words += ["-m", rank.MODULE, str(os.getpid()), str(folder) if settings.hosts == 1 else "", *command]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock"), wait=False) as is_own:
        if not is_own:
            raise PermanentError(Reason.ALREADY_RUNNING, f"{folder}: another process has ranks here: stop it first")
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        try:
            run.run(run.parse_args(words))  # type: ignore[no-untyped-call]
        except SignalException:
            return 0
        except ChildFailedError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def command_of_other_hosts(settings: TrainerSettings) -> str:
    """What each of the other hosts runs in a shell, with its number, from 1 on, for NUMBER."""
    words = [sys.executable, "-m", "torch.distributed.run", *_between_hosts(settings, "NUMBER")]
    logs = '"${TMPDIR:-/tmp}/templar-ranks"'  # torch would leave another folder at each start
    return f"while sleep 1; do {shlex.join(words)} --log-dir {logs} -m {rank.MODULE}; rm -rf {logs}; done"


def _between_hosts(settings: TrainerSettings, number: str) -> list[str]:
    """The launcher's arguments on a host with this number."""
    address, _, port = settings.rendezvous.rpartition(":")
    hosts = ["--nnodes", str(settings.hosts), "--node-rank", number, "--nproc-per-node", str(rank_count(settings))]
    return [*hosts, "--master-addr", address, "--master-port", port]


if __name__ == "__main__":
    chosen, place, *words = sys.argv[1:]
    try:
        code = launch(TrainerSettings.model_validate_json(chosen), Path(place), words)
    except PermanentError as refusal:
        sys.exit(str(refusal))
    sys.exit(code)
