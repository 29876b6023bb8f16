"""Faults of a group of ranks in a network of processes: `python -m tests.support.rank_faults FOLDER FAULTS [SECONDS]`.

One miner of the network trains on two ranks under torch's launcher, which is started again when it ends. In every
second window, in the middle of its training, one of its processes is killed or stopped, or a rank runs out of memory;
in the windows between, nothing happens to it. What came of each fault is printed as JSON, and at the end what is left.
"""

import json
import os
import random
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import psutil

from deployments.processes import ProcessIdentity
from templar.errors import Reason
from tests.support.live_network import LiveNetwork
from tests.support.operator import wait_until

VICTIM = "miner-2"
SETTINGS = {VICTIM: {"TEMPLAR_RANKS": "2", "TEMPLAR_MICRO_BATCH": "auto"}}
KINDS = ("rank 0 killed", "rank 1 killed", "launcher killed", "rank 1 stopped", "out of memory")
FAULTY = Path(__file__).parent / "faulty_rank"
WINDOWS = {"blocks_per_window": 40}
"""Long enough for a worker that is started afresh on two busy cores, and its group; a fast machine needs less."""
TRAINING = {"batch_size": 16, "micro_batch_size": 16, "inner_steps": 400}
"""With the pauses of `faulty_rank/sitecustomize.py` no window is long enough for all steps."""
RECOVERY_SECONDS = 480.0
"""Twelve windows."""
LATEST_MARK = 40
"""A fault comes after one to so many forward passes."""


@dataclass(frozen=True)
class Outcome:
    """What came of a fault, and of the window after it.

    On a machine that is busy with something else the processes that start afresh may be late for the next window,
    which ends with `no_time_left`; then it is the one after that which is looked at, as its number says.
    """

    kind: str
    window: int
    marks: int  # forward passes before it
    state: str  # the final one of the window's run
    message: str
    history: tuple[str, ...]  # the names of all of the run's states
    next_window: int
    next_state: str
    next_message: str
    next_measured: bool  # whether the validator found and measured a payload of the victim in the next window


class RankFaults:
    """A network in a folder, one of whose miners is a group of two ranks, and its faults."""

    def __init__(self, folder, windows=None):
        self.network = LiveNetwork(folder, windows=windows or WINDOWS, training=TRAINING, settings=SETTINGS)
        self.seen: set[ProcessIdentity] = set()
        """All launchers and ranks that were looked at."""

    @contextmanager
    def up(self):
        """The network, as long as the context lasts; the victim's launcher is started again, as `neuron start` does."""
        ended = threading.Event()

        def keep_running():
            while not ended.wait(0.5):
                if all(entry.name != f"worker of {VICTIM}" for entry in self.network.record.running()):
                    self.network.start_worker(VICTIM)

        with mock.patch.dict(os.environ, {"PYTHONPATH": str(FAULTY)}), self.network:
            keeper = threading.Thread(target=keep_running)
            keeper.start()
            try:
                yield
            finally:
                ended.set()
                keeper.join()

    def inject(self, number, *, seed=1):
        """Inject faults of all kinds in turn, and wait for what comes of them; each is noted in a file as well."""
        moments, window = random.Random(seed), self.network.first_window
        outcomes, fault = list[Outcome](), None
        for index in range(number):
            kind, marks = KINDS[index % len(KINDS)], moments.randint(1, LATEST_MARK)
            window = self._wait_for_training(window, marks)
            if fault and self._was_late(fault[1] + 1) and window == fault[1] + 2:
                window = self._wait_for_training(window + 1, marks)
            self._inject(kind, self._processes())
            self._wait_for_end(window)
            self._no_memory.unlink(missing_ok=True)
            outcomes += [self._outcome(*fault)] if fault else []  # what its next window came to is known by now
            fault, window = (kind, window, marks), window + 2
        return [*outcomes, *([self._outcome(*fault)] if fault else [])]

    def settle(self):
        """Let windows pass without a fault until the victim is paid, and stop the clock; the last one that all proved.

        A miner that misses every second window is slashed each time, so it may have no weight at first.
        """
        network = self.network
        paid = f"{VICTIM} has a weight again"
        wait_until(lambda: self.weight() > 0, paid, patience_seconds=RECOVERY_SECONDS)
        last, _ = network.complete_window(network.next_window() - 1)
        network.stop_clock()
        return last

    def weight(self):
        """The weight that the validator has set for the victim."""
        weights = self.network.view.chain.weights().get(self.network.uids["validator"], {})
        return weights.get(self.network.uids[VICTIM], 0.0)

    def orphans(self):
        """The processes of the network that still run, and those of its groups."""
        return [*(str(each) for each in self.seen if each.alive), *self.network.orphans()]

    def leftovers(self):
        """The temporary folders of groups that are left."""
        names = (path.name for path in self.network.temporary.iterdir())
        return [name for name in names if name.startswith(("templar-", "torchelastic_"))]

    @property
    def _no_memory(self):
        """The file that takes the memory of rank 1."""
        return self.network.temporary / "out_of_memory"

    def _wait_for_training(self, first, marks):
        """Wait until both ranks have made so many forward passes in a window, from this one on; which one it is."""
        found, before = first - 1, [0, 0]

        def is_training():
            nonlocal found, before
            sizes = [_size(self.network.temporary / f"forward-{rank}.marks") for rank in range(2)]
            if (now := self.network.next_window() - 1) != found:
                found, before = now, sizes
            if found < first or "claimed" not in self.network.steps(VICTIM, found):
                return False
            return all(size - old >= marks for size, old in zip(sizes, before, strict=True))

        self.network.wait(is_training, f"{VICTIM} trains in window {first}")
        return found

    def _processes(self):
        """Launcher and ranks."""
        launcher = psutil.Process(self.network.process(f"worker of {VICTIM}").pid)
        ranks = {f"rank {child.environ()['RANK']}": child for child in launcher.children()}
        group = {"launcher": launcher, **ranks}
        self.seen |= {identity for each in group.values() if (identity := ProcessIdentity.of(each.pid))}
        assert group.keys() == {"launcher", "rank 0", "rank 1"}
        return group

    def _inject(self, kind, victims):
        if kind == "out of memory":
            self._no_memory.touch()
            return
        name, _, fault = kind.rpartition(" ")
        victims[name].send_signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)

    def _wait_for_end(self, window):
        self.network.wait(lambda: self.network.is_final(VICTIM, window), f"the run of window {window} has ended")

    def _was_late(self, window):
        """Whether the victim had no time to train in a window."""
        return f"[{Reason.NO_TIME_LEFT}]" in str(self.network.state(VICTIM, window).message)

    def _outcome(self, kind, window, marks):
        network, after = self.network, window + 1
        self._wait_for_end(after)
        after += self._was_late(after)
        network.wait(lambda: network.view.row(after), f"window {after} is scored")
        self._wait_for_end(after)
        evidence, states = network.view._evidence(after), [network.state(VICTIM, each) for each in (window, after)]
        records = {} if evidence is None else {record.uid: record for record in evidence.miners}
        outcome = Outcome(
            kind,
            window,
            marks,
            str(states[0].name),
            str(states[0].message),
            tuple(network.history(network.run(VICTIM, window))),
            after,
            str(states[1].name),
            str(states[1].message),
            records[network.uids[VICTIM]].facts.payload_sha256 is not None,
        )
        with (self.network.temporary.parent / "outcomes").open("a") as notes:
            notes.write(json.dumps(asdict(outcome)) + "\n")
        return outcome


def _size(file):
    try:
        return file.stat().st_size
    except FileNotFoundError:  # the job is over
        return 0


def main(folder, number, seconds=WINDOWS["blocks_per_window"]):
    """Inject faults, take the network down, and print what came of it; blocks take a second."""
    faults = RankFaults(folder, {"blocks_per_window": seconds})
    with faults.up():
        outcomes = faults.inject(number)
        last = faults.settle()
        roots = {each: faults.network.view.roots(each) for each in range(faults.network.first_window, last + 1)}
        weights = faults.network.view.chain.weights()
        still_open = faults.network.open_runs()
    report = {
        "faults": {kind: sum(each.kind == kind for each in outcomes) for kind in KINDS},
        "late": sum(each.next_window > each.window + 1 for each in outcomes),
        "windows": len(roots),
        "roots_by_window": sorted({len(set(each.values())) for each in roots.values()}),
        "last_roots": roots[last],
        "victim_uid": faults.network.uids[VICTIM],
        "weights": weights,
        "open_runs": still_open,
        "orphans": faults.orphans(),
        "leftovers": faults.leftovers(),
    }
    sys.stdout.write(json.dumps({"outcomes": [asdict(each) for each in outcomes]}, indent=1) + "\n")
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(each) for each in sys.argv[2:]))
