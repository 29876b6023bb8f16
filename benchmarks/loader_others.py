"""Read random tokens by litData or by MosaicML Streaming, for `benchmarks.loader`, in a Python that has them.

    python -m venv others && others/bin/pip install torch==2.13.0 litdata mosaicml-streaming

    others/bin/python benchmarks/loader_others.py litdata|mosaic TOKENS FOLDER LENGTH BATCH WORKERS

TOKENS is a file of uint16. It is written into FOLDER in the package's own format. Prints the tokens per second of two
passes of shuffled batches as a JSON list. MosaicML's package imports torchvision, of which not every torch has a build;
an empty module stands in for it.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

CHUNK_BYTES = 64 << 20  # both packages' default


def rate(batches: Iterable[Any]) -> float:
    """Read all batches; the tokens per second."""
    started, tokens = time.perf_counter(), 0
    for batch in batches:
        tokens += (batch["tokens"] if isinstance(batch, dict) else batch).numel()
    return tokens / (time.perf_counter() - started)


def chunk(tokens: Path, first: int, *, count: int) -> Any:
    """Yield the tokens of some samples, which litData puts together."""
    import torch  # noqa: PLC0415

    yield torch.from_numpy(np.fromfile(tokens, np.uint16, count, offset=2 * first))


def litdata(tokens: Path, folder: Path, length: int, batch: int, workers: int) -> list[float]:
    """Passes of litData with its loader for tokens."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize  # noqa: PLC0415

    total = tokens.stat().st_size // 2
    step = CHUNK_BYTES // 2 // length * length
    optimize(
        partial(chunk, tokens, count=step),
        list(range(0, total, step)),
        str(folder),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
        item_loader=TokensLoader(block_size=length),
    )
    dataset = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=length), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=batch, num_workers=workers)
    return [rate(loader) for _ in range(2)]


def mosaic(tokens: Path, folder: Path, length: int, batch: int, workers: int) -> list[float]:
    """Passes of MosaicML Streaming with its shards of arrays."""
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
    from streaming import MDSWriter, StreamingDataset  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    samples = np.memmap(tokens, np.uint16, "r").reshape(-1, length)
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{length}"}, size_limit=CHUNK_BYTES) as out:
        for sample in samples:
            out.write({"tokens": sample})
    dataset = StreamingDataset(local=str(folder), batch_size=batch, shuffle=True)
    loader: Any = DataLoader(dataset, batch_size=batch, num_workers=workers)
    return [rate(loader) for _ in range(2)]


if __name__ == "__main__":
    os.environ["DISABLE_TELEMETRY"] = "1"
    package, where, into, *numbers = sys.argv[1:]
    read = {"litdata": litdata, "mosaic": mosaic}[package]
    print(json.dumps(read(Path(where), Path(into), *map(int, numbers))))
