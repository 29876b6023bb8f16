"""Kill a node in the middle of its windows: `python -m tests.support.node_kills miner|validator FOLDER KILLS`.

The network lies in the folder; `tests.support.process_kills` kills nodes whose buckets are behind an S3 endpoint.
Everybody but the victim lives in one process, on simulated time. Each attempt of the victim at a window is a process of
its own over its folder, which starts it, calls `templar.window.drive_window` and is killed with SIGKILL at a Python
call of a step; the next one begins again, until the window is done. Time passes only while the victim asks for it, so
it is never late, however often it dies.

Steps are drawn first, and then one of the calls that the step makes: points that are drawn from a window's calls would
nearly all lie where it measures or trains. A window's points come in the order of its steps, for what was done before a
kill is not done again.

What came of each window is printed as a line of JSON, and at the end what the others came to.
"""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.neuron_memory import AskingClock
from lab.simulate.world import START_WINDOW, World
from templar import window as window_module
from templar.canonical import canonical_json, sha256_hex
from templar.exchange.object_keys import Kind, window_key
from templar.neuron import window_time
from templar.timeline import first_block
from templar.window import Action, drive_window
from tests.support.network import tiny
from tests.support.snapshots import save_private

ACTORS = ("honest", "honest", "honest", "silent", "garbage")
NUM_WINDOWS = 6
"""Nobody dies in the first: it shows how many calls the steps make."""
AWAY_UID, AWAY_WINDOW = 3, 4
"""An honest miner and a window that it misses, so that somebody is slashed who had earned something."""
HPARAMS = tiny(
    windows={"blocks_per_window": 60},
    weights={"windows_per_weights": 1},
    peers={"gather_peer_count": 5, "peer_replacement_frequency": 1},
)
DECISIVE = {
    "miner": ("compress", "commit", "upload"),
    "validator": ("evaluate", "rate", "apply", "publish_evidence", "set_weights"),
}
"""Steps that are hit twice as often as the others."""
VICTIMS = {"miner": "honest-4", "validator": "validator-2"}
LAST_STEP = "close_window"
"""No other step follows it in the same process, and once it is done nothing is left to be killed."""
ROOT = Path(__file__).parents[2]


# Processes.


@dataclass(frozen=True)
class Forked:
    pid: int
    answer: Path

    def join(self):
        """Wait for its end; its answer, or None if it was killed."""
        status = os.waitpid(self.pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return None
        assert status == 0, f"a child ended with {status}"
        return json.loads(self.answer.read_text())


def fork(work, answer):
    """Start work in a forked process; its result goes to the file. This process should have no other threads."""
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            answer.write_text(json.dumps(work()))
        except BaseException:  # noqa: BLE001 - a child never returns from here
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return Forked(child, answer)


def die():
    """Kill this process, here and now."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived SIGKILL")


@dataclass(frozen=True)
class Point:
    """Where a process dies: at so many calls from the beginning of a step, but not after `LAST_STEP` has begun.

    If the step, which is what the driver calls by this name, ends before, a later one is hit.
    """

    step: str
    call: int


class Watch:
    """Counts the Python calls, of functions in C as well, in each step that the driver takes in this process.

    At the point, if there is one, the process dies, and the file `note` says what was counted.
    """

    def __init__(self, point, note):
        self.calls: dict[str, int] = {}
        self._point = point
        self._note = note
        self._step: str | None = None
        self._left: int | None = None

    def call(self, work):
        """Do some work under watch."""
        sys.setprofile(self._profile)
        try:
            return work()
        finally:
            sys.setprofile(None)

    def _profile(self, frame, event, arg):
        del arg
        if event == "call":
            if _is_step(frame):
                self._enter(frame.f_code.co_name)
            self._count()
        elif event == "c_call":
            self._count()
        elif event == "return" and self._left is not None and frame.f_code.co_name == LAST_STEP and _is_step(frame):
            self._die()

    def _enter(self, step):
        self._step = step
        self.calls.setdefault(step, 0)
        if self._point is not None and step == self._point.step:
            self._left = self._point.call
        elif step == LAST_STEP and self._left is not None:
            self._die()

    def _count(self):
        if self._step is None:
            return
        if self._left == 0:
            self._die()
        self.calls[self._step] += 1
        if self._left is not None:
            self._left -= 1

    def _die(self):
        sys.setprofile(None)
        self._note.write_text(json.dumps({"step": self._step, "calls": self.calls}))
        die()


def _is_step(frame):
    """Whether the driver itself called this, and it is no part of the driver, nor of what takes a step's time."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename == window_time.__file__:
        caller = caller.f_back
    if caller is None or caller.f_code.co_filename != window_module.__file__:
        return False
    return frame.f_code.co_filename not in (window_module.__file__, window_time.__file__, contextlib.__file__)


@dataclass(frozen=True)
class Kill:
    """A process that was killed, and whether the next one found the window's work entered and the roster applied."""

    step: str
    calls: int
    entered: bool
    applied: bool


class NodeKills:
    """A network in a folder, one of whose nodes dies equally often in each window but the first."""

    def __init__(self, role, folder, kills):
        assert kills % (NUM_WINDOWS - 1) == 0, f"{kills} kills in {NUM_WINDOWS - 1} windows"
        self.role, self.folder, self.random = role, folder, random.Random(kills)
        self._world = World(folder / "network", HPARAMS, seed=1, actors=ACTORS)
        self._world.chain.close()  # a file of SQLite must not be open when its process forks
        self._members = [member for member in self._world.members if member.role != "burn"]
        self._victim = next(member for member in self._members if member.name == VICTIMS[role])
        self._kills_per_window = kills // (NUM_WINDOWS - 1)
        self._deck: list[str] = []
        self._calls: dict[str, int] = {}
        self._seen: dict[str, bytes] = {}
        self._others: Connection

    def run(self):
        """All windows."""
        self._others, theirs = Pipe()
        others = fork(lambda: self._live(theirs), self.folder / "others.json")
        theirs.close()
        for window in range(START_WINDOW, START_WINDOW + NUM_WINDOWS):
            print(json.dumps(self._window(window)), flush=True)
        self._others.close()
        print(json.dumps(others.join()), flush=True)

    # The process of everybody else.

    def _live(self, line):
        """Live through all windows; the root after each of them, by name."""
        self._others.close()
        nodes = {}

        def participant(member):
            def live():
                node = nodes[member.name] = self._world.node(member)
                for window in range(START_WINDOW, START_WINDOW + NUM_WINDOWS):
                    node.chain.wait_for_block(first_block(window, HPARAMS.windows))
                    if (member.uid, window) != (AWAY_UID, AWAY_WINDOW):
                        drive_window(node, window)

            return live if member != self._victim else lambda: self._let_pass(line)

        self._world.stage.run([participant(member) for member in self._members])
        applied = {
            name: [node.journal.applied(window) for window in range(START_WINDOW, START_WINDOW + NUM_WINDOWS)]
            for name, node in nodes.items()
        }
        return {name: [each.root if each else "" for each in windows] for name, windows in applied.items()}

    def _let_pass(self, line):
        """Stand in for the victim, where it has its turn: wait as it waits."""
        with suppress(EOFError):
            while True:
                self._world.clock.sleep_until(line.recv())
                line.send(self._world.clock.now())

    # The victim's processes.

    def _window(self, window):
        died = []
        found = []
        for point in [*self._points(), None]:
            answer = self._attempt(window, point)
            self._look()
            found.append(self._read("found"))
            note = self._read("died") if answer is None else {"step": None, "calls": answer.pop("calls")}
            assert (answer is None) == (point is not None), f"window {window}: {point} and {note}"
            died.append(note)
            for step, calls in note["calls"].items():
                self._calls[step] = max(calls, self._calls.get(step, 0))
        kills = [
            asdict(Kill(note["step"], note["calls"][note["step"]], **after))
            for note, after in zip(died[:-1], found[1:], strict=True)
        ]
        return {"window": window, "kills": kills, **answer}

    def _points(self):
        """Where to die in the next window."""
        if not self._calls or not self._kills_per_window:
            return []
        order = self._steps()
        steps = [self._next_step() for _ in range(self._kills_per_window - 1)]
        drawn = [Point(step, self.random.randrange(self._calls[step])) for step in [*steps, LAST_STEP]]
        return sorted(drawn, key=lambda point: (order.index(point.step), point.call))

    def _steps(self):
        """The steps in their order up to the last one; what the driver reads after it cannot be hit any more."""
        steps = list(self._calls)
        return steps[: steps.index(LAST_STEP) + 1]

    def _next_step(self):
        if not self._deck:
            self._deck = [*DECISIVE[self.role], *self._steps()[:-1]]
            self.random.shuffle(self._deck)
        return self._deck.pop()

    def _attempt(self, window, point):
        """What came of the window; None if the process was killed."""
        ours, line = Pipe()
        child = fork(lambda: self._drive(window, line, point), self.folder / "answer.json")
        line.close()
        return self._serve(ours, child)

    def _serve(self, line, child):
        """Pass on what a process asks of the time, until it ends."""
        with line, suppress(EOFError, ConnectionResetError, BrokenPipeError):
            while True:
                self._others.send(line.recv())
                line.send(self._others.recv())
        return child.join()

    def _drive(self, window, line, point):
        self._world.clock = self._world.stage._clock = AskingClock(line)
        node = self._world.node(self._victim)
        found = {"entered": self._is_entered(node, window), "applied": node.state.window >= window}
        (self.folder / "found.json").write_text(json.dumps(found))
        watch = Watch(point, self.folder / "died.json")
        opening = watch.call(lambda: drive_window(node, window))
        assert opening.action is not Action.CATCHING_UP, opening
        assert (node.state.window, self._is_entered(node, window)) == (window, True)
        objects = self._objects()
        # What a decision has depends on when others' words were read.
        kept = {key: data for key, data in objects.items() if not key.startswith(Kind.DECISION)}
        outcome = {"root": node.state.root, "published": {key: _unsigned(data) for key, data in kept.items()}}
        if self.role == "miner":
            outcome |= {"applied": node.settle(window).uids, "private": self._private_digest(node)}
        else:
            evidence = objects[window_key(Kind.EVIDENCE, window, self._victim.uid)]
            outcome |= {"evidence": json.loads(evidence)["body"], "book": _rows(node.home / "scores.sqlite")}
            outcome |= {"weights": node.chain.weights()[self._victim.uid]}
        return {"calls": watch.calls, **outcome}

    def _is_entered(self, node, window):
        """Whether a miner's payload or a validator's scores are entered."""
        if self.role == "miner":
            return node.journal.result(window, "compress") is not None
        return node.book.evidence(window) is not None

    def _private_digest(self, node):
        path = self.folder / "private.safetensors"
        save_private(node.private, path)
        tensors = sorted(load_file(path).items())
        return sha256_hex(b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors))

    def _look(self):
        """Check that every object that was there is still there, byte for byte, and every word that was signed."""
        objects = self._objects()
        for key, data in self._seen.items():
            if key.startswith(Kind.DECISION):
                assert self._own_words(data) <= self._own_words(objects[key]), f"{key} lacks a word that it had"
            else:
                assert objects.get(key) == data, f"{key} is gone, or was replaced"
        self._seen |= objects

    def _own_words(self, decision):
        """The victim's own words in a decision, which also has those of others as far as it has read them."""
        words = json.loads(decision)["body"]["words"]
        return {str(sorted(_without_signatures(word).items())) for word in words if word["uid"] == self._victim.uid}

    def _objects(self):
        """What the victim has in its bucket, but for leases."""
        store = self._world.stage.open_store(self._victim.account_id)
        keys = [info.key for info in store.list() if not info.key.startswith(Kind.LEASE)]
        return {key: store.get(key, max_bytes=1 << 24) for key in keys}

    def _read(self, name):
        """What the last process noted."""
        return json.loads((self.folder / f"{name}.json").read_text())


def _rows(path):
    """The rows of every table of an SQLite file."""
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        tables = {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for (name,) in names}
    return {
        name: sorted(([_unsigned(each) if isinstance(each, bytes) else each for each in row] for row in rows), key=str)
        for name, rows in tables.items()
    }


def _unsigned(data):
    """Digest of JSON without any signatures, since no two of them are alike; of other data as it is."""
    with suppress(ValueError):
        data = canonical_json(_without_signatures(json.loads(data)))
    return sha256_hex(data)


def _without_signatures(value):
    if isinstance(value, list):
        return [_without_signatures(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_signatures(each) for name, each in value.items() if not name.endswith("signature")}
    return value


def reports_of(role, folder, kills):
    """What a run with so many kills says of each window, and the roots of the others by name."""
    command = [sys.executable, "-m", "tests.support.node_kills", role, str(folder), str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    *windows, roots = (json.loads(line) for line in done.stdout.splitlines())
    return windows, roots


def main():
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    role, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    NodeKills(role, folder, kills).run()


if __name__ == "__main__":
    main()
