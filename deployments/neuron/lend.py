"""Let a miner on another host train on this host's devices: `templar neuron lend`.

    templar neuron lend --rendezvous 10.0.0.1:29500 --number 1 [--ranks 8] [--device cpu]

The miner runs on its own host with TEMPLAR_RENDEZVOUS=10.0.0.1:29500 and TEMPLAR_HOSTS, the number of all hosts; each
other host has a number from 1 on. This host needs the same installation and devices, and no wallet, bucket or Prefect
server. It waits for the miner, joins each group of ranks that the miner starts, and ends with a signal. If the miner
has TEMPLAR_RENDEZVOUS_SECRET, this command needs the same in its environment. The network between the hosts must be
private.
"""

import argparse
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from deployments.neuron.supervisor import Pauses
from deployments.processes import sole_process, state_folder
from templar.arguments import whole_number
from templar.errors import PermanentError
from templar.hparams import TrainerSettings
from templar.interrupt import StoppedError, request_stop, wait
from templar.training.device import given_threads
from templar.training.hosts import interface_to
from templar.training.jobs import IN_STEP, Done, Failed, Host
from templar.training.launch import RankGroup
from templar.training.ranks import rank_count

TENSORS = Path("lent", "tensors")
"""In the folder of this command: what leads to the files of a job."""
PAUSES = Pauses()
"""Before other ranks start."""


def run(host: Host, ranks: int, folder: Path, say: Callable[[str], None]) -> None:
    """Start ranks, and others when they end.

    Raises:
        PermanentError: `bad_environment`: there is no way to the rendezvous.
        StoppedError: A stop was asked for.
    """
    interface, pause = interface_to(host.rendezvous, is_own=False), 0.0
    while True:
        started = time.monotonic()
        group = RankGroup(
            host,
            ranks,
            log_path=folder / "ranks.log",
            watchdog_seconds=0.0,  # the miner's is the one that counts
            threads=max(1, given_threads() // ranks),
            interface=interface,
        )
        try:
            follow(group, say)  # until they end
        except PermanentError as error:
            pause = PAUSES.after(pause, time.monotonic() - started)
            say(f"[{error.reason}] {error.message}; other ranks start in {pause:g} s")
        finally:
            group.kill()
            shutil.rmtree((folder / TENSORS).resolve(), ignore_errors=True)
        wait(pause)


def follow(group: RankGroup, say: Callable[[str], None]) -> None:
    """Say what the ranks do until they end.

    Raises:
        PermanentError: They have ended.
        StoppedError: A stop was asked for.
    """
    group.wait_ready(lambda: True)
    say("all hosts are there, the miner can train")
    while True:
        for number, message in group.messages():
            if isinstance(message, Done) and number == 0:
                rate = f"{message.figures.tokens_per_second:,.0f} tokens/s on all hosts"
                say(f"trained {message.num_steps} steps, loss {message.last_loss:.4f}, {rate}")
            elif isinstance(message, Failed) and message.reason in IN_STEP:
                say(f"[{message.reason}] {message.message}")
            elif isinstance(message, Failed):
                raise PermanentError(message.reason, message.message)


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and lend the devices; 0 after a signal, 1 if it is refused."""
    parser = argparse.ArgumentParser(prog="templar neuron lend", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rendezvous", required=True, help="TEMPLAR_RENDEZVOUS of the miner: ADDRESS:PORT")
    parser.add_argument("--number", required=True, type=whole_number(1), help="of this host: 1, 2, ...")
    parser.add_argument("--ranks", type=whole_number(1), help="as many as the miner's host has (one per CUDA device)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="what the miner's host takes")
    parser.add_argument("--folder", type=Path, help="for logs and the tensors of a window")
    arguments = parser.parse_args(words)
    folder = arguments.folder or state_folder() / "lent" / str(arguments.number)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: request_stop())
    try:
        settings = TrainerSettings(device=arguments.device, ranks=arguments.ranks or "auto", repeatable=False)
        host = Host(str(folder / TENSORS), None, number=arguments.number, rendezvous=arguments.rendezvous)
        with sole_process(folder / "lend.lock", lambda pid: f"process {pid} lends the devices already, in {folder}"):
            say(f"lending {rank_count(settings)} ranks as host {host.number}; the log is {folder / 'ranks.log'}")
            run(host, rank_count(settings), folder, say)
    except StoppedError:
        say("the devices are this host's own again")
    return 0


def say(text: str) -> None:
    """Print a line at once."""
    with suppress(BrokenPipeError):
        print(text, flush=True)
