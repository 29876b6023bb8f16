"""`templar dataset import`: it makes a dataset, and each mistake is one line of text."""

from functools import partial

import numpy as np
import pytest

from deployments import import_dataset
from templar.data.tokenizer import save_tokenizer, train_embedded_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    save_tokenizer(train_embedded_tokenizer(["a document of lines"], 260), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_an_import(run_main, tokenizer, tmp_path):
    call = partial(run_main, import_dataset.main)
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
