"""Say what a release would change for a neuron of this machine: `templar upgrade --check`.

    templar upgrade --check --env-file .env [--to CHECKOUT] [--json]

It is the release of this command, or that of another checkout, which is installed there (`make .venv`) and asked
itself. Nothing of the neuron is changed, and it may run meanwhile. The exit status is 1 if an answer is no.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron
from deployments.neuron.start import command_line
from deployments.options import add_shared, environment_of
from deployments.processes import PROJECT_ROOT
from templar import PROTOCOL_VERSION, RELEASE
from templar.errors import PermanentError, Reason, TemplarError, one_line
from templar.exchange.signed import Network
from templar.neuron.configuration import GENESIS_FILE
from templar.neuron.journal import Journal
from templar.neuron.lock import LastRun
from templar.neuron.private_state import PrivateState
from templar.neuron.snapshot import Snapshots
from templar.reports.published_plan import published_plan
from templar.statefile import copy_state_file

OWN_VARIABLE = re.compile(r"^#? ?((?:TEMPLAR|R2)_[A-Z0-9_]+)=", re.MULTILINE)
EVERY_WINDOW = 2**62
NONE_YET = "there is none yet"


@dataclass(frozen=True)
class Point:
    """One thing that a release changes, or needs; a reason says that the answer is no."""

    topic: str
    text: str
    reason: Reason | None = None

    def __str__(self) -> str:
        return f"{self.topic}: {'' if self.reason is None else f'[{self.reason}] '}{self.text}"


_POINTS = TypeAdapter(list[Point])


def check(name: str, environment: Mapping[str, str]) -> Iterator[Point]:
    """What the release of this process would change for a neuron, point by point."""
    # 1. The settings. Nothing else can be looked at without them.
    yield _point("variables", lambda: _variables(environment))
    try:
        block = neuron_from_environment(environment)
        block.hparams()
    except TemplarError as error:
        yield Point("settings", error.message, error.reason)
        return
    yield Point("settings", f"{block.role}, preset {block.preset}: every setting is known, and none is missing")

    # 2. The release, and the one before it; the network; the neuron's files.
    home, network = Path(block.home), block.subnet.netuid
    last = LastRun.read(home)
    ran = "none that says so has run in its folder" if last is None else f"{last.release} ran in its folder last"
    yield Point("release", f"{RELEASE} in {PROJECT_ROOT}; {ran}")
    listed = changes(
        (PROJECT_ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), None if last is None else last.release
    )
    yield Point("changes", f"CHANGELOG.md lists {'since then' if last else 'in all'}: {' '.join(listed) or 'nothing'}")
    yield _point("network", lambda: _network(name, block, last))
    yield _point("journal", lambda: _journal(home / "journal.sqlite"))
    yield _point("snapshots", lambda: _snapshots(home / "snapshots", network))
    if block.role == "miner":
        yield _point("private state", lambda: _private_state(home / "private"))


def _point(topic: str, look: Callable[[], str]) -> Point:
    try:
        return Point(topic, look())
    except TemplarError as error:
        return Point(topic, error.message, error.reason)


def _variables(environment: Mapping[str, str]) -> str:
    """Compare names with those of this release's .env.example."""
    known = OWN_VARIABLE.findall((PROJECT_ROOT / ".env.example").read_text(encoding="utf-8"))
    given = {each for each, value in environment.items() if OWN_VARIABLE.match(f"{each}=") and value.strip()}
    if unknown := sorted(given.difference(known)):
        problem = f"{', '.join(unknown)}: this release reads no such variable"
        raise PermanentError(Reason.BAD_ENVIRONMENT, f"{problem}: remove it, or rename it as .env.example has it")
    return f"{len(given)} are set, and .env.example has all of them"


def changes(changelog: str, last: str | None) -> list[str]:
    """The items of a changelog above the section of a release; all of them without one."""
    found = list[str]()
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        if section.split()[0] == last:
            break
        found += [" ".join(item.split()) for item in re.split(r"^\* ", section, flags=re.MULTILINE)[1:]]
    return found


def _network(name: str, block: Neuron, last: LastRun | None) -> str:
    """Compare the protocol version, and the settings of the plan, with the network's: now and later."""
    try:
        config = block.config(name)
        with closing(config.buckets):
            birth = config.birth()
            known = published_plan(config.reading(birth), birth, config.home)
    except TemplarError as error:
        if last is None or last.protocol == PROTOCOL_VERSION:
            raise
        problem = f"this release speaks protocol {PROTOCOL_VERSION}, the one before it {last.protocol}: {error.message}"
        raise PermanentError(Reason.WRONG_VERSION, problem) from None
    start, current = birth.start, max(known.current, birth.start.start_window)
    spoken = {start.start_window: start.protocol} | known.plan.protocols
    now = spoken[max(window for window in spoken if window <= current)]
    later = {window: version for window, version in spoken.items() if window > current}
    text = f"this release speaks protocol {PROTOCOL_VERSION}, the network {now} in window {current}"
    text += "".join(f", {version} from window {window} on" for window, version in sorted(later.items()))
    if {now, *later.values()} != {PROTOCOL_VERSION}:
        raise PermanentError(Reason.WRONG_VERSION, f"{text}: take the release that the owners name")
    for entry in known.plan.entries:
        known.plan.at(entry.first_window)
    return f"{text}; it knows the settings of all {len(known.plan.entries)} entries of the plan"


def _journal(path: Path) -> str:
    """Let this release open a copy: the neuron may write to the file meanwhile."""
    if not path.exists():
        return NONE_YET
    with tempfile.TemporaryDirectory(prefix="templar-upgrade-") as folder:
        copy_state_file(path, copy := Path(folder, path.name))
        with closing(Journal(copy, durable=False)) as journal:
            return f"it can be read, and has {len(journal.roots(0, EVERY_WINDOW))} applied windows"


def _snapshots(folder: Path, netuid: int) -> str:
    joined = folder.with_name(GENESIS_FILE)
    if not joined.exists() or not folder.is_dir():
        return NONE_YET
    kept = Snapshots(folder, Network(netuid, joined.read_text().strip()), kept=1)
    if kept.windows() and not kept.marks():
        raise PermanentError(Reason.BAD_STATE_FILE, f"{folder}: this release reads none: it begins at a checkpoint")
    return next(
        (f"the newest can be read: window {each.window}, root {each.root[:12]}" for each in kept.marks()), NONE_YET
    )


def _private_state(folder: Path) -> str:
    files = sorted(folder.glob("*-*.safetensors"), key=lambda file: int(file.name.partition("-")[0]))
    if not files:
        return NONE_YET
    state = PrivateState.load(files[-1])
    return f"the newest can be read: {state.feedback.num_calls} payloads, {state.optimizer.num_steps} inner steps"


def moved_words(words: Sequence[str], folder: Path) -> list[str]:
    """The options of a command in a folder, for one in another folder: of two files the last one counts."""
    file = command_line().parse_known_args(words)[0].env_file or Path(".env")
    is_said = not file.is_absolute() and (folder / file).exists()
    return [*words, *(("--env-file", str(folder / file)) if is_said else ())]


def ask(checkout: Path, words: Sequence[str], environment: Mapping[str, str]) -> list[Point]:
    """Install a checkout in a virtual environment of its own, unless that is complete; what it says about a neuron.

    `bad_parameters` if it is no checkout; `bad_environment` if it cannot be installed, or cannot answer.
    """
    if not (checkout / "deployments" / "command.py").is_file():
        problem = f"--to {checkout}: there is no checkout: make one beside the one that runs, with `git worktree add`"
        raise PermanentError(Reason.BAD_PARAMETERS, problem)
    make = ["make", "--silent", "VENV=.venv", ".venv"]  # with its own constraints
    look = [f"{checkout}/.venv/bin/python", "-m", "deployments", "upgrade", *words, "--to", str(checkout)]
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    # Neither has a terminal, as a neuron in the background has none: a password must be in the environment or a file.
    options: Any = {"cwd": checkout, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        for command, env in ((make, plain), ([*look, "--check", "--json"], environment)):
            done = subprocess.run(command, check=False, env=dict(env), **options)  # noqa: S603
            if done.returncode and not done.stdout.startswith("["):
                problem = f"{checkout}: `{' '.join(command[:4])}` failed: {done.stderr.strip()[-600:]}"
                raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
        return _POINTS.validate_json(done.stdout)
    except (OSError, ValidationError) as error:  # there is no `make`, or it knows more reasons than this release
        raise PermanentError(
            Reason.BAD_ENVIRONMENT, f"{checkout} cannot be asked: {one_line(str(error)[-300:])}"
        ) from error


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and look; 1 if the answer to a point is no."""
    given = list(sys.argv[1:] if words is None else words)
    parser = command_line("templar upgrade", __doc__)
    parser.add_argument("--check", action="store_true", required=True, help="`templar neuron upgrade` makes one")
    parser.add_argument(
        "--to", type=Path, metavar="CHECKOUT", help="the release of this folder; else the command's own"
    )
    add_shared(parser, "--json")
    arguments = parser.parse_args(given)
    if arguments.to is None or arguments.to.resolve() == PROJECT_ROOT:
        points = list(check(arguments.name, environment_of(arguments)))
    else:
        points = ask(arguments.to.resolve(), moved_words(given, Path.cwd()), os.environ)
    print(json.dumps([asdict(point) for point in points]) if arguments.json else "\n".join(map(str, points)))
    return 1 if any(point.reason for point in points) else 0
