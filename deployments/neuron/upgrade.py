"""Let another release run a neuron, and the old one again if that fails: `templar neuron upgrade`.

    templar neuron upgrade --to ../templar-0.2.0

The release is a checkout beside the one that runs. It is installed there and asked what it would change (`templar
upgrade --check`) while the old one runs. Then the neuron is stopped in good order, and started by the new release as it
was started before. It must load the state that the old one left, and its processes must stay; otherwise the old release
is started again, as it was. A command that was cut off is given again, without `--to`: it goes on from there.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import chdir, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import psutil
from pydantic import TypeAdapter

from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron
from deployments.neuron.folder import NeuronFolder
from deployments.neuron.manage import stop_neuron
from deployments.neuron.release import EVERY_WINDOW, ask, moved_words
from deployments.neuron.start import command_line
from deployments.neuron.status import reason_in, status_of
from deployments.options import command_parser, environment_of
from deployments.processes import Child, ProcessIdentity, end_of, holder_of, sole_process, start_child, write_private
from deployments.supervisor import READY_SECONDS, log_file, say
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.neuron.journal import Journal
from templar.neuron.lock import LastRun

RESUMABLE = True
POLL_SECONDS = 1.0
STEADY_SECONDS = 10.0  # a process that cannot work ends in its first seconds
PATIENCE_WINDOWS = 2  # a window begins within so many, and with it the state is loaded


@dataclass(frozen=True)
class Launch:
    """How a neuron is started: all that `templar neuron start` was given."""

    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]

    @classmethod
    def of(cls, supervisor: ProcessIdentity) -> Self:
        """That of a process which runs."""
        process = psutil.Process(supervisor.pid)
        return cls(tuple(process.cmdline()), Path(process.cwd()), process.environ())

    @property
    def words(self) -> list[str]:
        """Its options, for a command in another folder."""
        return moved_words(self.command[self.command.index("start") + 1 :], self.folder)

    def by(self, checkout: Path) -> "Launch":
        """The same of another release."""
        command = (f"{checkout}/.venv/bin/python", "-m", "deployments", "neuron", "start", *self.words)
        moved = {"PYTHONPATH": str(checkout)} if "PYTHONPATH" in self.environment else {}  # else it finds the old one
        return Launch(command, checkout, {**self.environment, **moved})

    def block(self) -> Neuron:
        """The neuron, as it is read in this folder."""
        with chdir(self.folder):
            return neuron_from_environment(environment_of(command_line().parse_args(self.words), self.environment))

    def runs(self, folder: NeuronFolder) -> bool:
        """Whether the neuron runs, and was started so."""
        supervisor = holder_of(folder.lock)
        return supervisor is not None and Launch.of(supervisor).command == self.command

    def start(self, folder: NeuronFolder) -> Child:
        """Start it, in a session of its own; its output is the log `neuron`."""
        say(f"starting {self.folder}")
        log = log_file(folder.logs, "neuron")
        return start_child("neuron", self.command, log=log, env=self.environment, cwd=self.folder)


@dataclass(frozen=True)
class Upgrade:
    """An upgrade that is under way: what it takes to go on with it, or to go back."""

    old: Launch
    new: Launch
    failed: tuple[str, ...]  # windows that had failed before
    began: float | None = None  # when the release that ran last had loaded its state
    state: tuple[int, str] | None = None  # window and root that the old release left
    failure: tuple[Reason, str] | None = None  # why it goes back

    def save(self, folder: NeuronFolder) -> Self:
        """Keep it until it is over, readable for this user alone: an environment may have secrets."""
        write_private(folder.upgrade_file, _UPGRADE.dump_json(self))
        return self


_UPGRADE = TypeAdapter(Upgrade)


def upgrade(folder: NeuronFolder, checkout: Path | None) -> None:
    """Make an upgrade, or go on with one that was cut off.

    Raises:
        PermanentError: `bad_parameters`, `bad_environment`, or what `ask` finds: nothing was changed. Otherwise what
            made the new release fail: the old one runs again.
    """
    # 1. What is under way, or begins.
    if folder.upgrade_file.exists():
        under_way = _UPGRADE.validate_json(folder.upgrade_file.read_bytes())
        if checkout not in (None, under_way.new.folder):
            problem = (
                f"--to {checkout}: an upgrade to {under_way.new.folder} was cut off: finish it first, without --to"
            )
            raise PermanentError(Reason.BAD_PARAMETERS, problem)
        say(f"going on with the upgrade to {under_way.new.folder}")
    elif (begun := prepared(folder, checkout)) is not None:
        under_way = begun.save(folder)
    else:
        say(f"{checkout} runs neuron {folder.name!r} already: nothing was changed")
        return
    new, old = under_way.new, under_way.old

    # 2. The new release, unless it has failed already; then the old one.
    if under_way.failure is None:
        try:
            switch(folder, under_way, new)
            say(f"{new.folder} runs neuron {folder.name!r}; from now on it is started with: {' '.join(new.command)}")
        except TemplarError as error:
            under_way = replace(under_way, failure=(error.reason, error.message)).save(folder)
    if under_way.failure is None:
        folder.upgrade_file.unlink()
        return
    reason, why = under_way.failure
    say(f"[{reason}] {why}")
    switch(folder, under_way, old)
    folder.upgrade_file.unlink()
    raise PermanentError(reason, f"{new.folder}: {why}; {old.folder} runs neuron {folder.name!r} again")


def prepared(folder: NeuronFolder, checkout: Path | None) -> Upgrade | None:
    """An upgrade to a checkout, once that is installed and has nothing against it; None if it runs the neuron."""
    # 1. How the neuron was started, it says by itself.
    supervisor = holder_of(folder.lock)
    if supervisor is None or checkout is None:
        problem = f"neuron {folder.name!r} does not run, or --to is missing: start it, and name the new checkout"
        raise PermanentError(Reason.BAD_PARAMETERS, problem)
    if supervisor.pid == 1:
        raise PermanentError(Reason.BAD_ENVIRONMENT, "this neuron is its container's process: run another image")
    old = Launch.of(supervisor)
    if checkout == old.folder or (old.folder / old.command[0]).is_relative_to(checkout):
        return None

    # 2. What the new release says.
    new, block = old.by(checkout), old.block()
    say(f"installing {checkout}, and asking it")
    for point in ask(checkout, old.words, new.environment):
        say(str(point))
        if point.reason is not None:
            raise PermanentError(point.reason, f"{point.topic}: {point.text}; nothing was changed")
    if (moved := new.block()).home != block.home or moved.wallet != block.wallet:
        problem = f"TEMPLAR_HOME or WALLET_* name another path in {checkout} than in {old.folder}: make them absolute"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    return Upgrade(old, new, tuple(failures(folder)))


def switch(folder: NeuronFolder, under_way: Upgrade, launch: Launch) -> None:
    """Let one of the two releases run the neuron, unless it does; raises what `watch` does."""
    child = None
    if not launch.runs(folder):
        say(f"stopping neuron {folder.name!r}: a window under way has its grace")
        was_old, home = under_way.old.runs(folder), Path(under_way.old.block().home)
        stop_neuron(folder)
        last = LastRun.read(home)
        state = state_of(home) if was_old or under_way.state is None else under_way.state
        under_way = replace(under_way, began=None if last is None else last.began, state=state).save(folder)
        child = launch.start(folder)
    watch(folder, under_way, child)


def state_of(home: Path) -> tuple[int, str] | None:
    """Window and root of the newest state that a neuron's folder knows; None if it has none."""
    found = [] if (last := LastRun.read(home)) is None else [(last.window, last.root)]
    if (home / "journal.sqlite").exists():
        with closing(Journal(home / "journal.sqlite")) as journal:
            found += journal.roots(0, EVERY_WINDOW).items()
    return max(found, key=lambda each: each[0], default=None)


def watch(folder: NeuronFolder, under_way: Upgrade, child: Child | None) -> None:
    """Wait until a neuron that was started is healthy: its processes run, and the new release has loaded its state.

    Raises:
        PermanentError: `process_died`; `root_differs`, it has loaded another state; the reason of a window that failed.
        TransientError: `process_not_ready`; a window should have begun by now.
    """
    block, log, steady = under_way.old.block(), log_file(folder.logs, "neuron"), 0.0
    patience = PATIENCE_WINDOWS * block.hparams().windows.seconds + READY_SECONDS
    deadline, known, left = time.monotonic() + patience, dict[str, ProcessIdentity](), under_way.state
    while time.monotonic() < deadline:
        # 1. The supervisor, and each process that it has started, are still those.
        if holder_of(folder.lock) is None and (child is None or child.exit_code is not None):
            said = end_of(log).rpartition("\n")[2]
            raise PermanentError(reason_in(said) or Reason.PROCESS_DIED, f"it ended: {said}")
        running = {each.name: each.identity for each in folder.record.running()}
        if ended := [name for name, identity in known.items() if running.get(name) != identity]:
            raise PermanentError(Reason.PROCESS_DIED, f"its {ended[0]} ended: see the logs in {folder.logs}")
        known |= running
        # 2. The new release loads the state with its first window; that fails if it cannot.
        last, is_loaded = LastRun.read(Path(block.home)), under_way.failure is not None
        if not is_loaded and last is not None and last.began != under_way.began:
            is_loaded = True
            if left is not None and last.window <= left[0] and (last.window, last.root) != left:
                problem = (
                    f"it has loaded window {last.window}, root {last.root[:12]}, and not {left[0]}, {left[1][:12]}"
                )
                raise PermanentError(Reason.ROOT_DIFFERS, problem)
        for window, message in () if is_loaded else failures(folder).items():
            if window not in under_way.failed:
                raise PermanentError(reason_in(message) or Reason.PROCESS_DIED, f"{window} failed: {message}")
        # 3. All is well for a while.
        steady = (steady or time.monotonic()) if is_loaded and "window clock" in known else 0.0
        if steady and time.monotonic() - steady >= STEADY_SECONDS:
            return
        time.sleep(POLL_SECONDS)
    raise TransientError(Reason.PROCESS_NOT_READY, f"it has loaded no state after {patience:.0f} s: see {log}")


def failures(folder: NeuronFolder) -> dict[str, str]:
    """The newest windows whose runs have failed, each with its message."""
    return {row["window"]: row["message"] for row in status_of(folder)["windows"] if row["state"] == "Failed"}


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and upgrade."""
    parser = command_parser("templar neuron upgrade", __doc__, "--name")
    parser.add_argument("--to", type=Path, metavar="CHECKOUT", help="the new release; without, a cut-off one goes on")
    arguments = parser.parse_args(words)
    folder = NeuronFolder(arguments.name)
    with sole_process(folder.upgrade_lock, lambda pid: f"neuron {arguments.name!r} is upgraded by process {pid}"):
        upgrade(folder, arguments.to and arguments.to.resolve())
    return 0
