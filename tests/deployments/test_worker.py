"""The resident worker against a real server, in processes of its own."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from prefect.states import Cancelling, Failed, Pending, Running, Scheduled

from deployments.work_pool import MOST_ATTEMPTS, claim_pool
from deployments.worker import ResidentWorker
from templar.errors import PermanentError, Reason
from tests.support.errors import raising
from tests.support.operator import Operator, wait_until

POOL = "shared"


@pytest.fixture(scope="class")
def shared_worker(prefect_server, tmp_path_factory):
    """One worker for the tests that leave it as it was; it is told to take five runs at once, and must not."""
    with prefect_server.client() as client:
        operator = Operator(prefect_server, client, tmp_path_factory.mktemp("shared"))
        yield operator.worker(POOL, "--limit", "5", "--prefetch-seconds", "60", PREFECT_WORKER_HEARTBEAT_SECONDS="2")
        operator.stop_workers()


@pytest.mark.usefixtures("shared_worker")
class TestRuns:
    def test_module_state_and_thread_outlive_a_run(self, operator):
        for name in ("visit_async", "visit_sync", "visit_async"):
            assert operator.end_of(operator.run(name, POOL, name=name)).is_completed()
        seen = [note.split() for note in operator.notes]
        assert [name for name, *_ in seen] == ["visit_async", "visit_sync", "visit_async"]
        assert len({(token, pid, thread) for _, token, pid, _, thread in seen}) == 1
        counts = [int(count) for _, _, _, count, _ in seen]
        assert counts == list(range(counts[0], counts[0] + 3))

    def test_one_run_at_a_time_for_any_limit_of_the_command_line(self, operator):
        runs = [operator.run("work_for", POOL, seconds=0.5) for _ in range(3)]
        assert all(operator.end_of(run).is_completed() for run in runs)
        assert operator.notes == ["working", "finished"] * 3

    def test_plain_logging_of_the_domain_reaches_the_task_run(self, operator):
        run = operator.run("visit_async", POOL, name="logger")
        operator.end_of(run)

        def records():
            logs = operator.client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])))
            return [log.task_run_id for log in logs if log.message == "visited by logger"]

        wait_until(lambda: bool(records()), "the log record arrived")
        assert len(records()) == 1
        assert records()[0] is not None

    @pytest.mark.parametrize("busy", [False, True], ids=["waiting", "looping"])
    def test_cancelling_ends_in_cancelled_and_the_next_run_is_taken(self, operator, busy):
        run = operator.run("work_for", POOL, seconds=600.0, busy=busy)
        operator.await_note("working")
        operator.client.set_flow_run_state(run, Cancelling())
        state = operator.end_of(run)
        assert state.is_cancelled()
        assert state.message == "Cancelled between two steps."
        assert operator.notes == ["working"]
        assert operator.end_of(operator.run("work_for", POOL, seconds=0.0)).is_completed()

    def test_a_run_that_is_deleted_is_stopped(self, operator, shared_worker):
        run = operator.run("work_for", POOL, seconds=600.0)
        operator.await_note("working")
        operator.client.delete_flow_run(run)
        assert operator.end_of(operator.run("visit_async", POOL, name="next")).is_completed()
        assert shared_worker.exit_code is None

    def test_the_worker_survives_any_exception_of_a_flow(self, operator, shared_worker):
        assert operator.end_of(operator.run("raise_one", POOL, kind="ValueError")).is_failed()
        assert operator.end_of(operator.run("raise_one", POOL, kind="SystemExit")).is_crashed()
        assert operator.end_of(operator.run("raise_one_sync", POOL, kind="SystemExit")).is_crashed()
        assert operator.end_of(operator.run("visit_async", POOL, name="next")).is_completed()
        assert shared_worker.exit_code is None

    def test_a_module_that_cannot_be_imported_crashes_its_run_only(self, operator):
        missing = operator.end_of(operator.run("tests.support.no_such_module.flow", POOL))
        ends = operator.end_of(operator.run("tests.support.resident_exit.flow", POOL))
        assert missing.is_crashed()
        assert ends.is_crashed()
        assert "this module cannot be imported" in str(ends.message)
        assert operator.end_of(operator.run("visit_async", POOL, name="next")).is_completed()

    def test_a_heartbeat_closes_orphans_and_spares_its_own_run(self, operator):
        later = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=1))
        adrift, unwanted = (operator.run("visit_async", POOL, state=later, name="never") for _ in range(2))
        own = operator.run("work_for", POOL, seconds=4.0)
        operator.await_note("working")
        for run in (adrift, unwanted):
            operator.client.set_flow_run_state(run, Running(), force=True)
        operator.client.set_flow_run_state(unwanted, Cancelling())
        assert operator.end_of(unwanted).is_cancelled()
        assert operator.end_of(own).is_completed()
        operator.reach(adrift, lambda state: state.is_completed())  # nobody ran it, so it was started again
        assert "Crashed" in operator.history(adrift)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["restarted", "frozen"])
    def test_an_outage_of_the_server_harms_neither_run_nor_worker(self, operator, shared_worker, kind):
        run = operator.run("work_for", POOL, seconds=1.0)
        operator.await_note("working")
        if kind == "restarted":
            operator.server.kill()
            operator.await_note("finished")
            operator.server.start()
        else:
            operator.server.freeze()
            operator.await_note("finished")
            operator.server.thaw()
        assert operator.end_of(run).is_completed()
        assert operator.end_of(operator.run("visit_async", POOL, name="after")).is_completed()
        assert shared_worker.exit_code is None

    @pytest.mark.parametrize("variable", ["", "PREFECT_HOME", "HOME", "TMPDIR"])
    def test_a_second_worker_is_refused_with_one_line(self, operator, shared_worker, tmp_path, variable):
        """Also out of another shell, whose Prefect has another home."""
        another = {variable: str(tmp_path)} if variable else {}
        second = operator.start_worker(POOL, "--name", "another", **another)
        assert second.handle.wait() == 1
        holder = shared_worker.identity.pid
        assert second.log.read_text().startswith(f"[already_running] work pool {POOL!r} is served by process {holder} ")
        assert second.log.read_text().count("\n") == 1
        assert operator.end_of(operator.run("visit_async", POOL, name="after")).is_completed()

    def test_a_pool_that_is_not_there_is_refused_with_one_line(self, operator):
        worker = operator.start_worker_of("sharde")
        assert worker.handle.wait() == 1
        (line,) = worker.log.read_text().splitlines()
        assert line.startswith("[bad_environment] there is no work pool 'sharde'; those of type 'resident' are: ")
        assert f" {POOL}" in line
        assert line.endswith("`templar neuron register --name NAME` makes `neuron-NAME`")
        with pytest.raises(ObjectNotFound):
            operator.client.read_work_pool("sharde")

    def test_a_pool_of_another_machine_or_type_is_refused(self, operator):
        """Another machine has other locks: there the server tells of the worker."""

        async def claim(pool):
            async with PrefectClient(operator.server.server.api_url) as client:
                await claim_pool(client, pool, worker_type="resident", own_name="another")

        operator.client.create_work_pool(WorkPoolCreate(name="cold", type="process"))
        with raising(PermanentError, Reason.ALREADY_RUNNING, f"work pool {POOL!r} is served by worker '{POOL}@"):
            asyncio.run(claim(POOL))
        with raising(PermanentError, Reason.BAD_ENVIRONMENT, "work pool 'cold' is of type 'process'"):
            asyncio.run(claim("cold"))


def in_a_worker(operator, use):
    """Do something with a worker of this process."""

    async def run():
        async with ResidentWorker("unserved", limit=7) as worker:
            await use(worker)

    with temporary_settings({PREFECT_API_URL: operator.server.server.api_url, PREFECT_HOME: operator.folder}):
        asyncio.run(run())


def test_a_run_that_cannot_be_started_gives_its_place_back(operator):
    operator.client.create_work_pool(WorkPoolCreate(name="unserved", type="resident"))
    run = operator.client.read_flow_run(operator.run("visit_async", "unserved", name="never"))
    stray = run.model_copy(update={"deployment_id": uuid4()})

    async def submit(worker):
        assert worker.limiter.total_tokens == 1
        worker.limiter.acquire_on_behalf_of_nowait(stray.id)
        await worker._submit_run(stray)
        assert worker.limiter.available_tokens == 1

    in_a_worker(operator, submit)


@pytest.mark.parametrize(("name", "after"), [("NothingPublished", "NothingPublished"), ("Failed", "AwaitingRetry")])
def test_a_window_that_missed_what_it_owed_is_not_taken_up_again(operator, name, after):
    """Its flow returned the failure, so it took all steps; one that was interrupted goes on at the next start."""
    operator.client.create_work_pool(WorkPoolCreate(name=f"settled-{after.lower()}", type="resident"))
    run = operator.run("visit_async", f"settled-{after.lower()}", name="never", state=Failed(name=name))

    async def settle_after_a_stop(worker):
        worker._interrupted = True
        await worker._settle(run, None)

    in_a_worker(operator, settle_after_a_stop)
    assert operator.state(run).name == after


def test_a_run_whose_report_is_lost_is_taken_up_again_and_at_last_given_up(operator):
    operator.client.create_work_pool(WorkPoolCreate(name="unheard", type="resident"))
    run, after = operator.run("visit_async", "unheard", name="never"), []
    for _ in range(MOST_ATTEMPTS):
        operator.client.set_flow_run_state(run, Running())
        in_a_worker(operator, lambda worker: worker._settle(run, "no answer"))
        after.append(operator.state(run).name)
    assert after == [*["AwaitingRetry"] * (MOST_ATTEMPTS - 1), "Crashed"]
    assert operator.state(run).message == "[report_lost] The run ended without a report: no answer."


def test_sigterm_finishes_the_run_and_takes_no_other(operator):
    # A shell's background job ignores SIGINT, and the stock handler turns SIGTERM into SIGINT.
    worker = operator.worker("drained", prefix=("sh", "-c", 'trap "" INT; exec "$@"', "sh"))
    current = operator.run("work_for", "drained", seconds=1.0)
    waiting = operator.run("work_for", "drained", seconds=0.0)
    operator.await_note("working")
    worker.handle.terminate()
    assert worker.handle.wait() == 0
    assert operator.state(current).is_completed()
    assert operator.state(waiting).is_scheduled()
    assert operator.notes == ["working", "finished"]


@pytest.mark.slow
@pytest.mark.parametrize(("grace", "ends"), [(0.3, False), (600.0, True)])
def test_a_run_is_interrupted_after_its_grace_and_taken_up_again(operator, grace, ends):
    worker = operator.worker("interrupted")
    run = operator.run("resume_after", "interrupted", ends=ends, variables={"grace_seconds": grace})
    operator.await_note("working")
    worker.handle.terminate()
    assert worker.handle.wait() == 0
    state = operator.state(run)
    assert (state.is_scheduled(), state.name) == (True, "AwaitingRetry")
    assert "continues this run" in str(state.message)
    operator.worker("interrupted")
    assert operator.end_of(run).is_completed()
    assert operator.notes == ["working", "resumed"]


def test_a_second_signal_ends_the_grace(operator):
    worker = operator.worker("hurried")
    run = operator.run("work_for", "hurried", seconds=600.0, variables={"grace_seconds": 600.0})
    operator.await_note("working")
    worker.handle.terminate()
    wait_until(lambda: "Asked to stop" in worker.log.read_text(), "the first signal was heard")
    worker.handle.terminate()
    assert worker.handle.wait() == 0
    assert operator.state(run).name == "AwaitingRetry"


def test_a_run_that_does_not_stop_is_left_behind(operator):
    worker = operator.worker("stuck")
    run = operator.run("hang_for", "stuck", seconds=600.0, variables={"grace_seconds": 0.1, "stop_seconds": 0.3})
    operator.await_note("working")
    worker.handle.terminate()
    assert worker.handle.wait() == 1
    assert "did not stop: ending without it" in worker.log.read_text()
    assert operator.state(run).name == "AwaitingRetry"


@pytest.mark.slow
def test_a_restart_after_sigkill_closes_what_was_open(operator):
    worker = operator.worker("killed")
    running = operator.run("work_for", "killed", seconds=600.0)
    operator.await_note("working")
    worker.handle.kill()
    worker.handle.wait()
    pending, cancelling = (operator.run("visit_async", "killed", name="never") for _ in range(2))
    for run in (pending, cancelling):
        operator.client.set_flow_run_state(run, Pending())
    operator.client.set_flow_run_state(cancelling, Cancelling())
    operator.forget_notes()
    operator.worker("killed")
    operator.await_note("working")  # it was taken up again
    past = operator.history(running)
    assert past.index("Crashed") < past.index("AwaitingRetry")
    assert past[-1] == "Running"
    assert operator.state(cancelling).is_cancelled()
    operator.client.set_flow_run_state(running, Cancelling())
    assert operator.end_of(running).is_cancelled()
    operator.reach(pending, lambda state: state.is_completed())
    assert "Crashed" in operator.history(pending)


@pytest.mark.slow
def test_a_run_that_takes_its_worker_down_again_and_again_is_given_up(operator):
    worker = operator.worker("fatal")
    run = operator.run("work_for", "fatal", seconds=600.0)
    for _ in range(MOST_ATTEMPTS):
        operator.await_note("working")
        worker.handle.kill()
        worker.handle.wait()
        operator.forget_notes()
        worker = operator.worker("fatal")
    operator.reach(run, lambda state: state.is_crashed())
    assert operator.history(run).count("Running") == MOST_ATTEMPTS
    assert operator.history(run)[-1] == "Crashed"
