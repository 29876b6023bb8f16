"""Datasets from files: the bytes do not depend on the number of threads or of kills."""

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from templar import interrupt
from templar.canonical import canonical_json, file_sha256, sha256_hex
from templar.data.corpus import Document
from templar.data.dataset import ShardedTraining
from templar.data.pages.page_dataset import PageDataset
from templar.data.shards import shard_writer
from templar.data.shards.shard_dataset import ShardedDataset
from templar.data.shards.shard_writer import build_shards
from templar.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer, train_embedded_tokenizer
from templar.datasets import token_parts, units
from templar.datasets.build_dataset import LOCK_FILE, alone, assemble, build, make_parts, plan_units, read_units
from templar.datasets.card import read_card
from templar.datasets.documents import TextSource
from templar.datasets.page_writer import upload_dataset
from templar.datasets.plan import BuildRequest, BuildSettings, DatasetLayout
from templar.datasets.units import find_groups, in_threads
from templar.datasets.verify import verify_dataset
from templar.errors import PermanentError, Reason, TransientError
from templar.store.directory import DirectoryStore
from tests.support.datasets import contents, numbered_documents
from tests.support.errors import raising
from tests.support.memory_store import MemoryStore

ROOT = Path(__file__).parents[2]
LAYOUTS = [DatasetLayout.SHARDS, DatasetLayout.PAGES]
SMALL: dict[str, Any] = {
    "held_out_fraction": 0.2,
    "vocab_size": 300,
    "sequence_length": 16,
    "samples_per_shard": 100,
    "block_bytes": 512,
    "row_chars": 100,
    "rows_per_group": 7,
    "shard_rows": 20,
}


def texts(folder):
    """Text files in a folder; the documents."""
    documents = numbered_documents("texts", num_documents=12, num_lines=20)
    for document in documents:
        (folder / "texts").mkdir(parents=True, exist_ok=True)
        (folder / "texts" / document.name).write_text(document.text)
    return documents


def rows(folder):
    """Two Parquet files in a folder; the documents."""
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    documents: list[Document] = []
    for name in ("a", "b"):
        members = [each.text for each in numbered_documents(f"rows {name}", num_documents=11, num_lines=9)]
        pq.write_table(pa.table({"text": members}), folder / "rows" / f"{name}.parquet")
        documents += [Document("rows", f"{name}.parquet#{row}", text) for row, text in enumerate(members)]
    return documents


@pytest.fixture
def source_folder(tmp_path):
    folder = tmp_path / "input"
    texts(folder)
    rows(folder)
    return folder


def request(folder, root, layout, **changes):
    sources = tuple(TextSource(name, folder / name) for name in ("texts", "rows"))
    return BuildRequest(sources, root, BuildSettings(layout, **SMALL | changes))


def prepare(wanted):
    """All of a build that comes before the parts."""
    return plan_units(wanted, read_units(wanted, find_groups(wanted.sources)))


def test_the_bytes_are_those_of_a_build_in_memory(source_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "MOST_TEXT_FILES", 5)
    save_tokenizer(train_embedded_tokenizer(["a document of lines"], 260), tmp_path / "tokenizer")
    documents = [*texts(source_folder), *rows(source_folder)]
    index = build_shards(
        documents,
        tmp_path / "memory",
        vocab_size=1,
        sequence_length=16,
        samples_per_shard=100,
        held_out_fraction=0.2,
        block_bytes=512,
        tokenizer=load_tokenizer(str(tmp_path / "tokenizer")),
    )
    changes = {"tokenizer": str(tmp_path / "tokenizer"), "license": "odc-by", "language": "en"}
    wanted = request(source_folder, tmp_path / "built", DatasetLayout.SHARDS, **changes)
    built = build(wanted)
    assert len(find_groups(wanted.sources)) == 5
    found = contents(built.root)
    assert found.keys() - contents(tmp_path / "memory").keys() == {"card.json", "README.md"}
    assert contents(tmp_path / "memory").items() <= found.items()
    assert built.card.digest == index.digest
    shards = ShardedDataset([DirectoryStore(built.root, writable=False)], "", folder=tmp_path / "cache")
    origin = ShardedTraining(shards, 16, 1, 1).origin()
    assert origin is not None
    assert (origin.settings.license, origin.settings.language) == ("odc-by", "en")
    with pytest.raises(ValueError, match="license is 'a: b'"):
        request(source_folder, tmp_path / "built", DatasetLayout.SHARDS, license="a: b")


@given(lengths=st.lists(st.integers(0, 40)), length=st.integers(1, 12))
def test_best_fit_fills_every_sample_and_cuts_only_ends_off(lengths, length):
    samples, kept, heads, starts = token_parts.best_fit(lengths, length)
    owners: list[tuple[int, int] | None] = [None] * (samples * length)
    for number, tokens in enumerate(lengths):
        whole = tokens // length * length
        assert heads[number] % length == 0
        assert 0 <= kept[number] <= tokens - whole
        for position, token in enumerate([*range(whole), *range(whole, whole + kept[number])]):
            place = heads[number] + position if token < whole else starts[number] + token - whole
            assert owners[place] is None
            owners[place] = number, token
    assert None not in owners
    assert sum(lengths) - samples * length < length or any(0 < kept[i] < n % length for i, n in enumerate(lengths))


def test_samples_begin_with_documents(tmp_path):
    documents = [" ".join([f"<{number}"] * (1 + number % 9)) for number in range(400)]
    (tmp_path / "texts").mkdir()
    pq.write_table(pa.table({"text": documents}), tmp_path / "texts" / "a.parquet")
    settings = BuildSettings(DatasetLayout.SHARDS, **SMALL | {"packing": "best_fit", "sequence_length": 40})
    built = build(BuildRequest((TextSource("texts", tmp_path / "texts"),), tmp_path / "built", settings))
    shards = ShardedDataset([DirectoryStore(built.root, writable=False)], "", folder=tmp_path / "cache")
    samples = shards.shard(0).read(np.arange(shards.index.splits["train"][0].num_samples))
    tokenizer = load_tokenizer(str(built.root))
    ends = [np.flatnonzero(each == tokenizer.eos_id) + 1 for each in samples]
    texts = [[tokenizer.decode(part.tolist()) for part in np.split(*each)] for each in zip(samples, ends, strict=True)]
    assert all(sample[0].startswith("<") for sample in texts)
    assert len({text for sample in texts for text in sample} & set(documents)) > 200
    assert replace(settings, packing="stream", license="stream").described().items() >= {("license", "stream")}
    with pytest.raises(ValueError, match="packing is 'none': choose one of stream, best_fit"):
        replace(settings, packing="none")


def test_compressed_shards_hold_the_same_samples(source_folder, tmp_path):
    """Read at random and downloaded, from a store of which one copy is damaged; each damage is found by name."""
    plain, packed = (
        build(request(source_folder, tmp_path / kind, DatasetLayout.SHARDS, compression=kind)).root
        for kind in ("none", "zstd")
    )
    name = "train_000000.npy"
    assert not (packed / name).exists()
    assert (packed / f"{name}.zst").stat().st_size < (plain / name).stat().st_size
    assert all(not each.problem for each in verify_dataset(DirectoryStore(packed, writable=False), ""))
    damaged = shutil.copytree(packed, tmp_path / "damaged")
    data = bytearray((damaged / f"{name}.zst").read_bytes())
    data[0] ^= 255
    (damaged / f"{name}.zst").write_bytes(data)
    (found,) = (each for each in verify_dataset(DirectoryStore(damaged, writable=False), "") if each.problem)
    assert (found.path, found.problem.split(",")[1]) == (f"{name}.zst", " first in block 0")
    stores = [DirectoryStore(each, writable=False) for each in (damaged, packed)]
    dataset = ShardedDataset(stores, "", folder=tmp_path / "cache")
    expected = np.load(plain / name).reshape(-1, SMALL["sequence_length"])
    chosen = np.random.default_rng(3).permutation(len(expected))[:9]
    assert np.array_equal(dataset.shard(0).read(chosen), expected[chosen])
    dataset.shard(0).download()
    assert (tmp_path / "cache" / name).read_bytes() == (plain / name).read_bytes()
    with raising(TransientError, Reason.DATASET_MALFORMED):
        ShardedDataset(stores[:1], "", folder=tmp_path / "other").shard(0).download()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixture_leaves_training_text_out(source_folder, tmp_path, layout):
    """The characters of the sources are in proportion but for less than a document; held-out text is the same."""
    settings = {"tokenizer": str(tmp_path / "tokenizer"), "sequence_length": 1, "samples_per_shard": 2**16}
    save_tokenizer(train_embedded_tokenizer(["a document of lines"], 260), tmp_path / "tokenizer")
    whole, mixed = (
        build(request(source_folder, tmp_path / f"of {mixture}", layout, mixture=mixture, **settings))
        for mixture in ("", "texts=1.5,rows=0.5")
    )
    before, after = ({source.name: source.splits for source in built.card.sources} for built in (whole, mixed))
    assert {name: splits["held_out"] for name, splits in after.items()} == {
        name: splits["held_out"] for name, splits in before.items()
    }
    longest = max(len(each.text) for each in rows(source_folder))
    assert after["texts"] == before["texts"]
    assert 0 <= after["rows"]["train"].characters - before["texts"]["train"].characters / 3 < longest
    assert whole.card.settings.keys() ^ mixed.card.settings.keys() == {"mixture"}
    if layout is DatasetLayout.SHARDS:
        tokens = np.load(mixed.root / "train_000000.npy")
        ends = np.flatnonzero(tokens == load_tokenizer(str(mixed.root)).eos_id) + 1
        assert mixed.card.total("train").documents == len(ends)
        assert mixed.card.total("train").tokens == len(tokens) == ends[-1]
    for mixture, problem in (("rows=1", "name each of rows, texts once"), ("rows=1,texts=0", "a weight above 0")):
        with pytest.raises(ValueError, match=problem):
            request(source_folder, tmp_path / "built", layout, mixture=mixture)


CHOSEN = {"packing": "best_fit", "mixture": "texts=2,rows=1", "compression": "zstd"}
KILLED = """
import os, signal, sys
from pathlib import Path
from templar.datasets.build_dataset import build
from templar.datasets import token_parts
from tests.datasets.test_datasets_build_dataset import CHOSEN, DatasetLayout, request

token_parts.RUN_TOKENS = token_parts.PIECE_TOKENS = 1000
left = int(sys.argv[4])
watched = ("open", "os.truncate", "os.rename", "os.link", "os.mkdir", "os.remove")

def hook(event, args):
    global left
    if event in watched and any(".work" in str(a) for a in args):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

wanted = request(Path(sys.argv[1]), Path(sys.argv[2]), DatasetLayout(sys.argv[3]), **CHOSEN)
sys.addaudithook(hook)
build(wanted, workers=2)
"""


class TestKilled:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_killed_build_resumes_with_the_same_bytes(self, source_folder, tmp_path, layout, monkeypatch):
        """Each process of one build is killed later than the one before it, until one completes it."""
        monkeypatch.setattr(token_parts, "PIECE_TOKENS", 1000)
        whole = build(request(source_folder, tmp_path / "whole", layout, **CHOSEN))
        root, deaths, step = tmp_path / "killed", 0, 20
        while True:
            command = [sys.executable, "-c", KILLED, str(source_folder), str(root), str(layout), str(step)]
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            if status == 0:
                break
            assert status == -signal.SIGKILL
            assert not root.exists() or contents(root) == contents(whole.root)
            deaths, step = deaths + 1, step * 6
        assert deaths >= 2
        assert contents(root) == contents(whole.root)
        work = tmp_path / "killed.work"
        assert not work.exists()
        (work / "parts").mkdir(parents=True)  # as after a kill in the last step
        assert build(request(source_folder, root, layout, **CHOSEN)).card == whole.card
        assert not work.exists()

    def test_parts_are_made_once(self, source_folder, tmp_path, monkeypatch):
        plan = prepare(request(source_folder, tmp_path / "built", DatasetLayout.SHARDS))
        make_parts(plan)
        parts = contents(plan.request.work)
        stamps = {path: path.stat().st_mtime_ns for path in (plan.request.work / "parts").iterdir()}
        again = prepare(plan.request)
        assert again == plan
        make_parts(again)
        assert contents(plan.request.work) == parts
        assert {path: path.stat().st_mtime_ns for path in (plan.request.work / "parts").iterdir()} == stamps
        assert assemble(again).root.exists()

    def test_the_disk_holds_every_token_about_once(self, source_folder, tmp_path, monkeypatch):
        """While tokens are placed into the shards, they are cut off the parts."""
        monkeypatch.setattr(token_parts, "RUN_TOKENS", 2000)
        monkeypatch.setattr(token_parts, "PIECE_TOKENS", 500)
        plan = prepare(request(source_folder, tmp_path / "built", DatasetLayout.SHARDS))
        make_parts(plan)
        place, left = token_parts._place, []

        def watched(*arguments):
            left.append(sum(path.stat().st_size for path in plan.request.work.rglob("*.tokens")))
            return place(*arguments)

        monkeypatch.setattr(token_parts, "_place", watched)
        assemble(plan)
        assert len(left) > 5
        pieces = [before - after for before, after in itertools.pairwise(left)]
        assert all(500 <= piece <= 5000 for piece in pieces)
        assert left[-1] == left[0] - sum(pieces) <= 5000

    def test_another_merge_takes_no_part_that_was_cut(self, source_folder, tmp_path, monkeypatch):
        """A build that was killed while it merged, and goes on with other settings, makes the cut parts again."""
        monkeypatch.setattr(token_parts, "PIECE_TOKENS", 500)
        place, calls = token_parts._place, []

        def dying(*arguments):
            calls.append(arguments)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return place(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(token_parts, "_place", dying)
            with pytest.raises(KeyboardInterrupt):
                build(request(source_folder, tmp_path / "built", DatasetLayout.SHARDS))
        built = build(request(source_folder, tmp_path / "built", DatasetLayout.SHARDS, samples_per_shard=70))
        fresh = build(request(source_folder, tmp_path / "fresh", DatasetLayout.SHARDS, samples_per_shard=70))
        assert contents(built.root) == contents(fresh.root)

    def test_a_full_disk(self, source_folder, tmp_path, monkeypatch):
        """One line with the remedy, nothing under the final name, and the same command completes the build."""

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        wanted = request(source_folder, tmp_path / "built", DatasetLayout.SHARDS)
        with monkeypatch.context() as patch:
            patch.setattr(token_parts, "sync", full)
            with raising(TransientError, Reason.LOCAL_FILE, "No space left on device; free space there"):
                build(wanted)
        assert not wanted.root.exists()
        assert build(wanted).card == build(request(source_folder, tmp_path / "whole", DatasetLayout.SHARDS)).card

    def test_a_file_that_changes_its_bytes_alone(self, source_folder, tmp_path):
        plan = prepare(request(source_folder, tmp_path / "built", DatasetLayout.PAGES))
        path = source_folder / "texts" / "003.txt"
        path.write_bytes(path.read_bytes().swapcase())
        with raising(PermanentError, Reason.OBJECT_DIFFERS, "build it again"):
            make_parts(plan)
        build(plan.request)
        build(request(source_folder, tmp_path / "fresh", DatasetLayout.PAGES))
        assert contents(plan.request.root) == contents(tmp_path / "fresh")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_an_unreadable_part_is_made_again(self, source_folder, tmp_path, layout):
        plan = prepare(request(source_folder, tmp_path / "built", layout))
        make_parts(plan)
        parts = contents(plan.request.work)
        manifests = [*plan.request.work.rglob("documents.npy"), *plan.request.work.rglob("contents.json")]
        for path in manifests:
            path.write_bytes(b"")
        make_parts(plan)
        assert manifests
        assert contents(plan.request.work) == parts
        if layout is DatasetLayout.SHARDS:
            (plan.request.work / f"dataset-{plan.digest[:16]}").mkdir()
            (plan.request.work / f"dataset-{plan.digest[:16]}" / "train_000000.json").write_bytes(b"{")
        whole = build(request(source_folder, tmp_path / "whole", layout))
        assert contents(assemble(plan).root) == contents(whole.root)

    def test_another_dataset_in_the_folder_is_not_overwritten(self, source_folder, tmp_path):
        wanted = request(source_folder, tmp_path / "built", DatasetLayout.SHARDS)
        before = contents(build(wanted).root)
        wanted.work.mkdir()
        (wanted.work / "unfinished").write_text("other work")
        others = [
            request(source_folder, wanted.root, DatasetLayout.SHARDS, sequence_length=17),
            request(source_folder, wanted.root, DatasetLayout.PAGES),
            replace(wanted, sources=wanted.sources[:1]),
            replace(wanted, sources=(replace(wanted.sources[0], name="other"), *wanted.sources[1:])),
        ]
        for other in others:
            with raising(PermanentError, Reason.OBJECT_EXISTS):
                build(other)
        assert contents(wanted.work) == {"unfinished": b"other work"}
        (source_folder / "texts" / "003.txt").write_text("something else\n" * 50)
        with pytest.raises(PermanentError, match="is there already"):
            build(wanted)
        assert contents(wanted.root) == before


class TestRefused:
    def test_a_second_build_at_the_same_time_is_refused(self, source_folder, tmp_path):
        wanted = request(source_folder, tmp_path / "built", DatasetLayout.SHARDS)
        wanted.work.mkdir()
        with (wanted.work / LOCK_FILE).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with raising(PermanentError, Reason.ALREADY_RUNNING):
                build(wanted)

    def test_a_lock_that_was_removed_before_it_was_taken(self, source_folder, tmp_path, monkeypatch):
        """As when the process before this one finishes between the open and the lock."""
        wanted = request(source_folder, tmp_path / "built", DatasetLayout.SHARDS)
        lock, taken = fcntl.flock, []

        def late(file, how):
            if not taken:
                (wanted.work / LOCK_FILE).unlink()
            taken.append(file)
            lock(file, how)

        wanted.work.mkdir()
        monkeypatch.setattr(fcntl, "flock", late)
        with alone(wanted.work):
            assert len(taken) == 2

    @pytest.mark.parametrize("name", ["rows", "link/built"])
    def test_a_folder_in_a_source(self, source_folder, name):
        (source_folder / "link").symlink_to(source_folder / "rows")
        with pytest.raises(ValueError, match="name a folder outside of the source"):
            request(source_folder, source_folder / name, DatasetLayout.SHARDS)

    @pytest.mark.parametrize("source", ["built.work", "built.work/deep", "built/deep"])
    def test_unfinished_work_in_a_source_or_around_it(self, tmp_path, source):
        with pytest.raises(ValueError, match="name a"):
            BuildRequest((TextSource("x", tmp_path / source),), tmp_path / "built", BuildSettings(DatasetLayout.SHARDS))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_an_index_larger_than_readers_accept_is_refused(self, source_folder, tmp_path, monkeypatch, layout):
        monkeypatch.setattr(shard_writer, "MAX_INDEX_BYTES", 300)
        monkeypatch.setattr("templar.datasets.page_writer.MAX_SHARD_SIZES_BYTES", 500)
        wanted = request(source_folder, tmp_path / "built", layout)
        with raising(PermanentError, Reason.OBJECT_TOO_LARGE, match=r"raise shard_rows|raise samples_per_shard"):
            build(wanted)
        (partial,) = wanted.work.glob("dataset-*")
        assert not [*partial.glob("*.npy"), *partial.glob("_*")]


class TestTheResult:
    def test_pages(self, source_folder, tmp_path):
        built = build(request(source_folder, tmp_path / "built", DatasetLayout.PAGES))
        store = MemoryStore()
        upload_dataset(built.root, store, "here")
        for split in ("train", "held_out"):
            dataset = PageDataset([store], "here", rows_per_page=1, split=split)
            pages = "".join("".join(dataset.read_page(number).texts) for number in range(dataset.num_pages))
            assert len(pages) == built.card.total(split).characters
        sizes = json.loads((built.root / "_shard_sizes.json").read_bytes())
        assert set(sizes) == {"texts", "texts/held_out", "rows", "rows/held_out"}
        assert built.card.digest == sha256_hex(canonical_json(sizes))
        assert load_tokenizer(str(built.root)).digest == built.card.tokenizer.digest

    def test_the_card(self, source_folder, tmp_path):
        built = build(request(source_folder, tmp_path / "built", DatasetLayout.SHARDS))
        data = (built.root / "card.json").read_bytes()
        card = json.loads(data)
        assert canonical_json(card) == data
        assert str(tmp_path) not in data.decode()
        assert (card["version"], card["layout"], card["tokenizer"]["embedded"]) == (1, "shards", True)
        assert card["digest"] == sha256_hex((built.root / "_shards.json").read_bytes())
        assert "row_chars" not in card["settings"]
        path = source_folder / "rows" / "a.parquet"
        first = {"name": "a.parquet", "sha256": file_sha256(path), "size_bytes": path.stat().st_size}
        assert [source["files"][0] for source in card["sources"] if source["name"] == "rows"] == [first]
        documents = [*texts(source_folder), *rows(source_folder)]
        totals = card["splits"]
        assert sum(totals[split]["documents"] for split in totals) == len(documents)
        assert sum(totals[split]["characters"] for split in totals) == sum(len(each.text) for each in documents)
        assert all(0 <= totals[split]["tokens"] - card["sample_tokens"][split] < 16 for split in totals)
        readme = (built.root / "README.md").read_text()
        assert all(words in readme for words in (card["digest"], "a.parquet", "| `<eos>` |"))
        assert built.num_bytes == sum(map(len, contents(built.root).values()))
        assert read_card(built.root) == built.card

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_dropped_characters_are_counted_and_said(self, source_folder, tmp_path, layout, caplog):
        """Also the name of the end token, which becomes letters, and one end token stands after each document."""
        (source_folder / "texts" / "more.txt").write_text("e</s>e é\n" * 9)
        vocabulary = {char: number for number, char in enumerate([*"abcdefghijklmnopqrstuvwxyz</>", "</s>"])}
        backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
        backend.add_tokens(["</s>"])
        save_tokenizer(Tokenizer(backend, "</s>"), tmp_path / "tokenizer")
        settings = {"tokenizer": str(tmp_path / "tokenizer"), "sequence_length": 1}
        built = build(request(source_folder, tmp_path / "built", layout, **settings))
        documents = [*texts(source_folder), *rows(source_folder), Document("", "", "e</s>e é\n" * 9)]
        unknown = {*"".join(each.text for each in documents)} - vocabulary.keys()
        dropped = sum(each.text.count(char) for each in documents for char in unknown if not char.isspace())
        total = built.card.total("train") + built.card.total("held_out")
        assert total.dropped == dropped > 9
        assert f"does not know {dropped} characters" in caplog.text
        if layout is DatasetLayout.SHARDS:
            ends = [np.load(path) == vocabulary["</s>"] for path in built.root.glob("*.npy")]
            assert sum(map(np.count_nonzero, ends)) == total.documents


def test_an_error_ends_running_calls():
    ended: list[BaseException] = []

    def work(number):
        if number:
            raise KeyError(number)
        try:
            while True:
                units.check_ended()
        except interrupt.StoppedError as error:
            ended.append(error)
            raise

    with pytest.raises(KeyError):
        in_threads(work, range(2), workers=2)
    assert ended
