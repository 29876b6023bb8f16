"""`templar model export --push`: the Hub's own client against a server that keeps its contract."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from deployments import hub as hub_module
from deployments import model
from tests.support.commands import contents, write_env
from tests.support.hub import READER, WRITER, FakeHub, fake_hub
from tests.support.prepared import PreparedNetwork

REPOSITORY = "someone/model"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> PreparedNetwork:
    return PreparedNetwork(tmp_path_factory.mktemp("pushed"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        monkeypatch.setattr(hub_module, "HfApi", partial(HfApi, endpoint=hub.endpoint_url))
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield hub


@pytest.fixture
def export(network: PreparedNetwork, tmp_path: Path, run_main: Any) -> Call:
    variables = network.environment("aggregator") | {"TEMPLAR_HOME": str(tmp_path / "home")}
    file = write_env(tmp_path / "reader.env", variables)
    return partial(run_main, model.main, "export", "--env-file", file)


def test_the_files_of_the_model_are_pushed_and_nothing_else_is_kept_of_an_older_one(
    hub: FakeHub, export: Call, tmp_path: Path, network: PreparedNetwork
) -> None:
    status, out, _ = export("--push", REPOSITORY, tmp_path / "copy")
    assert (status, out) == (0, f"{hub.endpoint_url}/{REPOSITORY}\n{tmp_path / 'copy'}\n")
    assert hub.files[REPOSITORY] == contents(tmp_path / "copy")
    assert hub.private[REPOSITORY]
    (summary,) = hub.commits
    assert summary.startswith(f"Window {network.first_window - 1}, 0 outer steps, root ")

    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "notes.txt": b"mine"}
    hub.files[REPOSITORY].update(old)
    assert export("--push", REPOSITORY)[0] == 0
    assert hub.files[REPOSITORY] == contents(tmp_path / "copy") | {"notes.txt": b"mine"}


def test_no_text_of_the_publisher_is_pushed(hub: FakeHub, export: Call, tmp_path: Path) -> None:
    """Only the weights are proven; a card in the operator's name is made on this machine."""
    assert export("--push", REPOSITORY)[0] == 0
    (folder,) = {path.parent for path in (tmp_path / "home").rglob("config.json")}
    (folder / "README.md").write_text("# Buy here: https://publisher.example")
    assert export("--push", REPOSITORY)[0] == 0
    pushed = hub.files[REPOSITORY]["README.md"].decode()
    assert "publisher.example" not in pushed
    assert "# Model of window " in pushed


@pytest.mark.parametrize(
    "case",
    [
        ("", REPOSITORY, None, "[bad_environment] HF_TOKEN is not set"),
        ("hf_wrong", REPOSITORY, None, "[access_denied] Hugging Face: refused (401); set HF_TOKEN to a valid token"),
        (READER, REPOSITORY, None, f"[access_denied] Hugging Face repository {REPOSITORY}: refused (403)"),
        (WRITER, "another/model", None, "[access_denied] Hugging Face repository another/model: refused (403)"),
        (WRITER, "no/such/id", None, "[bad_parameters] Hugging Face repository no/such/id: "),
        (WRITER, REPOSITORY, 418, "[store_refused] Hugging Face: the Hub answered 418"),
    ],
)
def test_what_the_hub_refuses_is_one_line_without_the_token_and_nothing_is_pushed(
    hub: FakeHub, export: Call, tmp_path: Path, case: tuple[str, str, int | None, str]
) -> None:
    token, repository, hub.answer, words = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", token)
        status, out, err = export("--push", repository, tmp_path / "copy")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(words)
    assert not token or token not in err
    assert not hub.commits
    assert not (tmp_path / "copy").exists()


def test_a_token_that_is_refused_costs_no_download(hub: FakeHub, export: Call, tmp_path: Path) -> None:
    hub.answer = 401
    assert export("--push", REPOSITORY)[0] == 2
    assert not (tmp_path / "home" / "model").exists()


def test_without_a_network_it_is_one_line(hub: FakeHub, export: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.server_close()
    monkeypatch.setattr(hub_module, "HfApi", partial(HfApi, endpoint="http://127.0.0.1:1"))
    status, _, err = export("--push", REPOSITORY)
    assert status == 2
    assert err.startswith("[store_unreachable] Hugging Face: cannot be reached: ")
    assert err.endswith("check the network, and try again\n")
    assert err.count("\n") == 1


def test_a_push_that_failed_is_made_by_the_same_call(hub: FakeHub, export: Call, tmp_path: Path) -> None:
    hub.files[REPOSITORY] = {"model.safetensors": b"old"}
    hub.refused_commits = 1
    status, _, err = export("--push", REPOSITORY, tmp_path / "copy")
    assert (status, hub.files[REPOSITORY]) == (2, {"model.safetensors": b"old"})
    assert "[store_busy]" in err
    assert export("--push", REPOSITORY, tmp_path / "copy")[0] == 0
    assert hub.files[REPOSITORY] == contents(tmp_path / "copy")


def test_neither_folder_nor_repository_is_refused(export: Call) -> None:
    status, _, err = export()
    assert (status, err.splitlines()[-1]) == (
        2,
        "[bad_parameters] export: name a folder, or a repository with --push",
    )
