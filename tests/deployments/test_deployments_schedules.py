"""The scheduled flows of a neuron on a real Prefect server: what a schedule makes, and what is told if it does not."""

import itertools
import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.schedules import CronSchedule

from benchmarks.day import due_times
from deployments import clock, register, schedules
from deployments.clock import ServiceWatch
from deployments.neuron import doctor, status
from deployments.neuron.folder import Address
from deployments.processes import PROJECT_ROOT, program, start_child
from deployments.register import deploy_scheduled, worker_command
from deployments.register import register as register_neuron
from deployments.schedules import EPOCH, HOUR, HOUSEKEEPING_POOL, deployments_of, next_run, scheduled_work, stalled
from docs import prefect_files
from tasks.alerts import Alert, Raised
from templar.errors import PermanentError, Reason
from templar.hparams import load_hparams
from tests.support.operator import wait_until
from tests.support.prepared import PreparedNetwork

EVERYBODY = {
    *("bucket-cleanup", "temporary-cleanup", "validate-storage-access", "local-cleanup"),
    *("leaderboard", "shard-rotation"),  # of a dataset of shards
}
FLOWS = {
    "miner": EVERYBODY | {"private-backup"},
    "validator": EVERYBODY | {"checkpoint", "evaluate-checkpoint"},
    "aggregator": EVERYBODY | {"checkpoint", "evaluate-checkpoint", "public-page"},
}
ROLE_OF = dict(zip(sorted(EVERYBODY), itertools.cycle(FLOWS), strict=False)) | {
    "private-backup": "miner",
    "checkpoint": "validator",
    "evaluate-checkpoint": "aggregator",
    "public-page": "aggregator",
}
"""Whose schedule runs each flow once."""
SHARDS = {"layout": "shards", "samples_per_page": 4, "pages_per_window": 2}
MEMBERS = {"miner": "lazy", "validator": "validator", "aggregator": "aggregator"}
BETWEEN, AGAIN = timedelta(seconds=2), timedelta(minutes=3)
"""Between the first runs of two schedules, each of which is a process, and until the second run of each: a server that
looks at new schedules later than their first run is due plans the second one."""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return PreparedNetwork(tmp_path_factory.mktemp("schedules"), data=SHARDS)


def by_flow(client, neuron):
    flows = {flow.id: flow.name for flow in client.read_flows()}
    return {flows[each.flow_id]: each for each in deployments_of(client, neuron)}


def looks_of(client, neuron):
    """What deployments of a neuron say, by flow."""
    return {
        flow: (
            *(each.name, each.entrypoint, each.description, each.parameters, sorted(each.tags), each.work_pool_name),
            [(plan.slug, plan.schedule.interval, plan.schedule.anchor_date, plan.active) for plan in each.schedules],
        )
        for flow, each in by_flow(client, neuron).items()
    }


@pytest.fixture(scope="class")
def neurons(network, prefect_server, tmp_path_factory):
    """The name of a neuron of each role, whose schedules have their first run one after the other, soon."""
    names, work_of, soon = {role: f"soon-{role}" for role in FLOWS}, scheduled_work, timedelta(seconds=15)

    def shortly(role, hparams, *, hour):
        nonlocal soon
        for work in work_of(role, hparams, hour=hour):
            if ROLE_OF[work.flow.replace("_", "-")] != role:
                continue
            after = (datetime.now(UTC) - EPOCH + soon) % AGAIN
            soon += BETWEEN
            yield replace(work, every=AGAIN, after=after)

    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with prefect_server.configured(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(register, "scheduled_work", shortly)
        for role, name in names.items():
            block = network.block(MEMBERS[role])
            Path(block.home).mkdir(parents=True, exist_ok=True)  # as the neuron's first start has made it
            register_neuron(name, block)
            deploy_scheduled(name, block, hour=timedelta(seconds=1))
        command, env = worker_command(HOUSEKEEPING_POOL, "process"), prefect_server.environment
        worker = start_child("housekeeping", command, log=log, env=env, cwd=PROJECT_ROOT)
        yield names
        worker.stop()
        with prefect_server.client() as client:
            for name in names.values():
                for deployment in deployments_of(client, name):
                    client.delete_deployment(deployment.id)


class TestRuns:
    """One worker runs what the schedules of neurons make; nobody starts anything."""

    @pytest.mark.slow
    @pytest.mark.timeout(400)
    @pytest.mark.parametrize("flow", ROLE_OF)
    def test_a_schedule_makes_a_run_of_each_flow(self, flow, neurons, prefect_server):
        """The network has no window yet, so that some of it finds nothing to do and says so by a reason."""
        role = ROLE_OF[flow]
        with prefect_server.client() as client:
            deployment = by_flow(client, neurons[role])[flow]

            def made():
                runs = schedules.runs_until(client, datetime.now(UTC))
                ours = [run for run in runs if run.deployment_id == deployment.id and run.auto_scheduled]
                return [run for run in ours if run.state is not None and run.state.is_final()]

            what = f"a planned run of {flow} of the {role} has ended"
            wait_until(lambda: made() != [], what, patience_seconds=300, poll_seconds=0.5)
            run = made()[0]
        assert run.start_time is not None
        assert run.state.is_completed() or f"[{Reason.OBJECT_MISSING}]" in run.state.message, run.state.message


class TestDeployed:
    @pytest.fixture
    def deployed(self, network, prefect_server, request):
        """Deploys the scheduled work of a neuron of a role; its name."""
        names = []

        def deploy(role, name=""):
            name = name or f"{role}-{uuid4().hex[:8]}"
            names.append(name)
            deploy_scheduled(name, network.block(MEMBERS[role]))
            return name

        with prefect_server.configured():
            yield deploy
            with prefect_server.client() as client:
                for name in names:
                    for deployment in deployments_of(client, name):
                        client.delete_deployment(deployment.id)

    @pytest.mark.parametrize("role", FLOWS)
    def test_a_neuron_gets_the_flows_of_its_role(self, role, deployed, prefect_server, network):
        neuron, hparams = deployed(role), network.hparams
        with prefect_server.client() as client:
            found = by_flow(client, neuron)
        assert found.keys() == FLOWS[role]
        for deployment in found.values():
            assert deployment.parameters == {"neuron": neuron}
            assert sorted(deployment.tags) == [f"neuron:{neuron}", f"role:{role}"]
            assert deployment.work_pool_name == HOUSEKEEPING_POOL
            assert deployment.global_concurrency_limit is None, "its lease might be lost with worker and server"
        if "checkpoint" in found:
            windows = hparams.storage.checkpoint_frequency
            for flow in ("checkpoint", "evaluate-checkpoint"):
                (schedule,) = found[flow].schedules
                assert (schedule.slug, schedule.active) == (f"every-{windows}-windows", True)
                assert schedule.schedule.interval.total_seconds() == pytest.approx(windows * hparams.windows.seconds)

    @pytest.mark.slow
    def test_prefect_deploy_in_the_checkout_deploys_what_register_does(self, prefect_server):
        """`prefect deploy --all` reads prefect.yaml; the files of the other roles are written from the same lines."""
        for role, file in prefect_files.FILES.items():
            assert file.read_text() == prefect_files.text(role), "run `python -m docs.prefect_files`"
        name, block = prefect_files.NEURON, SimpleNamespace(role="miner", hparams=lambda: load_hparams("150M"))
        with prefect_server.configured(), prefect_server.client() as client:
            for pool, kind in ((f"neuron-{name}", "resident"), (HOUSEKEEPING_POOL, "process")):
                register.ensure_pool(client, pool, kind)
            command, env = [program("prefect"), "--no-prompt", "deploy", "--all"], prefect_server.environment
            subprocess.run(command, cwd=PROJECT_ROOT, env=env, check=True, capture_output=True)
            deployed = looks_of(client, name)
            for deployment in deployments_of(client, name):
                client.delete_deployment(deployment.id)
            register.deploy_window(name, "miner", f"neuron-{name}")
            deploy_scheduled(name, block)
            register.deploy_by_hand(name, "miner")
            assert looks_of(client, name) == deployed
            assert deployed.keys() == FLOWS["miner"] | {"miner-window", "bucket-purge", "audit-window"}

    def test_the_server_plans_what_is_due_and_a_second_time_changes_nothing(self, deployed, prefect_server):
        now, neuron = datetime.now(UTC), deployed("miner")
        with prefect_server.client() as client:

            def due():
                return {
                    flow: list(due_times(each, now, now + 25 * HOUR)) for flow, each in by_flow(client, neuron).items()
                }

            def all_is_planned():  # what became due meanwhile is not planned again
                runs = {flow: next_run(client, each) for flow, each in by_flow(client, neuron).items()}
                return all(run and run.expected_start_time in first[flow] for flow, run in runs.items())

            first = due()
            wait_until(all_is_planned, "all of it is planned")
            deployed("miner", neuron)
            assert due() == first
            wait_until(all_is_planned, "the same is planned as before")

    def test_what_an_operator_has_set_stays(self, deployed, prefect_server):
        neuron = deployed("validator")
        with prefect_server.client() as client:
            evaluation = by_flow(client, neuron)["evaluate-checkpoint"]
            parameters = {"neuron": neuron, "tasks": ["arc_easy"]}
            client.update_deployment(evaluation.id, DeploymentUpdate(parameters=parameters))
            (schedule,) = evaluation.schedules
            client.update_deployment_schedule(evaluation.id, schedule.id, active=False)
            added = [CronSchedule(cron="1 1 1 1 *"), CronSchedule(cron="37 * * * *")]
            checkpoint = by_flow(client, neuron)["checkpoint"]
            for each, slug in zip(added, ("my-own", "hourly"), strict=True):
                made = DeploymentScheduleCreate(schedule=each, slug=slug)
                client.create_deployment_schedules(checkpoint.id, [made])
            deployed("validator", neuron)
            again = by_flow(client, neuron)
        assert again["evaluate-checkpoint"].parameters == parameters
        assert [each.active for each in again["evaluate-checkpoint"].schedules] == [False]
        assert [each.active for each in again["checkpoint"].schedules] == [True, True]
        assert {each.slug for each in again["checkpoint"].schedules} == {checkpoint.schedules[0].slug, "my-own"}

    def test_a_schedule_without_a_planned_run_is_told_and_one_that_no_worker_takes(
        self, deployed, prefect_server, monkeypatch
    ):
        neuron = deployed("validator")
        assert stalled([neuron]) == [], "it is new: nothing need be planned yet"
        monkeypatch.setattr(schedules, "PLANNING", timedelta(0))
        wait_until(lambda: stalled([neuron]) == [], "all of it is planned")
        with prefect_server.client() as client:
            deployment = by_flow(client, neuron)["leaderboard"]

            def unplan():
                """The scheduler plans the runs again once a minute: it may be faster than this look."""
                while (run := next_run(client, deployment)) is not None:
                    client.delete_flow_run(run.id)
                return stalled([neuron])

            told: list[tuple[str, str]] = []
            wait_until(lambda: told.extend(unplan()) or told != [], "the schedule without a run is told")
            whose, line = told[0]
            assert whose == neuron
            assert line.startswith(f"leaderboard/{neuron} has an active schedule and no planned run")
            server = Address(prefect_server.server.api_url)

            def is_not_green():
                unplan()
                return not status.is_green({"runs": True, **status._found([], [], server, [neuron], asks=True)})

            def is_diagnosed():
                unplan()
                try:
                    doctor._scheduled(neuron, server)
                except PermanentError as error:
                    is_told = f"leaderboard/{neuron} has an active schedule" in str(error)
                    return error.reason is Reason.SCHEDULE_STALLED and is_told
                return False

            wait_until(is_not_green, "the status tells it")
            wait_until(is_diagnosed, "the doctor tells it")
            # What nobody takes: checkpoints are due every few seconds here, and no worker serves the pool.
            monkeypatch.setattr(schedules, "LATEST", timedelta(seconds=-7200))
            lines = [line for _, line in stalled([neuron])]
            assert any(line.startswith(f"checkpoint/{neuron} was due at ") for line in lines)
            assert all("no worker takes it" in line for line in lines if "was due at" in line)
            # A schedule that was paused owes nothing.
            for each in by_flow(client, neuron).values():
                for schedule in each.schedules:
                    client.update_deployment_schedule(each.id, schedule.id, active=False)
        assert stalled([neuron]) == []


class TestTimes:
    @given(st.text("abcdefgh-0123456789", min_size=1), st.sampled_from(sorted(FLOWS)), st.sampled_from([1.0, 20.0]))
    @settings(max_examples=50)
    def test_neurons_are_shifted_and_each_stays_in_its_hour(self, neuron, role, faster):
        hour = HOUR / faster
        for work in scheduled_work(role, load_hparams("local-shards"), hour=hour):
            schedule = work.schedule(neuron, hour)
            shift = schedule.anchor_date - EPOCH - work.after
            assert timedelta(0) <= shift <= min(hour / 6, work.every / 4)
            assert work.schedule(neuron, hour).anchor_date == schedule.anchor_date
            assert work.after < max(work.every, hour)

    def test_checkpoints_are_measured_between_two_of_them(self):
        work = {each.flow: each for each in scheduled_work("validator", load_hparams("150M"))}
        publish, measure = (work[flow].schedule("any") for flow in ("checkpoint", "evaluate_checkpoint"))
        assert publish.interval == measure.interval == timedelta(seconds=10 * 1500)
        assert (measure.anchor_date - publish.anchor_date) % publish.interval == publish.interval / 2


def test_the_operator_is_told_once_of_what_does_not_happen_by_itself(monkeypatch, tmp_path):
    """At the second look that finds it: a schedule that is being changed has no planned run for a moment."""
    log = tmp_path / "server.log"
    wrong, told = [("one", "checkpoint/one does not fire")], []
    monkeypatch.setattr(clock, "stalled", lambda neurons: list(wrong))
    monkeypatch.setattr(clock, "send", lambda neuron, raised: told.append((neuron, *raised)))
    watch = ServiceWatch(["one", "two"], log)
    watch.look()
    assert told == []
    for _ in range(3):
        watch.look()
    schedule = Raised(Alert.SCHEDULE_STALLED, Reason.SCHEDULE_STALLED, "checkpoint/one does not fire")
    assert told == [("one", schedule)]
    # It is mended, and an error is repeated instead; then the first one is there again.
    wrong.clear()
    log.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')}.123 | ERROR   | docket - it failed\n" * 3)
    for _ in range(3):
        watch.look()
    errors = Raised(Alert.SERVER_ERRORS, Reason.SERVER_ERRORS, f"{log} repeats an error: docket - it failed")
    assert told[1:] == [("one", errors), ("two", errors)]
    wrong.append(("one", "checkpoint/one does not fire"))
    for _ in range(3):
        watch.look()
    assert told[3:] == [("one", schedule)]
