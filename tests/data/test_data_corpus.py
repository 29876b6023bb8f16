from hypothesis import given, settings
from hypothesis import strategies as st

from templar.data.corpus import (
    MIN_DOCUMENT_CHARS,
    Source,
    collect_documents,
    docstrings,
    split_rows,
    without_docstrings,
)


def text_source(root, name="texts"):
    return Source(name, root, ".txt", str)


def write(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


def test_documents_come_by_name_and_stay_within_the_limit(tmp_path):
    for number in range(40):
        write(tmp_path, f"folder{number % 3}/{number}.txt", f"{number:3d}\n" * 100)
    documents = collect_documents(max_bytes=10_000, sources=[text_source(tmp_path)])
    names = [document.name for document in documents]
    assert (len(names), names) == (25, sorted(names))
    assert {name.split("/")[0] for name in names} == {"folder0", "folder1", "folder2"}
    assert collect_documents(max_bytes=10_000, sources=[text_source(tmp_path)]) == documents


def test_skipped_files(tmp_path):
    text = "x" * 300
    for name in ("test/a.txt", "sub/tests/b.txt", "site-packages/c.txt", "_sysconfigdata_x.txt", "d.md"):
        write(tmp_path, name, text)
    write(tmp_path, "short.txt", "x" * (MIN_DOCUMENT_CHARS - 1))
    write(tmp_path, "large.txt", "x" * 1_000)
    write(tmp_path, "taken.txt", text)
    (tmp_path / "undecodable.txt").write_bytes(b"\xff" * 300)
    documents = collect_documents(max_bytes=7_900, sources=[text_source(tmp_path)])
    assert [document.name for document in documents] == ["taken.txt"]


def test_an_unused_share_goes_to_the_next_source(tmp_path):
    write(tmp_path, "small/only.txt", "x" * 500)
    for number in range(40):
        write(tmp_path, f"large/{number}.txt", "y" * 500)
    sources = [text_source(tmp_path / "small", "small"), text_source(tmp_path / "large", "large")]
    documents = collect_documents(max_bytes=10_000, sources=sources)
    assert [document.source for document in documents] == ["small"] + ["large"] * 19


def test_a_docstring_is_text_of_its_own_and_leaves_the_code():
    code = '"""One,\ntwo.\n"""\nimport os\f\n\n\nasync def later():\n    r"""Three."""\n    return "not one"\n'
    assert docstrings(code) == "One,\ntwo.\n\nThree.\n\n"
    assert without_docstrings(code) == 'import os\f\n\n\nasync def later():\n    return "not one"\n'


@settings(max_examples=50)
@given(
    text=st.text(alphabet=st.sampled_from("ab \n\r\x0cé"), max_size=400) | st.text(max_size=200),
    max_chars=st.integers(1, 60),
)
def test_rows_put_together_are_the_document(text, max_chars):
    rows = split_rows(text, max_chars)
    assert "".join(rows) == text
    assert all(0 < len(row) <= max_chars for row in rows)
