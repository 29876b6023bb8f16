import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from templar.datasets.documents import TextSource, find_inputs, read_texts, source_from_text
from templar.errors import PermanentError, Reason
from tests.support.errors import raising

ROWS = ["first", "zweite Zeile ü", "", "third\r\nline"]
EXPECTED = [(0, "first"), (1, "zweite Zeile ü"), (3, "third\r\nline")]


def names(source):
    return [file.name for file in find_inputs(source)]


def documents(source):
    return [document for file in find_inputs(source) for document in read_texts(file)]


def write(path, kind, column, name="text"):
    """Write one column as a file of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"other": list(range(len(column))), name: column})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in table.to_pylist()))
    else:
        opened = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with path.open("wb") as file, opened(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def ending(kind):
    return {"stream": "arrow", "file": "arrow"}.get(kind, kind)


KINDS = ["parquet", "stream", "file", "jsonl"]


class TestFolders:
    def test_texts_in_the_order_of_their_names(self, tmp_path):
        for name in ("b.txt", "a/z.md", "a/y.rst", "a.txt", "c.html", ".hidden.txt", ".git/x.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        source = TextSource("source", tmp_path)
        assert documents(source) == [(name, name) for name in ("a.txt", "a/y.rst", "a/z.md", "b.txt")]
        assert names(TextSource("source", tmp_path, suffixes=(".html",))) == ["c.html"]

    def test_what_a_failed_job_has_left_is_passed_over(self, tmp_path, caplog):
        for name in (
            "a.parquet",
            "_temporary/0/task/a.parquet",
            "b/_c/a.parquet",
            "b/.d/a.parquet",
            "_e.parquet",
            ".a.parquet",
        ):
            write(tmp_path / name, "parquet", ROWS)
        (tmp_path / "_SUCCESS").touch()
        assert names(TextSource("source", tmp_path)) == ["a.parquet"]
        assert "_e.parquet" in caplog.text
        assert names(source_from_text(f"x={tmp_path / '_e.parquet'}")) == ["_e.parquet"]  # it is named

    def test_rows_before_texts(self, tmp_path):
        (tmp_path / "README.md").write_text("about the rows")
        write(tmp_path / "data" / "b.parquet", "parquet", ROWS)
        write(tmp_path / "data" / "a.jsonl", "jsonl", ROWS)
        source = TextSource("source", tmp_path)
        assert names(source) == ["data/a.jsonl", "data/b.parquet"]
        assert [name for name, _ in documents(source)] == [
            f"data/{file}#{row}" for file in ("a.jsonl", "b.parquet") for row, _ in EXPECTED
        ]

    def test_an_empty_text_is_left_out_and_a_mark_of_byte_order(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"")
        (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfbom\r\n")
        assert documents(TextSource("source", tmp_path)) == [("b.txt", "bom\r\n")]


class TestSaved:
    def save(self, folder, **state):
        """As `datasets.save_to_disk` does."""
        for number, part in enumerate((ROWS[:2], ROWS[2:])):
            write(folder / f"data-{number:05d}-of-00002.arrow", "stream", part)
        (folder / "dataset_info.json").write_text("{}")
        listed = [{"filename": f"data-{number:05d}-of-00002.arrow"} for number in (1, 0)]
        (folder / "state.json").write_text(json.dumps({"_data_files": listed} | state))
        return folder

    def test_its_files_in_its_order(self, tmp_path):
        root = self.save(tmp_path / "saved")
        write(root / "cache-1.arrow", "stream", ["a cache"])
        assert [text for _, text in documents(TextSource("source", root))] == ["third\r\nline", *ROWS[:2]]

    def test_several_splits(self, tmp_path):
        self.save(tmp_path / "train")
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        with pytest.raises(PermanentError, match="several splits") as caught:
            find_inputs(TextSource("source", tmp_path))
        assert str(tmp_path / "train") in caught.value.message

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ({"_indices_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
            ({"_data_files": None}, "lists no _data_files"),
        ],
    )
    def test_unsupported_saved_datasets_are_refused(self, tmp_path, state, message):
        root = self.save(tmp_path / "saved", **state)
        with pytest.raises(PermanentError, match=message):
            find_inputs(TextSource("source", root))


class TestRows:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_gives_the_same(self, tmp_path, kind):
        path = write(tmp_path / f"x.{ending(kind)}", kind, ROWS, name="body")
        found = documents(TextSource("source", path, column="body"))
        assert found == [(f"{path.name}#{row}", text) for row, text in EXPECTED]

    @pytest.mark.parametrize("kind", ["stream", "jsonl"])
    @pytest.mark.parametrize(
        ("column", "name", "message"),
        [(ROWS, "body", "'text'"), (["a", None, "b"], "text", "row 1|line 3"), ([1, 2], "text", "int64|line 1")],
        ids=["no column", "null", "numbers"],
    )
    def test_wrong_columns_are_named(self, tmp_path, kind, column, name, message):
        path = write(tmp_path / f"x.{ending(kind)}", kind, column, name=name)
        with raising(PermanentError, Reason.DATASET_MALFORMED, match=message) as caught:
            documents(TextSource("source", path))
        assert caught.value.message.startswith(f"{path}: ")

    @pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
    def test_damaged_files(self, tmp_path, kind):
        path = tmp_path / f"x.{kind}"
        path.write_bytes(b"ARROW1 and nonsense")
        with raising(PermanentError, Reason.DATASET_MALFORMED, str(path)):
            documents(TextSource("source", path))

    @pytest.mark.parametrize("column", [pa.array([], pa.string()), pa.array([], pa.null())])
    @pytest.mark.parametrize("kind", ["parquet", "stream"])
    def test_a_file_without_rows_has_no_documents(self, tmp_path, kind, column):
        assert documents(TextSource("source", write(tmp_path / f"x.{ending(kind)}", kind, column))) == []

    def test_a_line_that_is_nested_too_deeply(self, tmp_path):
        path = tmp_path / "x.jsonl"
        path.write_text('{"text": "a"}\n{"text": "b", "meta": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
        with raising(PermanentError, Reason.DATASET_MALFORMED, f"{path}: line 2 is JSON that is nested too deeply"):
            documents(TextSource("source", path))

    def test_half_a_surrogate_pair(self, tmp_path):
        (tmp_path / "x.jsonl").write_text('{"text": "\\ud800"}\n')
        with pytest.raises(PermanentError, match="line 1"):
            documents(TextSource("source", tmp_path / "x.jsonl"))


def test_a_source_has_a_name_of_its_own_or_that_of_its_path(tmp_path):
    for name in ("v1.5", "lang=en"):
        (tmp_path / name).mkdir()
    assert source_from_text(str(tmp_path / "v1.5")).name == "v1.5"
    assert source_from_text("books=/a/b").name == "books"
    assert source_from_text("/a/b.c").name == "b"
    assert source_from_text(f"en={tmp_path / 'lang=en'}") == TextSource("en", tmp_path / "lang=en")
    with pytest.raises(ValueError, match="suffixes"):
        TextSource("x", Path("x"), suffixes=())
    (tmp_path / "a=b.txt").write_text("text")
    for path in ("/a/b c", str(tmp_path / "a=b.txt")):  # its name is none for a source
        with pytest.raises(ValueError, match="write NAME=PATH"):
            source_from_text(path)


def test_a_text_or_a_name_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with raising(PermanentError, Reason.DATASET_MALFORMED, "not UTF-8", tmp_path / "a.txt"):
        documents(TextSource("source", tmp_path))
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text")
    with raising(PermanentError, Reason.DATASET_MALFORMED, match=r"caf\\udce9\.txt'.*rename it"):
        find_inputs(TextSource("source", tmp_path))


def test_a_link_to_a_folder_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "more").symlink_to(tmp_path)
    with pytest.raises(PermanentError, match="links to folders") as caught:
        find_inputs(TextSource("source", tmp_path / "in"))
    assert str(tmp_path / "in" / "more") in caught.value.message


COMPRESSED = {"gz": "gzip", "zst": "zstd"}


def compressed(path, pieces):
    """JSON lines in as many members of a compressed file as there are pieces."""
    members = [("".join(json.dumps({"text": text}) + "\n" for text in piece)).encode() for piece in pieces]
    codec = pa.Codec(COMPRESSED[path.suffix[1:]])
    path.write_bytes(b"".join(codec.compress(member, asbytes=True) for member in members))
    return path


@pytest.mark.parametrize("end", COMPRESSED)
class TestCompressedLines:
    def test_they_are_read_as_others_are(self, tmp_path, end):
        path = compressed(tmp_path / f"x.jsonl.{end}", [ROWS[:2], ROWS[2:]])
        assert documents(source_from_text(str(path))) == [(f"{path.name}#{row}", text) for row, text in EXPECTED]
        assert source_from_text(str(path)).name == "x"

    def test_a_damaged_file(self, tmp_path, end):
        path = compressed(tmp_path / f"x.jsonl.{end}", [[f"{row} of many" for row in range(20_000)]])
        data = path.read_bytes()
        changed = [data[:1000] + b"damaged" + data[1007:]] if end == "gz" else []  # Arrow writes zstd without checksums
        for damaged in (data[: len(data) // 2], *changed):
            path.write_bytes(damaged)
            with raising(PermanentError, Reason.DATASET_MALFORMED, path.name):
                documents(TextSource("source", path))

    def test_an_empty_file(self, tmp_path, end):
        path = tmp_path / f"x.jsonl.{end}"
        path.touch()
        with raising(PermanentError, Reason.DATASET_MALFORMED, path, "has 0 bytes"):
            documents(TextSource("source", path))
        compressed(path, [[]])
        assert documents(TextSource("source", path)) == []


def test_a_long_window_is_named_with_its_remedy(tmp_path):
    line = b'{"text": "a"}\n'
    path = tmp_path / "x.jsonl.zst"
    # One frame with a window of 2 GiB (exponent 21 above 1 KiB) and one raw block, the last.
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + (len(line) << 3 | 1).to_bytes(3, "little") + line)
    with raising(PermanentError, Reason.DATASET_MALFORMED, path, "window is too long: compress the file again"):
        documents(TextSource("source", path))


def test_an_unknown_format(tmp_path):
    (tmp_path / "table.csv").write_text("text\nfirst\n")
    with raising(PermanentError, Reason.DATASET_MALFORMED, "unknown format", "*.jsonl.zst", "--suffix"):
        find_inputs(TextSource("source", tmp_path / "table.csv"))
    assert names(TextSource("source", tmp_path / "table.csv", suffixes=(".csv",))) == ["table.csv"]
