"""`templar model`: fetch, generate, evaluate, export and verify, with nothing but public variables.

A push goes from the Hub's own client to a server that keeps its contract.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from deployments import hub as hub_module
from deployments import model
from deployments.local.plan import DATASET_PREFIX, LOCAL_FOLDER, NETWORK_ENV_FILE
from deployments.local.prepare import DATASET_ACCOUNT
from templar.housekeeping.maintenance import publish_newest_checkpoint
from templar.reports.model_card import PICTURE_FILE
from tests.support.audited import run_alone
from tests.support.commands import contents, write_env
from tests.support.hub import READER, WRITER, fake_hub
from tests.support.prepared import PreparedNetwork
from tests.support.published import evaluate_genesis

NUM_WINDOWS = 2
REPOSITORY = "someone/model"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    network = PreparedNetwork(tmp_path_factory.mktemp("modelled"), deciding="validator")
    run_alone(network, NUM_WINDOWS)
    publish_newest_checkpoint(network.at("validator", last(network) + 1).config("validator"), preset="test")
    return network


def last(network):
    return network.first_window + NUM_WINDOWS - 1


@pytest.fixture
def call(network, tmp_path, run_main):
    """Calls the command as a reader after the last window; its exit status, output and errors."""
    block = network.at("lazy", last(network) + 2)
    variables = read_env(network.plan.network_env)
    variables |= {"NETWORK": block.subnet.network, "TEMPLAR_HOME": str(tmp_path / "home")}
    file = write_env(tmp_path / "reader.env", variables)

    def main(command, *options):
        found: tuple[int, str, str] = run_main(model.main, command, "--env-file", file, *options)
        return found

    return main


def read_env(path):
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def test_a_reader_needs_no_secret_of_a_neuron(network):
    names = read_env(network.plan.network_env)
    assert not [name for name in names if "WRITE" in name or "WALLET" in name]


def test_the_model_is_fetched_and_exported(call, network, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    status, out, err = call("fetch")
    assert status == 0
    assert f"model of window {last(network)}, 0 outer steps, root " in err
    fetched, exported = Path(out.strip()), tmp_path / "exported"
    exported.mkdir()
    monkeypatch.chdir(exported)
    assert call("export", ".")[:2] == (0, f"{exported}\n")
    monkeypatch.chdir(tmp_path)
    names = {path.name for path in exported.iterdir()}
    assert names == {path.name for path in fetched.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "special_tokens_map.json"} < names
    card = (exported / "README.md").read_text()
    assert f"# Model of window {last(network)}" in card
    assert f"| Preset | {network.block('lazy').preset} |" in card
    assert "| Dataset at the start | " in card
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(exported).eos_token == "<eos>"
    status, _, err = call("export", str(exported))
    assert (status, "[bad_parameters]" in err) == (2, True)


def test_the_card_names_the_origin_of_the_text_by_the_datasets_card(call, network):
    """What somebody else wrote into it becomes neither Markdown nor YAML."""
    stored = network.plan.buckets / DATASET_ACCOUNT / DATASET_PREFIX / "card.json"
    sources = [{"name": "books"}, {"name": "a]\n---\n# Buy [here](https://x.example) | now"}]
    said = {
        "layout": "pages",
        "digest": "0",
        "sources": sources,
        "settings": {"license": "odc-by", "language": "en,de"},
    }
    for content, expected in (
        (
            json.dumps(said),
            "| Sources of the text, by the dataset's card | books, a----- Buy -here-https-x.example- - now |",
        ),
        ("{", ""),
    ):
        stored.write_text(content)
        card = (Path(call("fetch")[1].strip()) / "README.md").read_text()
        header = card.split("---\n")[1]
        assert expected in card
        assert ("license: odc-by\nlanguage: [en,de]\n" in header) is bool(expected)
        assert ("| Its license, by the same | odc-by |" in card) is bool(expected)
    stored.unlink()


def test_the_picture_of_the_card_is_drawn_here_from_public_records(call, network):
    """The publisher's own is not taken: the one of the genesis, which has no card, is drawn as well."""
    evaluate_genesis(network)
    status, out, _ = call("fetch", "--window", str(network.first_window - 1))
    assert status == 0
    picture = Path(out.strip()) / PICTURE_FILE
    assert picture.read_bytes().startswith(b"<svg ")
    assert b"1 checkpoints" in picture.read_bytes()


def test_it_goes_on_with_a_text_the_same_way_every_time(call):
    status, text, _ = call("generate", "--prompt", "alpha ", "--tokens", "8")
    assert status == 0
    assert text.startswith("alpha ")
    assert call("generate", "--prompt", "alpha ", "--tokens", "8")[1] == text
    assert call("generate", "--prompt", "alpha ", "--tokens", "8", "--temperature", "0")[0] == 0
    assert call("generate", "--prompt", "")[0] == 0
    status, _, err = call("generate", "--prompt", "alpha " * 40)
    assert status == 2
    assert "shorten it" in err


def test_it_is_measured_on_held_out_text(call):
    status, out, _ = call("evaluate", "--texts", "4")
    assert status == 0
    figures = {line[:15].strip(): line[15:].split()[0] for line in out.splitlines()}
    assert figures.keys() == {"held-out texts", "tokens", "loss", "perplexity", "bits per byte"}
    assert figures["held-out texts"] == "4"


def test_the_replay_agrees_to_the_last_window(call, network, tmp_path):
    status, out, _ = call("verify")
    *lines, verdict = out.splitlines()
    assert status == 0
    assert [line.partition(":")[0] for line in lines] == [
        f"window {window}" for window in range(network.first_window, last(network) + 1)
    ]
    assert all(line.endswith("as a quorum proved") for line in lines)
    assert verdict == f"verified: from the genesis to window {last(network)}"
    assert not (tmp_path / "home" / "verify").exists()
    status, _, err = call("verify", "--first", str(last(network) - 1))
    assert status == 2
    assert "[object_missing]" in err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("fetch", "--window", "99"), "[object_missing] no validator shows a checkpoint of window 99"),
        (("verify", "--window", "0"), "[bad_parameters] window 0: the replay begins after window "),
        (("export",), "[bad_parameters] export: name a folder, or a repository with --push"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(call, options, problem):
    status, _, err = call(*options)
    assert status == 2
    assert problem in err.splitlines()[-1]


def test_without_an_option_it_is_the_local_network(call, run_main, tmp_path, monkeypatch):
    (tmp_path / LOCAL_FOLDER).mkdir(parents=True)
    shutil.copy(tmp_path / "reader.env", tmp_path / LOCAL_FOLDER / NETWORK_ENV_FILE)
    monkeypatch.chdir(tmp_path)
    status, _, err = run_main(model.main, "fetch")
    assert status == 0
    assert err.startswith(f"network: {LOCAL_FOLDER / NETWORK_ENV_FILE}\n")


# A push.


@pytest.fixture
def hub(monkeypatch):
    with fake_hub() as hub:
        monkeypatch.setattr(hub_module, "HfApi", partial(HfApi, endpoint=hub.endpoint_url))
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield hub


@pytest.fixture
def export(call):
    return partial(call, "export")


def test_the_files_of_the_model_are_pushed_and_nothing_else_is_kept_of_an_older_one(hub, export, tmp_path, network):
    status, out, _ = export("--push", REPOSITORY, tmp_path / "copy")
    assert (status, out) == (0, f"{hub.endpoint_url}/{REPOSITORY}\n{tmp_path / 'copy'}\n")
    assert hub.files[REPOSITORY] == contents(tmp_path / "copy")
    assert hub.private[REPOSITORY]
    (summary,) = hub.commits
    assert summary.startswith(f"Window {last(network)}, 0 outer steps, root ")

    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "notes.txt": b"mine"}
    hub.files[REPOSITORY].update(old)
    assert export("--push", REPOSITORY)[0] == 0
    assert hub.files[REPOSITORY] == contents(tmp_path / "copy") | {"notes.txt": b"mine"}


def test_no_text_of_the_publisher_is_pushed(hub, export, tmp_path):
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
def test_what_the_hub_refuses_is_one_line_without_the_token_and_nothing_is_pushed(hub, export, tmp_path, case):
    token, repository, hub.answer, words = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", token)
        status, out, err = export("--push", repository, tmp_path / "copy")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(words)
    assert not token or token not in err
    assert not hub.commits
    assert not (tmp_path / "copy").exists()
    is_open = token and "repository" in words
    assert (tmp_path / "home" / "model").exists() is bool(is_open), "a token that is refused costs no download"


def test_without_a_network_it_is_one_line(hub, export, monkeypatch):
    hub.server_close()
    monkeypatch.setattr(hub_module, "HfApi", partial(HfApi, endpoint="http://127.0.0.1:1"))
    status, _, err = export("--push", REPOSITORY)
    assert status == 2
    assert err.startswith("[store_unreachable] Hugging Face: cannot be reached: ")
    assert err.endswith("check the network, and try again\n")
    assert err.count("\n") == 1


def test_a_push_that_failed_is_made_by_the_same_call(hub, export, tmp_path):
    hub.files[REPOSITORY] = {"model.safetensors": b"old"}
    hub.refused_commits = 1
    status, _, err = export("--push", REPOSITORY, tmp_path / "copy")
    assert (status, hub.files[REPOSITORY]) == (2, {"model.safetensors": b"old"})
    assert "[store_busy]" in err
    assert export("--push", REPOSITORY, tmp_path / "copy")[0] == 0
    assert hub.files[REPOSITORY] == contents(tmp_path / "copy")
