"""The command `deployments.leaderboard` prints what the flow shows, and writes the files that are asked for."""

import shutil
from functools import partial

import pandas as pd
import pytest

from deployments import leaderboard as command
from deployments import page
from templar.agreement.checkpoint import EVALUATION_FILE
from templar.exchange.object_keys import checkpoint_key
from templar.reports.public_page import PAGE_KEY
from tests.support.published import MINERS, evaluate_genesis, with_reader

NAME = "reader"


@pytest.fixture(scope="module")
def network(tmp_path_factory, prefect_server):
    """A network with evidence of its first two windows, and a miner of it in the third."""
    return with_reader(tmp_path_factory.mktemp("standings"), prefect_server, NAME, after=2, evidence=[0, 1])


@pytest.fixture
def call(network, prefect_api, run_main):
    del network, prefect_api
    return partial(run_main, command.main)


def test_table_and_files(network, call, tmp_path):
    csv, plot = tmp_path / "history.csv", tmp_path / "curves.SVG"
    status, out, err = call("--neuron", NAME, "--csv", str(csv), "--plot", str(plot))
    assert (status, err) == (0, "")
    first = network.first_window
    lines = out.splitlines()
    assert lines[0] == f"evidence of uid 2: 2 of 2 windows, {first} to {first + 1}"
    assert "loss 4.0000, uid 3 leads with " in lines[-1]
    assert "missing (commit_missing) x2" in out
    assert out.count("5Minerxxxxx…") == 3  # hotkeys are cut off
    history = pd.read_csv(csv)
    rows = list(zip(history["window"], history["uid"], strict=True))
    assert rows == [(window, uid) for window in (first, first + 1) for uid in MINERS]
    assert history["hotkey"].str.len().eq(48).all()
    assert plot.read_bytes().startswith(b"<svg")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["curves.SVG", "history.csv"]


def test_the_newest_checkpoints_on_held_out_text_and_what_is_left_out(network, call):
    score, genesis = evaluate_genesis(network).score, network.first_window - 1
    forged = network.bucket("validator") / checkpoint_key(genesis, 2, EVALUATION_FILE)
    forged.parent.mkdir()
    forged.write_bytes(b"{}")
    status, out, _ = call("--neuron", NAME)
    shutil.rmtree(forged.parent)
    assert status == 0
    assert "held-out text: the newest 1 of 1 measured checkpoints" in out
    (row,) = (line for line in out.splitlines() if f"{score.loss:.4f}" in line and "uid 1" in line)
    assert f"{score.bits_per_byte:.4f}" in row
    assert "left out: [malformed] checkpoint: " in out


def test_the_page_is_written_to_a_file_or_stored_in_the_bucket(network, prefect_api, run_main, tmp_path):
    del prefect_api
    call, file = partial(run_main, page.main), tmp_path / "index.html"
    assert call("--neuron", NAME, "--file", str(file)) == (0, f"{file}: the network's page\n", "")
    assert call("--neuron", NAME, "--file", ".")[2].startswith("[local_file] local file .: ")
    status, out, _ = call("--neuron", NAME)
    (stored,) = (network.plan.folder / "buckets").rglob(PAGE_KEY)
    assert (status, out.split()[0], stored.read_bytes()) == (0, PAGE_KEY, file.read_bytes())


def test_with_an_env_file_the_page_goes_into_its_own_bucket_without_a_neuron(network, run_main, tmp_path):
    environment, file = network.environment("lazy"), tmp_path / "an.env"
    environment["NETWORK"] = network.at("lazy", network.first_window + 2).subnet.network
    environment |= {
        f"R2_PAGE_{name}": "pages" for name in ("ACCOUNT_ID", "WRITE_ACCESS_KEY_ID", "WRITE_SECRET_ACCESS_KEY")
    }

    def call():
        file.write_text("".join(f"{name}={value}\n" for name, value in environment.items()))
        return run_main(page.main, "--env-file", str(file))

    status, _, err = call()
    assert (status, "R2_PAGE_BUCKET_NAME is missing" in err) == (1, True)
    environment["R2_PAGE_BUCKET_NAME"] = "pages"
    (folder := network.plan.folder / "buckets" / "pages").mkdir()
    assert call()[:2] == (0, f"{PAGE_KEY} in bucket pages: the network's page; let anybody read this object\n")
    assert f"<td>{network.first_window}</td>" in (folder / PAGE_KEY).read_text()
