"""Measure a build of shards from a streamed dataset: speed, memory and disk; and again with two kills on the way.

    python -m benchmarks.dataset_build [--quick]

The source is a Hugging Face repository of Parquet files on the disk: 2 GB of text, real documents of this machine, each
beginning at a random line. The build is `templar dataset build` in a process of its own, with a tokenizer that is
given. Memory is the process's largest resident set. Disk is the most that the folder of unfinished work and the
dataset take at a time, in the parts that are written, divided by what the dataset takes. The second build is killed
with SIGKILL after a third and after two thirds of the first one's time, and must end with the same digest. Speed by
CPU seconds is that of one core, also on a machine that others use.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks.command import measured
from templar.data.corpus import collect_documents
from templar.data.tokenizer import save_tokenizer, train_embedded_tokenizer
from templar.datasets.card import read_card

TEXT_BYTES = 2 * 10**9
QUICK_TEXT_BYTES = 8 * 10**6
FILES = 8
QUICK_FILES = 2
CORPUS_BYTES = 2**25
VOCAB_SIZE = 32000
MOST_MEMORY = 10**9
MOST_DISK_RATIO = 1.2
SAMPLES_PER_SHARD = 2**14
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Built:
    """A build that ended by itself, or was killed."""

    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    peak_disk_bytes: int


def write_source(folder: Path, num_bytes: int, num_files: int) -> int:
    """Write a repository with some text in Parquet files; returns the bytes of its text."""
    corpus = [document.text for document in collect_documents(max_bytes=CORPUS_BYTES)]
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: real\n  data_files:\n  - split: train\n    path: data/*.parquet\n---\n"
    )
    total = 0
    schema = pa.schema([("text", pa.string()), ("id", pa.int64())])
    for number in range(num_files):
        path = folder / "data" / f"train-{number:05d}-of-{num_files:05d}.parquet"
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            written = 0
            for texts in _rotated(corpus, number):
                writer.write_table(pa.table([texts, np.arange(len(texts))], schema=schema))
                written += sum(len(text.encode()) for text in texts)
                if written >= num_bytes // num_files:
                    break
        total += written
    return total


def _rotated(corpus: list[str], seed: int) -> Iterator[list[str]]:
    """Documents that begin at a random line and end with the lines before it, in row groups of 256, for ever."""
    random = np.random.default_rng(seed)
    while True:
        texts: list[str] = []
        for index in random.integers(0, len(corpus), 256):
            text = corpus[index]
            cut = text.find("\n", int(random.integers(0, len(text)))) + 1
            texts.append(text[cut:] + text[:cut])
        yield texts


def build(source: Path, tokenizer: Path, out: Path, *, kill_after_seconds: float | None = None) -> Built:
    """Run the command; it is killed after some time if that is given."""
    command = [
        *(sys.executable, "-m", "deployments", "dataset", "build", "--layout", "shards", "--out", str(out)),
        *("--source", f"text=hf:{source}?config=real", "--tokenizer", str(tokenizer)),
        *("--samples-per-shard", str(SAMPLES_PER_SHARD)),
    ]
    begin, disk = time.monotonic(), 0
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(out.with_name("hf"))}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # noqa: S603
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        disk = max(disk, _allocated(out) + _allocated(out.with_name(f"{out.name}.work")))
        if kill_after_seconds is not None and time.monotonic() - begin > kill_after_seconds:
            process.kill()
        time.sleep(_POLL_SECONDS)
    process.returncode = os.waitstatus_to_exitcode(status)
    errors = process.stderr.read().decode() if process.stderr else ""
    if process.returncode and kill_after_seconds is None:
        raise RuntimeError(f"the build failed: {errors.strip().splitlines()[-1]}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Built(time.monotonic() - begin, cpu_seconds, usage.ru_maxrss * 1024, max(disk, _allocated(out)))


def _allocated(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk; a hole takes none."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(root) / name).lstat().st_blocks * 512
            except FileNotFoundError:  # removed meanwhile
                continue
    return total


def run(quick: bool) -> dict[str, Any]:
    """Build twice, and compare."""
    with tempfile.TemporaryDirectory(prefix="templar-benchmark-") as name:
        folder = Path(name)
        text_bytes = write_source(
            folder / "source", QUICK_TEXT_BYTES if quick else TEXT_BYTES, QUICK_FILES if quick else FILES
        )
        texts = (document.text for document in collect_documents(max_bytes=2**22))
        save_tokenizer(train_embedded_tokenizer(texts, VOCAB_SIZE), folder / "tokenizer")
        whole = build(folder / "source", folder / "tokenizer", folder / "whole")
        killed = [
            build(folder / "source", folder / "tokenizer", folder / "killed", kill_after_seconds=whole.seconds * part)
            for part in (1 / 3, 2 / 3)
        ]
        last = build(folder / "source", folder / "tokenizer", folder / "killed")
        card, resumed = read_card(folder / "whole"), read_card(folder / "killed")
        output = _allocated(folder / "whole")
        num_shards = len(json.loads((folder / "whole" / "_shards.json").read_bytes())["splits"]["train"])
        runs = [whole, *killed, last]
        return {
            "text_bytes": text_bytes,
            "dataset_bytes": output,
            "train_shards": num_shards,
            "seconds": round(whole.seconds, 1),
            "text_mb_per_second": round(text_bytes / 1e6 / whole.seconds, 2),
            "cpu_seconds": round(whole.cpu_seconds, 1),
            "text_mb_per_cpu_second": round(text_bytes / 1e6 / whole.cpu_seconds, 2),
            "cpu_minutes_per_shard": round(whole.cpu_seconds / 60 / num_shards, 3),
            "peak_memory_bytes": max(each.peak_memory_bytes for each in runs),
            "disk_ratio": round(max(each.peak_disk_bytes for each in runs) / output, 3),
            "same_digest_after_two_kills": card == resumed,
        }


def report(quick: bool) -> dict[str, Any]:
    """Measure, print the table, and add whether the bars hold."""
    figures = run(quick)
    table = Table("figure", "value")
    for key, value in figures.items():
        table.add_row(key, f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)
    holds = (
        figures["peak_memory_bytes"] <= MOST_MEMORY
        and figures["same_digest_after_two_kills"]
        # A few megabytes of text are less than what is written at a time.
        and (quick or figures["disk_ratio"] <= MOST_DISK_RATIO)
    )
    return {**figures, "holds": holds}


if __name__ == "__main__":
    raise SystemExit(measured("dataset_build", __doc__, report, quick="8 MB of text"))
