"""Bad input of every command that reads some: one line that names it, the exit status, and nothing is written."""

import signal

import pytest

from deployments.command import main
from tests.support.commands import write_env

NO_FILE = "[bad_environment] {folder}/none: no such file; copy .env.example to it and fill it in"
LOCAL = "neuron init --env-file {folder}/none --local {folder} --role miner"
BUILD = "dataset build --layout pages --source x --out {folder}/out"
UP = "up --folder {folder}/network --window-seconds 36"
REFUSALS = [
    ("neuron start --env-file {folder}/none", 1, NO_FILE),
    ("bucket access --env-file {folder}/none", 1, NO_FILE),
    ("audit --env-file {folder}/none", 2, NO_FILE),
    ("model fetch --env-file {folder}/none", 2, NO_FILE),
    (f"{BUILD} --to-account mine --env-file {{folder}}/none", 1, NO_FILE),
    ("neuron register --name=my_neuron", 2, "'my_neuron' is not lower-case letters, digits and single hyphens"),
    ("neuron start --env-file {folder}/env --prefect-port 7", 1, "and PREFECT_API_URL is http://there/api: leave one"),
    ("neuron register --env-file {folder}/env", 1, "NETUID must be a whole number"),
    ("neuron restore", 2, "--from-bucket"),
    ("neuron logs --name never-started", 1, "there are: none"),
    (f"{LOCAL} --wallet.hotkey mine", 1, "no network runs there; `make up` starts one"),
    (LOCAL, 1, "--local takes --role and --wallet.hotkey"),
    (f"{LOCAL} --wallet.hotkey mine --netuid 12", 1, "all else is the local network's"),
    ("audit --first 9 --last 8", 2, "--first 9 comes after --last 8"),
    ("audit --tolerance 1", 2, "'1' is not a number from 0 up to 1"),
    ("audit --env-file {folder}/env", 2, "R2_DATASET_ACCOUNT_ID is missing"),
    ("dataset verify --from-env --env-file {folder}/env", 1, "R2_DATASET_ACCOUNT_ID is missing"),
    (f"{BUILD} --to-account mine --env-file {{folder}}/env", 1, "R2_DATASET_WRITE_ACCESS_KEY_ID is missing"),
    (f"{UP} --preset none", 1, "[bad_hparams] "),
    (f"{UP} --window-seconds 5", 1, "[bad_hparams] "),
    (f"{UP} --actor lazy --actor saint", 1, "[bad_environment] --actor saint: there is no such actor; "),
    (f"{UP} --prefect-port 7 --storage-port 7", 1, "[port_taken] port 7 is asked for twice: set another --storage-"),
    ("model generate --prompt a --temperature -1", 2, "'-1' is not a number above 0"),
    ("dataset verify", 2, "one of the arguments FOLDER --from-env is required"),
    ("dataset verify {folder} --from-env", 2, "not allowed with argument"),
    (f"{BUILD} --source b=x --source b=y", 2, "write NAME=PATH"),
    (f"{BUILD} --vocab-size 5", 2, "vocab_size"),
    (f"{BUILD} --to-bucket b", 2, "go with --to-account"),
    (f"{BUILD} --to-account ../x", 2, "lower-case letters"),
    (f"{BUILD} --dask host", 2, "write tcp://HOST:PORT"),
    (f"{BUILD} --share 1/2", 2, "unrecognized arguments: --share 1/2"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=[line for line, *_ in REFUSALS])
def test_it_is_refused(case, run_main, tmp_path, monkeypatch):
    line, status, words = case
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("NETUID", "R2_DATASET_ACCOUNT_ID", "R2_DATASET_WRITE_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    env_file = write_env(tmp_path / "env", {"NETUID": "three", "PREFECT_API_URL": "http://there/api"})
    ended, out, err = run_main(main, *line.format(folder=tmp_path).split())
    assert (ended, out) == (status, "")
    assert words.format(folder=tmp_path) in err.splitlines()[-1]
    assert err.count("\n") == 1 or err.startswith("usage: ")
    assert [*tmp_path.iterdir()] == [env_file]
