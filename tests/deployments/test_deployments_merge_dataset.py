"""`templar dataset build --share`, `dataset merge`, `dataset import`: results; each mistake is one line of text."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from deployments import build_dataset, import_dataset, merge_dataset
from templar.data.tokenizer import train_embedded_tokenizer
from tests.support.commands import Call, contents
from tests.support.datasets import numbered_documents


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    train_embedded_tokenizer(["a document of lines"], 260).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        folder = tmp_path / "books" / name
        folder.mkdir(parents=True)
        for document in numbered_documents(name, num_documents=5, num_lines=20):
            (folder / document.name).write_text(document.text)
    return tmp_path / "books"


def test_two_machines(run_main: Call, books: Path, tokenizer: Path, tmp_path: Path) -> None:
    build, merge = partial(run_main, build_dataset.main), partial(run_main, merge_dataset.main)
    settings = (
        *("--source", f"a={books / 'a'}", "--source", f"b={books / 'b'}", "--layout", "shards"),
        *("--tokenizer", tokenizer, "--sequence-length", 16, "--held-out-fraction", 0.3),
    )
    status, whole, _ = build(*settings, "--out", tmp_path / "whole")
    assert status == 0
    for number in (1, 2):
        status, out, _ = build(*settings, "--share", f"{number}/2", "--out", tmp_path / f"share-{number}")
        assert status == 0
        assert out.startswith(f"share {number}/2, ")
    shares = (tmp_path / "share-1", tmp_path / "share-2")
    status, _, err = merge(shares[0], "--out", tmp_path / "merged")
    assert status == 1
    assert "[dataset_missing] share 2/2 is missing" in err
    status, out, _ = merge(*shares, "--out", tmp_path / "merged")
    assert status == 0
    assert out.replace("merged", "whole") == whole
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--share", "3/2", "--tokenizer", "x"], "write I/N"),
        (["--share", "1/2"], "a share needs a tokenizer"),
        (["--share", "1/2", "--tokenizer", "x", "--to-account", "mine"], "templar dataset merge"),
    ],
)
def test_shares_that_cannot_be(run_main: Call, arguments: list[str], words: str) -> None:
    status, _, err = run_main(
        build_dataset.main, "--source", "x", "--layout", "shards", "--out", "/none/out", *arguments
    )
    assert status == 2
    assert words in err


def test_a_share_in_the_folder_to_make(run_main: Call, tmp_path: Path) -> None:
    status, _, err = run_main(merge_dataset.main, tmp_path / "share", "--out", tmp_path / "share" / "out")
    assert status == 2
    assert "lie in one another" in err


def test_an_import(run_main: Call, tokenizer: Path, tmp_path: Path) -> None:
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
