"""Shares of several machines, merged: the bytes are those of one machine, and an incomplete set is refused."""

import json
import shutil
from pathlib import Path

import pytest

from templar.data.tokenizer import train_embedded_tokenizer
from templar.datasets import token_parts
from templar.datasets.build_dataset import BuiltDataset, build
from templar.datasets.documents import TextSource
from templar.datasets.plan import BuildRequest, BuildSettings, DatasetLayout, Share
from templar.datasets.shares import SHARE_FILE, build_share, merge_shares, read_share
from templar.errors import PermanentError, Reason
from tests.datasets.test_datasets_build_dataset import rows
from tests.support.datasets import contents, numbered_documents
from tests.support.errors import raising


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources, a tokenizer, and runs and pieces that are much smaller than a part."""
    monkeypatch.setattr(token_parts, "RUN_TOKENS", 1000)
    monkeypatch.setattr(token_parts, "PIECE_TOKENS", 1500)
    rows(tmp_path / "input")
    (tmp_path / "input" / "texts").mkdir()
    for document in numbered_documents("texts", num_documents=6, num_lines=20):
        (tmp_path / "input" / "texts" / document.name).write_text(document.text)
    train_embedded_tokenizer(["a document of lines"], 260).save(tmp_path / "tokenizer")
    return tmp_path / "input"


def request(inputs: Path, root: Path, share: Share | None = None, **changes: int) -> BuildRequest:
    numbers = {"sequence_length": 16, "samples_per_shard": 100, "block_bytes": 512} | changes
    settings = BuildSettings(DatasetLayout.SHARDS, 0.2, tokenizer=str(inputs.with_name("tokenizer")), **numbers)
    sources = tuple(TextSource(name, inputs / name) for name in ("texts", "rows"))
    return BuildRequest(sources, root, settings, share)


def build_shares(inputs: Path, folder: Path, count: int) -> list[Path]:
    roots = [folder / f"share-{index}" for index in range(count)]
    for index, root in enumerate(roots):
        build_share(request(inputs, root, Share(index, count)))
    return roots


@pytest.fixture
def whole(inputs: Path, tmp_path: Path) -> BuiltDataset:
    return build(request(inputs, tmp_path / "whole"))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_merged_shares_are_the_dataset_of_one_machine(
    inputs: Path, tmp_path: Path, whole: BuiltDataset, count: int
) -> None:
    roots = build_shares(inputs, tmp_path, count)
    before = contents(tmp_path / "share-0")
    shutil.move(inputs, tmp_path / "elsewhere")  # the machine that merges has no input
    merged = merge_shares(roots[::-1], tmp_path / "merged")
    assert contents(merged.root) == contents(whole.root)
    assert merge_shares(roots, tmp_path / "merged") == merged
    assert contents(tmp_path / "share-0") == before
    assert not (tmp_path / "merged.work").exists()


def test_a_merge_that_was_cut_off_resumes(
    inputs: Path, tmp_path: Path, whole: BuiltDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = build_shares(inputs, tmp_path, 2)
    place, calls = token_parts._place, []

    def dying(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return place(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(token_parts, "_place", dying)
    with pytest.raises(KeyboardInterrupt):
        merge_shares(roots, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert contents(merge_shares(roots, tmp_path / "merged").root) == contents(whole.root)
    assert len(calls) > 4  # no piece was placed twice but the one that was cut off


def test_a_share_is_made_once(inputs: Path, tmp_path: Path) -> None:
    wanted = request(inputs, tmp_path / "share", Share(0, 2))
    made = build_share(wanted)
    before = contents(made.root)
    assert build_share(wanted) == made
    assert contents(made.root) == before
    for other in (Share(1, 2), Share(0, 3)):
        with raising(PermanentError, Reason.OBJECT_EXISTS):
            build_share(request(inputs, made.root, other))


class TestRefused:
    def test_a_share_is_missing_or_named_twice(self, inputs: Path, tmp_path: Path) -> None:
        roots = build_shares(inputs, tmp_path, 3)
        with raising(PermanentError, Reason.DATASET_MISSING, "share 2/3 is missing"):
            merge_shares([roots[0], roots[2]], tmp_path / "merged")
        with raising(PermanentError, Reason.DATASET_MISSING, "a share is named twice"):
            merge_shares([*roots, roots[0]], tmp_path / "merged")
        (roots[1] / SHARE_FILE).unlink()
        with raising(PermanentError, Reason.DATASET_MISSING, "finish this share"):
            merge_shares(roots, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()

    def test_other_settings_or_other_input(self, inputs: Path, tmp_path: Path) -> None:
        roots = build_shares(inputs, tmp_path, 2)
        other = build_share(request(inputs, tmp_path / "other", Share(1, 2), sequence_length=17)).root
        with raising(PermanentError, Reason.OBJECT_DIFFERS, "settings is not that of"):
            merge_shares([roots[0], other], tmp_path / "merged")
        (inputs / "texts" / "new.txt").write_text("one more document")
        more = build_share(request(inputs, tmp_path / "more", Share(1, 2))).root
        with raising(PermanentError, Reason.OBJECT_DIFFERS, "inputs is not that of"):
            merge_shares([roots[0], more], tmp_path / "merged")

    def test_a_damaged_share(self, inputs: Path, tmp_path: Path) -> None:
        roots = build_shares(inputs, tmp_path, 2)
        run = max((roots[1] / "parts").rglob("*.tokens"))
        data = run.read_bytes()
        for damaged in (data[:-1], bytes([data[0] ^ 1]) + data[1:]):
            run.write_bytes(damaged)
            with raising(PermanentError, Reason.DATASET_MALFORMED, run.name, "copy the share again"):
                merge_shares(roots, tmp_path / "merged")
        run.write_bytes(data)
        described = json.loads((roots[0] / SHARE_FILE).read_bytes())
        (roots[0] / SHARE_FILE).write_text(json.dumps(described | {"units": described["units"][1:]}))
        with raising(PermanentError, Reason.DATASET_MALFORMED, SHARE_FILE):
            merge_shares(roots, tmp_path / "merged")
        (roots[0] / SHARE_FILE).write_text(json.dumps(described | {"count": "two"}))
        with raising(PermanentError, Reason.DATASET_MALFORMED, "count"):
            read_share(roots[0])
        assert not (tmp_path / "merged").exists()

    def test_what_cannot_be_shared(self, inputs: Path, tmp_path: Path) -> None:
        with raising(PermanentError, Reason.DATASET_TOO_SMALL, "ask for fewer"):
            build_share(request(inputs, tmp_path / "share", Share(0, 9)))
        for settings in (BuildSettings(DatasetLayout.SHARDS), BuildSettings(DatasetLayout.PAGES, tokenizer="x")):
            with pytest.raises(ValueError, match="a share"):
                BuildRequest((TextSource("x", inputs),), tmp_path / "share", settings, Share(0, 2))
        with pytest.raises(ValueError, match="write I/N"):
            Share(2, 2)
