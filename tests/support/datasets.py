"""Small real datasets for tests: documents with numbered lines, so that every row names its place."""

import pyarrow.parquet as pq

from templar.data.corpus import Document
from templar.datasets.page_writer import build_dataset, upload_dataset
from tests.support.commands import contents as contents  # noqa: PLC0414 - tests of datasets find it here

PREFIX = "dataset"


def numbered_documents(source, *, num_documents, num_lines):
    """Documents whose lines are all different and all 40 characters long, newline included."""

    def text(number):
        return "".join(f"{source} document {number} line {line} ".ljust(39, "-") + "\n" for line in range(num_lines))

    return [Document(source, f"{number:03d}.txt", text(number)) for number in range(num_documents)]


def write_books(folder):
    """A folder of text files, one per document."""
    folder.mkdir()
    for document in numbered_documents("books", num_documents=10, num_lines=20):
        (folder / document.name).write_text(document.text)
    return folder


def small_dataset(root, store):
    """Build two configs, one line per row, in groups and files that fit no page, and upload them under `PREFIX`."""
    documents = [
        *numbered_documents("alpha", num_documents=10, num_lines=13),
        *numbered_documents("beta", num_documents=6, num_lines=11),
    ]
    sizes = {"vocab_size": 300, "row_chars": 40, "rows_per_group": 7, "shard_rows": 25}
    build_dataset(documents, root, held_out_fraction=0.2, **sizes)
    upload_dataset(root, store, PREFIX)
    return root


def rows_of(root, folder):
    files = sorted((root / folder).glob("*.parquet"))
    return [text for file in files for text in pq.read_table(file).column("text").to_pylist()]
