"""`templar dataset build` and `import`: each makes a dataset, and each mistake is one line of text."""

import json
from functools import partial

import numpy as np
import pytest

from deployments import build_dataset as command
from deployments import import_dataset
from templar.data.tokenizer import save_tokenizer, train_embedded_tokenizer
from templar.datasets.plan import DatasetLayout
from tests.support.commands import contents, write_env
from tests.support.datasets import write_books

WRITE = ("R2_DATASET_WRITE_ACCESS_KEY_ID", "R2_DATASET_WRITE_SECRET_ACCESS_KEY")
SMALL = ("--vocab-size", 300, "--sequence-length", 16, "--held-out-fraction", 0.2, "--row-chars", 100)


@pytest.fixture
def call(monkeypatch, run_main):
    for name in (*WRITE, "TEMPLAR_STORAGE", "DATASET_BINS_PATH"):
        monkeypatch.delenv(name, raising=False)
    return partial(run_main, command.main)


@pytest.fixture
def books(tmp_path):
    return write_books(tmp_path / "books")


@pytest.mark.parametrize("layout", list(DatasetLayout))
def test_a_dataset_is_built(call, books, tmp_path, layout):
    out = tmp_path / "out"
    status, printed, _ = call("--source", books, "--layout", layout, "--out", out, "--workers", 2, *SMALL)
    assert status == 0
    card = json.loads((out / "card.json").read_bytes())
    *table, last = printed.strip().splitlines()
    assert last.startswith(f"{layout} dataset {card['digest']}, ")
    assert last.endswith(f"its card: {out / 'card.json'}")
    for split in ("train", "held_out"):
        (line,) = [line for line in table if "books" in line and split in line]
        assert str(card["splits"][split]["characters"]) in line
    again = contents(out)
    assert call("--source", f"books={books}", "--layout", layout, "--out", out, *SMALL)[:2] == (0, printed)
    assert contents(out) == again


def test_into_a_bucket(call, books, tmp_path):
    (tmp_path / "buckets" / "mine").mkdir(parents=True)
    values = {"TEMPLAR_STORAGE": (tmp_path / "buckets").as_uri(), WRITE[0]: "key", WRITE[1]: "hush"}
    env_file = write_env(tmp_path / "env", values)
    target = ("--to-account", "mine", "--to-prefix", "here", "--env-file", env_file)
    status, out, err = call("--source", books, "--layout", "shards", "--out", tmp_path / "out", *SMALL, *target)
    assert status == 0
    files = contents(tmp_path / "out")
    assert files.items() <= contents(tmp_path / "buckets" / "mine" / "here").items()
    assert f"uploaded to mine/here: {len(files)} objects" in out
    assert "; 0 were there already" in out
    assert "hush" not in out + err
    live = contents(tmp_path / "buckets" / "mine" / "here")
    status, _, err = call("--source", books, "--layout", "pages", "--out", tmp_path / "other", *SMALL, *target)
    assert status == 1
    assert err.strip().splitlines()[-1].startswith("[object_differs]")
    assert contents(tmp_path / "buckets" / "mine" / "here") == live


def test_there_is_no_source(call, tmp_path):
    status, _, err = call("--source", tmp_path / "none", "--layout", "pages", "--out", tmp_path / "out")
    assert (status, f"[dataset_missing] {tmp_path / 'none'}: no such file or folder" in err) == (1, True)


def test_an_import(run_main, tmp_path):
    call, tokenizer = partial(run_main, import_dataset.main), tmp_path / "tokenizer"
    save_tokenizer(train_embedded_tokenizer(["a document of lines"], 260), tokenizer)
    (tmp_path / "tokenized").mkdir()
    for number in range(2):
        np.full(40 * 16, number, "<u4").tofile(tmp_path / "tokenized" / f"train_{number:06d}.npy")
    out = tmp_path / "out"
    status, _, err = call(tmp_path / "tokenized", "--out", out)
    assert status == 2
    assert "need the tokenizer that made them" in err
    arguments = ("--tokenizer", tokenizer, "--sequence-length", 16, "--out", out)
    status, printed, _ = call(tmp_path / "tokenized", *arguments)
    assert (status, printed.strip()) == (0, f"shards dataset in {out}: 1 files linked, 1 copied")
    status, _, err = call(tmp_path / "tokenized", *arguments)
    assert status == 1
    assert err.strip().splitlines()[-1].startswith("[object_exists]")
    status, _, err = call(tmp_path / "none", "--out", tmp_path / "other")
    assert status == 1
    assert "no such folder" in err
