"""Kills of a network's processes: `python -m tests.support.process_kills FOLDER KILLS [--seed N] [--blocks N]`.

Every process of a local network is killed with SIGKILL at random moments and started again at once: the workers of its
neurons, which run windows in their own process, the housekeeping worker and the processes of its runs, the clock, the
Prefect server and the S3 endpoint. A power cut takes server, housekeeping worker and a run of it together, as soon as
the run has its place in its deployment's limit. Kills come in rounds. The moments of a round are drawn over one window
and a half, each at another process; then one window passes without a kill, and everything is judged:

* every neuron does that window, or the one after it and has a reason for the one that it missed;
* every window's run has ended, and what a neuron missed has a reason code; no run of another flow is left open;
* all nodes that proved a window have one root, and all of them prove the last window of a round;
* every deployment whose run was hit completes a run once more;
* an audit gets the validator's evidence of every window from public objects: same facts, scores and weights;
* each running process is the network's, and none is left when it is down.

A miner of a network of processes draws a secret order of its data, so two runs of one seed have different payloads and
roots: there is no run without kills whose final root could be compared. Instead, all nodes must have one root after
every window, and `templar model verify`, which replays all windows from the genesis out of public objects, must get the
root that was proved. Equal roots with and without kills are tested where training repeats itself, on simulated time,
in `tests/neuron/test_neuron_kills.py` and `tests/simulate`.

The S3 endpoint is rclone over a folder: the embedded one has all objects in memory, and a kill would lose every bucket.
Ranks of a trainer are killed by `tests.support.rank_faults`.
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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from unittest import mock
from uuid import UUID

from dotenv import dotenv_values

from deployments import supervisor
from deployments.local import prepare
from deployments.local.bringup import CLOCK, STORAGE, LocalNetwork
from deployments.prefect_server import SERVER_NAME
from deployments.processes import PROJECT_ROOT, Child, ProcessIdentity, start_child
from deployments.s3_endpoint import BucketKeys, EndpointAdmin
from tasks.observing import auditing, network_from_environment
from templar.audit.evidence_audit import Auditor
from templar.errors import PermanentError, Reason
from templar.timeline import first_block, window_of
from tests.support.commands import installed
from tests.support.live_network import LiveNetwork, is_free
from tests.support.operator import wait_until
from tests.support.servers import random_key

BLOCKS = 30
"""Seconds of a window: long enough for workers that start afresh, several at once, on two cores."""
TRAINING = {"inner_steps": 600}
"""Seconds, so that kills hit them."""
STORAGE_RULES = {"retention_windows": 400}
"""The replay at the end needs every window."""
NEURONS = {
    "default": "miner",
    "miner-2": "miner",
    "lazy": "miner",
    "validator": "validator",
    "aggregator": "aggregator",
}
"""Neuron -> target."""
HOUSEKEEPING = "housekeeping worker"
SERVERS = {CLOCK: "clock", SERVER_NAME: "Prefect server", STORAGE: "S3 endpoint"}
"""Process -> target."""
RUN, POWER = "scheduled run", "power cut"
DECK = (*NEURONS, *SERVERS, HOUSEKEEPING, RUN, POWER)
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
    name: str  # of the process, or of the run's deployment
    window: int  # that was open
    second: float  # of that window
    steps: tuple[str, ...] = ()  # that the journal of a killed neuron had of that window
    joined: int | None = None  # the window that every neuron it concerns did, the next or the one after
    late: bool = False  # it was the one after
    run_state: str | None = None  # how a scheduled run ended
    holds: bool = True
    run: UUID | None = field(default=None, repr=False)


@dataclass
class Findings:
    windows: int = 0
    runs: Counter[str] = field(default_factory=Counter)  # by final state
    misses: Counter[str] = field(default_factory=Counter)  # by reason
    audited: int = 0
    unscored: list[int] = field(default_factory=list)  # windows without evidence
    stuck: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # everything else that is against the rules


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
        self._audited = 0
        self._auditor: Auditor

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
            environment = {name: str(value) for name, value in dotenv_values(self.network.plan.network_env).items()}
            self._auditor = stack.enter_context(auditing(network_from_environment(environment).config, None))
            self._judged = self._audited = self.network.first_window - 1
            yield

    def inject(self, number):
        """Kill so many processes, and judge after each round; a line is printed for each kill."""
        network, first = self.network, self.network.first_window
        windows = range(first, first + 5)
        network.wait(
            lambda: any(network.view.roots(each).keys() == network.names for each in windows),
            "all take part",
            poll_seconds=POLL_SECONDS,
        )
        while left := number - len(self.kills):
            kills = self._round(min(left, KILLS_PER_ROUND))
            self.kills += kills
            for kill in kills:
                print(json.dumps({name: value for name, value in asdict(kill).items() if name != "run"}), flush=True)

    def settle(self):
        """Let windows pass without a kill until all of them are final, and end the runs; the last that was judged."""
        network, last = self.network, self._judged
        for name in sorted({kill.name for kill in self.kills if kill.run}):
            self._expect(self._runs_again(name), f"{name} does not complete after its kills")
        network.wait(lambda: self._newest_final() >= last, f"window {last} is final", poll_seconds=POLL_SECONDS)
        self._audit(last)
        network.stop_clock()
        return last

    def _newest_final(self):
        return window_of(self.network.view.chain.block(), self.network.view.hparams.windows) - 2

    # Kills.

    def _round(self, number):
        network, clock, rules = self.network, self.network.view.chain.clock, self.network.view.hparams.windows
        start, victims = clock.now(), [self._draw()]
        while len(victims) < number:
            victims += [each for each in [self._draw()] if each not in victims]
        moments = sorted(self.random.uniform(0, SPAN_WINDOWS * rules.seconds) for _ in victims)
        kills = []
        for moment, victim in zip(moments, victims, strict=True):
            network.wait(lambda moment=moment: clock.now() >= start + moment, "the moment has come")
            strikes = {POWER: self._cut_power, RUN: self._kill_run, HOUSEKEEPING: self._kill_run}
            kills.append(strikes.get(victim, self._kill_process)(victim))
        self._judge(kills, network.next_window())
        return kills

    def _draw(self):
        if not self._deck:
            self._deck = [*DECK]
            self.random.shuffle(self._deck)
        return self._deck.pop()

    def _kill_process(self, victim):
        name = f"worker of {victim}" if victim in NEURONS else victim
        window, second = self._moment()
        steps = tuple(sorted(self.network.steps(victim, window))) if victim in NEURONS else ()
        self._strike(name)
        return Kill(NEURONS.get(victim) or SERVERS[victim], name, window, round(second, 2), steps)

    def _kill_run(self, victim):
        """Kill the process of a run of the housekeeping worker, that worker, or both at once."""
        self.network.wait(self.network.plan.server.healthy, "the server answers")
        both = victim == HOUSEKEEPING and self.random.random() < 0.5
        begun = self.random.random() < 0.5  # the flow itself runs, or is still being loaded
        run, name, process = self._started_run(begun)
        window, second = self._moment()
        if victim == HOUSEKEEPING:
            self._strike(HOUSEKEEPING, *([process] if both else []))
        else:
            self._end(process)
        target = RUN if victim == RUN else f"worker{' and its run' if both else ''}"
        return Kill(target, name, window, round(second, 2), run=run)

    def _cut_power(self, victim):
        """Kill server, housekeeping worker and what there is of a run at once, when the run has taken its place.

        The worker may not have put its name on the run yet.
        """
        network = self.network
        network.wait(network.plan.server.healthy, "the server answers")
        name = self.random.choice(RUNS)
        run = network.start_run(name)
        network.wait(
            lambda: not network.client.read_flow_run(run).state.is_scheduled(), f"the run of {name} has its place"
        )
        window, second = self._moment()
        self._strike(SERVER_NAME, *filter(None, [network.process(HOUSEKEEPING), self._process_of(run)]))
        network.wait(network.plan.server.healthy, "the server answers")
        network.record.add(self._starts[HOUSEKEEPING]())
        return Kill(victim, name, window, round(second, 2), run=run)

    def _started_run(self, begun):
        """A run of the housekeeping worker that is under way, the name of its deployment, and its process."""
        network, names = self.network, [*RUNS]
        self.random.shuffle(names)
        for wanted, name in product((begun, False), names):
            run = network.start_run(name)

            def is_seen(run=run, wanted=wanted):
                state = network.client.read_flow_run(run).state
                return state.is_final() or (self._process_of(run) is not None and (state.is_running() or not wanted))

            network.wait(is_seen, f"the run of {name} is under way", poll_seconds=POLL_SECONDS)
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
            os.kill(victim.pid, signal.SIGKILL)
        self.network.wait(lambda: not any(victim.alive for victim in victims), "they are dead")

    def _moment(self):
        chain, rules = self.network.view.chain, self.network.view.hparams.windows
        window = self.network.next_window() - 1
        return window, chain.clock.now() - chain.block_time(first_block(window, rules), finalized=False)

    # What is left of them.

    def _judge(self, kills, calm):
        """Judge a round whose first window without a kill is this one."""
        network, found = self.network, self.found
        network.wait(network.plan.server.healthy, "the server answers")
        done = self._done_in(calm)
        last = calm if done == {*NEURONS} else calm + 1
        late = done if last == calm else self._done_in(last)
        for kill in kills:
            if kill.run is not None:
                kill.run_state = self._end_of(kill.run)
                kill.holds = kill.run_state is not None
                continue
            name = kill.name.removeprefix("worker of ")
            concerned = {name} & {*NEURONS} or {*NEURONS}
            kill.late = not concerned <= done
            kill.joined = (last if kill.late else calm) if concerned <= done | late else None
            kill.holds = kill.joined is not None
        self._expect(
            self._waited(lambda: network.view.roots(last).keys() == network.names),
            f"window {last}: not every node has proved it",
        )
        for window in range(self._judged + 1, last + 1):
            self._judge_window(window)
        self._judged = last
        self._audit(min(last, self._newest_final()))
        if not self._waited(lambda: not network.orphans()):
            found.orphans += network.orphans()

    def _done_in(self, window):
        """The neurons that did a window; all runs of it have ended, or are noted as stuck."""
        network = self.network
        ended = {name: self._waited(lambda name=name: network.is_final(name, window)) for name in NEURONS}
        return {name for name, it in ended.items() if it and network.state(name, window).name == "Completed"}

    def _judge_window(self, window):
        """Read how the runs of a window ended, and compare the roots."""
        network, found = self.network, self.found
        found.windows += 1
        for name in NEURONS:
            if not self._waited(lambda name=name: network.is_final(name, window)):
                found.stuck += [f"{name} window {window}: {[run.state_name for run in network.runs(name, window)]}"]
                continue
            state = network.state(name, window)
            found.runs[str(state.name)] += 1
            if state.name == "Completed":
                continue
            reasons = [each for each in REASON.findall(str(state.message)) if each in {*Reason}]
            if reasons:
                found.misses[reasons[0]] += 1
            elif state.name == "Crashed" and "finished" in network.steps(name, window):
                found.misses["finished, and its report was lost"] += 1
            else:
                found.problems.append(f"{name} window {window} is {state.name} without a reason: {state.message}")
        roots = network.view.roots(window)
        self._expect(len(set(roots.values())) <= 1, f"window {window} has several roots: {roots}")

    def _audit(self, last):
        """Audit the windows up to this one that were not audited yet, and compare the replayed roots."""
        for window in range(self._audited + 1, last + 1):
            try:
                audit = self._auditor.audit(window)
            except PermanentError as error:
                if error.reason is not Reason.EVIDENCE_MISSING:
                    raise
                self.found.unscored.append(window)
                self._auditor.bring_to(window - 1)
            else:
                self.found.audited += 1
                self._expect(audit.verified, audit.summary)
            before = self._auditor.node.state
            proved = set(self.network.view.roots(before.window).values())
            self._expect(proved <= {before.root}, f"window {before.window}: replay has {before.root}, nodes {proved}")
        self._audited = max(self._audited, last)

    def _end_of(self, run):
        def state():
            return self.network.client.read_flow_run(run).state

        def has_ended():
            return state().is_final()

        if self._waited(has_ended) or self._waited(has_ended):  # one that nobody began is closed after five minutes
            return str(state().name)
        self.found.stuck.append(f"{self.network.client.read_flow_run(run).name}: {state().name}")
        return None

    def _runs_again(self, deployment):
        return self._waited(lambda: self.network.end_of_a_run(deployment).name in ("Completed", "Skipped"))

    def _expect(self, holds, problem):
        self.found.problems += [] if holds else [problem]

    def _waited(self, condition):
        try:
            self.network.wait(condition, "it holds", poll_seconds=POLL_SECONDS)
        except TimeoutError:
            return False
        return True


@contextmanager
def _lasting_storage(buckets):
    """Let a local network have an S3 endpoint whose objects, in this folder, outlive its process."""
    key, announced = random_key(), "Starting s3 server on "

    def start_storage(network):
        plan = network.plan
        buckets.mkdir()
        address = f"127.0.0.1:{plan.storage_port}"
        command = [installed("rclone"), "serve", "s3", str(buckets), "--addr", address, "--config", ""]
        command += ["--auth-key", f"{key.access_key_id},{key.secret_access_key}"]
        network._start(STORAGE, command, announces=announced)
        EndpointAdmin(plan.storage_url, key).save(plan.admin_file)

    def make_bucket(_, account):
        (buckets / account).mkdir()
        return BucketKeys(account, key, key)

    with (
        mock.patch.object(LocalNetwork, "_start_storage", start_storage),
        mock.patch.object(prepare, "create_bucket_with_keys", make_bucket),
    ):
        yield


def replayed(network, window):
    command = [sys.executable, "-m", "deployments", "model", "verify", "--window", str(window)]
    command += ["--env-file", str(network.plan.network_env)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def summary_of(kills, number, verified, seconds):
    found, done = kills.found, kills.kills
    replays = verified.startswith("verified: from the genesis ")
    wrong = [*found.stuck, *found.orphans, *found.problems]
    return {
        "kills": len(done),
        "by_target": Counter(kill.target for kill in done),
        "recovered": sum(kill.holds for kill in done),
        "joined_late": sum(kill.late for kill in done),
        **vars(found),
        "replay": verified,
        "wall_seconds": round(seconds),
        "holds": replays and not wrong and len(done) == number and all(kill.holds for kill in done),
    }


def run(folder, number, *, seed=1, blocks=BLOCKS):
    began, kills, verified = time.monotonic(), ProcessKills(folder, seed=seed, blocks=blocks), "not replayed"
    with kills.up():
        try:
            kills.inject(number)
            verified = replayed(kills.network, kills.settle())
        except TimeoutError as error:
            kills.found.problems.append(str(error))
    try:
        wait_until(lambda: not kills.network.orphans(), "no process is left")
    except TimeoutError:
        kills.found.orphans += kills.network.orphans()
    return summary_of(kills, number, verified, time.monotonic() - began)


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
