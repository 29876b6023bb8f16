"""Kills of a network's processes: `python -m tests.support.process_kills FOLDER KILLS [--seed N] [--blocks N]`.

Every process of a local network is killed with SIGKILL at random moments and started again at once: the workers of its
neurons, the housekeeping worker and the processes of its runs, the clock, the Prefect server and the S3 endpoint. A
power cut takes server, housekeeping worker and a run of it together. Kills come in rounds. The moments of a round are
drawn over one window and a half, each at another process; then one window passes without a kill, and everything is
judged:

* every neuron does that window, or the one after it;
* every window's run has ended, and what a neuron missed has a reason code; the runs that were hit have ended;
* all nodes that proved a window have one root, and all of them prove the last window of a round;
* in the end every deployment whose run was hit completes a run, `templar model verify` replays all windows from the
  genesis to the last root, `templar audit` finds no difference in any evidence, and no process is left.

A miner draws a secret order of its data, so two runs of one seed have different roots. Equal roots with and without
kills are tested where training repeats itself, on simulated time, in `tests/neuron/test_neuron_kills.py`.

The S3 endpoint is rclone over a folder: the embedded one has all objects in memory, and a kill would lose every bucket.
One JSON line per kill and one for all are printed; the exit status is 1 if something of this does not hold.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock
from uuid import UUID

from deployments import supervisor
from deployments.audit_window import DIFFERS
from deployments.local import prepare
from deployments.local.bringup import CLOCK, HOUSEKEEPING, STORAGE, LocalNetwork
from deployments.prefect_server import SERVER_NAME
from deployments.processes import PROJECT_ROOT, Child, ProcessIdentity, start_child
from deployments.s3_endpoint import BucketKeys, EndpointAdmin
from lab.gauntlet.endpoints import RCLONE_LISTENING, random_key
from templar.errors import Reason
from templar.timeline import first_block, window_of
from tests.support.commands import installed
from tests.support.live_network import LiveNetwork, is_free
from tests.support.operator import wait_until

BLOCKS = 30
"""Seconds of a window: long enough for workers that start afresh, several at once, on two cores."""
TRAINING = {"inner_steps": 600}
"""Seconds, so that kills hit them."""
STORAGE_RULES = {"retention_windows": 400}
"""The replay at the end needs every window."""
NEURONS = ("default", "miner-2", "lazy", "validator", "aggregator")
WITH_RUNS = ("scheduled run", HOUSEKEEPING, "power cut")
DECK = (*(f"worker of {name}" for name in NEURONS), CLOCK, SERVER_NAME, STORAGE, *WITH_RUNS)
RUNS = ("local-cleanup/default", "checkpoint/validator", "bucket-cleanup/validator", "private-backup/default")
"""What the housekeeping worker does when it is killed, or its run."""
KILLS_PER_ROUND = 6
SPAN_WINDOWS = 1.5
POLL_SECONDS = 0.5
"""Between two looks at the server, which has the same cores."""
REASON = re.compile(r"\[([a-z_]+)\]")


@dataclass
class Kill:
    target: str
    window: int  # that was open
    second: float  # of that window
    deployment: str = ""  # of the run that was hit
    run: UUID | None = field(default=None, repr=False)


@dataclass
class Findings:
    windows: int = 0
    runs: Counter[str] = field(default_factory=Counter)  # by final state
    misses: Counter[str] = field(default_factory=Counter)  # by reason
    problems: list[str] = field(default_factory=list)  # what is against the rules


class ProcessKills:
    """A network in a folder, and kills of its processes that are drawn from a seed."""

    def __init__(self, folder, *, seed, blocks):
        windows = {
            "blocks_per_window": blocks,
            "time_window_delta_seconds": 2 * blocks // 15,
            "roster_slot_seconds": blocks // 15,
        }
        self.network = LiveNetwork(folder, windows=windows, training=TRAINING, storage=STORAGE_RULES)
        self.random, self.found = random.Random(seed), Findings()
        self.kills: list[Kill] = []
        self._deck: list[str] = []
        self._starts: dict[str, Callable[[], Child]] = {}
        self._judged = 0  # the last window that was

    @contextmanager
    def up(self):
        """The network, as long as the context lasts; every start of a process of it is remembered."""

        def remembering(name, *arguments, **options):
            self._starts[name] = lambda: start_child(name, *arguments, **options)
            return self._starts[name]()

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(supervisor, "start_child", remembering))
            stack.enter_context(_lasting_storage(self.network.plan.buckets))
            stack.enter_context(self.network)
            self._judged = self.network.first_window - 1
            yield

    def inject(self, number):
        """Kill so many processes, and judge after each round; a line is printed for each kill."""
        network, first = self.network, self.network.first_window
        windows = range(first, first + 5)
        self._wait(lambda: any(network.view.roots(each).keys() == network.names for each in windows), "all take part")
        while left := number - len(self.kills):
            self._round(min(left, KILLS_PER_ROUND))

    def settle(self):
        """Let windows pass without a kill until all of them are final, and end the runs; the last that was judged."""
        for name in sorted({kill.deployment for kill in self.kills} - {""}):
            done = self._waited(lambda name=name: self.network.end_of_a_run(name).name in ("Completed", "Skipped"))
            self._expect(done, f"{name} does not complete after its kills")
        chain, rules = self.network.view.chain, self.network.view.hparams.windows
        self._wait(lambda: window_of(chain.block(), rules) - 2 >= self._judged, f"window {self._judged} is final")
        self.network.stop_clock()
        return self._judged

    # Kills.

    def _round(self, number):
        network, clock, rules = self.network, self.network.view.chain.clock, self.network.view.hparams.windows
        start, victims = clock.now(), list[str]()
        while len(victims) < number:
            if not self._deck:
                self._deck = self.random.sample(DECK, len(DECK))
            victims += {self._deck.pop()} - {*victims}
        moments = sorted(self.random.uniform(0, SPAN_WINDOWS * rules.seconds) for _ in victims)
        kills = []
        for moment, victim in zip(moments, victims, strict=True):
            network.wait(lambda moment=moment: clock.now() >= start + moment, "the moment has come")
            kills.append(self._kill(victim))
            print(json.dumps({name: value for name, value in asdict(kills[-1]).items() if name != "run"}), flush=True)
        self.kills += kills
        self._judge(kills, network.next_window())

    def _kill(self, victim):
        """Kill a process, or one of a run and those that the victim says beside it, and start it again."""
        run, deployment, process = self._started_run() if victim in WITH_RUNS else (None, "", None)
        window, second = self._moment()
        if victim == "scheduled run":
            self._end(process)
        elif victim == "power cut":
            self._strike(SERVER_NAME, self.network.process(HOUSEKEEPING), process)
            self._wait(self.network.plan.server.healthy, "the server answers")
            self.network.record.add(self._starts[HOUSEKEEPING]())
        else:
            self._strike(victim, *([process] if process and self.random.random() < 0.5 else []))
        return Kill(victim, window, round(second, 2), deployment, run)

    def _started_run(self):
        """A run of the housekeeping worker that is under way, its deployment, and its process."""
        network = self.network
        self._wait(network.plan.server.healthy, "the server answers")
        for name in self.random.sample(RUNS, len(RUNS)):
            run = network.start_run(name)

            def is_seen(run=run):
                return network.client.read_flow_run(run).state.is_final() or self._process_of(run) is not None

            self._wait(is_seen, f"the run of {name} is under way")
            if process := self._process_of(run):  # it may be over by now, or be refused beside another one
                return run, name, process
        raise TimeoutError("no scheduled run was caught while it ran")

    def _process_of(self, run):
        for process, environment in self.network.processes():
            if environment.get("PREFECT__FLOW_RUN_ID") == str(run):
                return ProcessIdentity.of(process.pid)
        return None

    def _strike(self, name, *others):
        """Kill a process of the record, and others with it, and start it again, as a supervisor does."""
        plan = self.network.plan
        self._end(self.network.process(name), *others)
        if (port := {SERVER_NAME: plan.prefect_port, STORAGE: plan.storage_port}.get(name)) is not None:
            self.network.wait(lambda: is_free(port), f"port {port} is free")
        self.network.record.add(self._starts[name]())

    def _end(self, *victims):
        for victim in victims:
            with suppress(ProcessLookupError):  # a run may have ended by itself
                os.kill(victim.pid, signal.SIGKILL)
        self.network.wait(lambda: not any(victim.alive for victim in victims), "they are dead")

    def _moment(self):
        chain, rules = self.network.view.chain, self.network.view.hparams.windows
        window = self.network.next_window() - 1
        return window, chain.clock.now() - chain.block_time(first_block(window, rules), finalized=False)

    # What is left of them.

    def _judge(self, kills, calm):
        """Judge a round whose first window without a kill is this one."""
        network = self.network
        self._wait(network.plan.server.healthy, "the server answers")
        done, last = self._done_in(calm), calm
        if done != {*NEURONS}:
            last = calm + 1
            done |= self._done_in(last)
        self._expect(done == {*NEURONS}, f"windows {calm} and {last}: done by {sorted(done)} alone")
        for run in (kill.run for kill in kills if kill.run is not None):
            # A run that nobody began is closed after five minutes.
            ended = self._waited(lambda run=run: network.client.read_flow_run(run).state.is_final(), times=2)
            self._expect(ended, f"the run {network.client.read_flow_run(run).name} is left open")
        proved = self._waited(lambda: network.view.roots(last).keys() == network.names)
        self._expect(proved, f"window {last}: not every node has proved it")
        for window in range(self._judged + 1, last + 1):
            self._judge_window(window)
        self._judged = last
        self._expect(self._waited(lambda: not network.orphans()), f"left over: {network.orphans()}")

    def _done_in(self, window):
        """The neurons that did a window."""
        network = self.network
        ended = {name for name in NEURONS if self._waited(lambda name=name: network.is_final(name, window))}
        return {name for name in ended if network.state(name, window).name == "Completed"}

    def _judge_window(self, window):
        """Read how the runs of a window ended, and compare the roots."""
        network, found = self.network, self.found
        found.windows += 1
        for name in NEURONS:
            if not self._waited(lambda name=name: network.is_final(name, window)):
                states = [run.state_name for run in network.runs(name, window)]
                found.problems.append(f"{name} window {window} has not ended: {states}")
                continue
            state = network.state(name, window)
            found.runs[str(state.name)] += 1
            if state.name == "Completed":
                continue
            reasons = [each for each in REASON.findall(str(state.message)) if each in {*Reason}]
            if state.name == "Crashed" and "finished" in network.steps(name, window):
                reasons = [*reasons, "finished, and its report was lost"]
            found.misses.update(reasons[:1])
            self._expect(reasons, f"{name} window {window} is {state.name} without a reason: {state.message}")
        roots = network.view.roots(window)
        self._expect(len(set(roots.values())) <= 1, f"window {window} has several roots: {roots}")

    def _expect(self, holds, problem):
        self.found.problems += [] if holds else [problem]

    def _wait(self, condition, what):
        self.network.wait(condition, what, poll_seconds=POLL_SECONDS)

    def _waited(self, condition, *, times=1):
        for _ in range(times):
            with suppress(TimeoutError):
                self._wait(condition, "it holds")
                return True
        return False


@contextmanager
def _lasting_storage(buckets):
    """Let a local network have an S3 endpoint whose objects, in this folder, outlive its process."""
    key = random_key()

    def start_storage(network):
        plan = network.plan
        buckets.mkdir()
        address = f"127.0.0.1:{plan.storage_port}"
        command = [installed("rclone"), "serve", "s3", str(buckets), "--addr", address, "--config", ""]
        command += ["--auth-key", f"{key.access_key_id},{key.secret_access_key}"]
        network._start(STORAGE, command, announces=RCLONE_LISTENING)
        EndpointAdmin(plan.storage_url, key).save(plan.admin_file)

    def make_bucket(_, account):
        (buckets / account).mkdir()
        return BucketKeys(account, key, key)

    with (
        mock.patch.object(LocalNetwork, "_start_storage", start_storage),
        mock.patch.object(prepare, "create_bucket_with_keys", make_bucket),
    ):
        yield


def asked(network, *words):
    """Exit status and last line of a command that reads the network's public objects."""
    command = [sys.executable, "-m", "deployments", *map(str, words), "--env-file", str(network.plan.network_env)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


def run(folder, number, *, seed=1, blocks=BLOCKS):
    began, kills, verified = time.monotonic(), ProcessKills(folder, seed=seed, blocks=blocks), "not replayed"
    network = kills.network
    with kills.up():
        try:
            kills.inject(number)
            last = kills.settle()
            _, verified = asked(network, "model", "verify", "--window", last)
            # 1: something differs; 2: a window has no evidence.
            status, said = asked(network, "audit", "--first", network.first_window, "--last", last)
            kills.found.problems += [said] if status == DIFFERS else []
        except TimeoutError as error:
            kills.found.problems.append(str(error))
    try:
        wait_until(lambda: not network.orphans(), "no process is left")
    except TimeoutError:
        kills.found.problems.append(f"left over: {network.orphans()}")
    is_whole = len(kills.kills) == number and verified.startswith("verified: from the genesis ")
    return {
        "kills": len(kills.kills),
        "by_target": Counter(kill.target for kill in kills.kills),
        **vars(kills.found),
        "replay": verified,
        "wall_seconds": round(time.monotonic() - began),
        "holds": is_whole and not kills.found.problems,
    }


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of a window, a second each; more where others work")
    arguments = parser.parse_args()
    summary = run(arguments.folder, arguments.kills, seed=arguments.seed, blocks=arguments.blocks)
    print(json.dumps(summary))
    return 0 if summary["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
