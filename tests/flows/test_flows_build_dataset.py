"""The flow that builds a dataset, on a real server: from files to a folder, artifacts and a bucket."""

import asyncio
import signal
import sys

import dask
import pytest
from prefect.exceptions import ParameterTypeError

from flows.build_dataset import build_dataset
from lab.gauntlet.endpoints import Server
from tasks.datasets import artifact_key
from templar.data.shards.manifest import parse_index
from templar.datasets.build_dataset import build, find_built
from templar.datasets.documents import TextSource
from templar.datasets.plan import BuildRequest, BuildSettings, DatasetLayout
from tests.support.datasets import contents, write_books
from tests.support.flow_network import task_runs
from tests.support.servers import REPOSITORY

SETTINGS = {"held_out_fraction": 0.2, "vocab_size": 300, "sequence_length": 16, "row_chars": 100}
WRITE = ("R2_DATASET_WRITE_ACCESS_KEY_ID", "R2_DATASET_WRITE_SECRET_ACCESS_KEY")
STEPS = ["assemble dataset", "build unit 0: make part", "build unit 0: read unit", "find dataset", "list inputs"]
STEPS += ["plan dataset"]


@pytest.fixture(autouse=True)
def _configured(prefect_api, monkeypatch):
    del prefect_api
    for name in WRITE:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def books(tmp_path):
    return write_books(tmp_path / "books")


def run(sources, out, **parameters):
    parameters.setdefault("settings", BuildSettings(DatasetLayout.SHARDS, **SETTINGS))
    return asyncio.run(build_dataset([str(path) for path in sources], str(out), return_state=True, **parameters))


def names_of(server, state, at_least):
    with server.client() as client:
        return sorted(each.name for each in task_runs(client, state, at_least=at_least))


def test_from_files_to_a_folder(books, tmp_path, prefect_server):
    out = tmp_path / "My dataset_1"
    state = run([books], out)
    assert state.is_completed()
    settings = BuildSettings(DatasetLayout.SHARDS, **SETTINGS)
    built = find_built(BuildRequest((TextSource("books", books),), out, settings))
    assert built is not None
    assert built.card.digest == parse_index((out / "_shards.json").read_bytes(), "test").digest
    assert str(state.message) == (
        f"shards dataset {built.card.digest[:12]}: {built.num_bytes} bytes in {out.resolve()}"
    )
    assert names_of(prefect_server, state, 6) == STEPS
    again = run([books], out)
    assert again.message == state.message
    assert names_of(prefect_server, again, 1) == ["find dataset"]
    assert artifact_key(out) == "built-my-dataset-1"
    with prefect_server.client() as client:
        table = client.request("GET", f"/artifacts/{artifact_key(out)}/latest").json()
        assert '"source": "books"' in table["data"]
        assert built.card.digest in table["description"]
        for step in ("read", "parts", "assemble"):
            bar = client.request("GET", f"/artifacts/{artifact_key(out)}-{step}/latest").json()
            assert bar["data"] == 100.0


def start_worker(log, address, *options):
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--nthreads", "1"]
    return Server([*command, "--no-dashboard", "--host", "127.0.0.1", *options], "Registered to:", log)


@pytest.fixture
def scheduler(tmp_path):
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    server = Server([*command, "--no-dashboard"], "Scheduler at:", tmp_path / "scheduler.log")
    yield server
    server.close()


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_dask_or_on_a_worker_that_dies(books, tmp_path, scheduler, monkeypatch):
    """One process; two workers of which one dies in the middle of a unit; and two that live."""
    monkeypatch.setattr("templar.datasets.units.MOST_TEXT_FILES", 1)
    wanted = {layout: BuildSettings(layout, **SETTINGS) for layout in DatasetLayout}
    whole = {
        layout: build(BuildRequest((TextSource("books", books),), tmp_path / f"whole-{layout}", each))
        for layout, each in wanted.items()
    }
    address = scheduler.endpoint_url
    workers = [
        start_worker(tmp_path / "one.log", address),
        start_worker(
            tmp_path / "two.log", address, "--preload", str(REPOSITORY / "tests" / "support" / "dying_worker.py")
        ),
    ]
    try:
        state = run([books], tmp_path / "one-died", settings=wanted[DatasetLayout.SHARDS], dask=address)
        assert state.is_completed()
        assert workers[1].child.stop() == -signal.SIGKILL
        assert contents(tmp_path / "one-died") == contents(whole[DatasetLayout.SHARDS].root)
        workers.append(start_worker(tmp_path / "three.log", address))
        for layout, each in wanted.items():
            assert run([books], tmp_path / f"two-{layout}", settings=each, dask=address).is_completed()
            assert contents(tmp_path / f"two-{layout}") == contents(whole[layout].root)
        (books / "000.txt").write_bytes(b"\xff")
        state = run([books], tmp_path / "unreadable", dask=address)
        assert state.is_failed()
        assert "[dataset_malformed]" in str(state.message)
    finally:
        for worker in workers:
            worker.close()
    scheduler.close()
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        state = run([books], tmp_path / "nobody", dask=address)
    assert state.is_failed()
    assert f"[process_died] Dask at {address}: " in str(state.message)


def test_into_a_bucket(books, tmp_path, monkeypatch):
    (tmp_path / "buckets" / "mine").mkdir(parents=True)
    monkeypatch.setenv("TEMPLAR_STORAGE", (tmp_path / "buckets").as_uri())
    monkeypatch.setenv(WRITE[0], "key")
    monkeypatch.setenv(WRITE[1], "secret")
    settings = BuildSettings(DatasetLayout.PAGES, **SETTINGS)
    state = run([books], tmp_path / "out", settings=settings, upload_account="mine", upload_prefix="here")
    assert state.is_completed()
    files = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    bucket = tmp_path / "buckets" / "mine" / "here"
    assert files <= {path.relative_to(bucket) for path in bucket.rglob("*")}
    assert str(state.message).endswith(f", {len(files)} objects uploaded, 0 were there already")


def test_a_source_that_is_not_there_is_not_tried_again(tmp_path, prefect_server):
    state = run([tmp_path / "none"], tmp_path / "out")
    assert state.is_failed()
    assert "[dataset_missing]" in str(state.message)
    with prefect_server.client() as client:
        assert [each.run_count for each in task_runs(client, state, at_least=2) if each.name == "list inputs"] == [1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"workers": 0}, "workers"), ({"upload_account": "../x"}, "lower-case letters"), ({"dask": "host"}, "dask")],
)
def test_wrong_parameters(wrong, words):
    with pytest.raises(ParameterTypeError, match=words):
        build_dataset.validate_parameters({"sources": ["a"], "out": "b"} | wrong)


def test_settings_come_as_plain_values():
    """As the UI and the command line give them."""
    given = build_dataset.validate_parameters(
        {"sources": ["a"], "out": "b", "settings": {"layout": "pages", "row_chars": 7}}
    )
    assert given["settings"] == BuildSettings(DatasetLayout.PAGES, row_chars=7)
    assert build_dataset.parameters.required == ["sources", "out"]
