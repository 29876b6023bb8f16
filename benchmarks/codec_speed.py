"""Measure how fast the codec is, in copies of the tensor.

    python -m benchmarks.codec_speed [--quick]

Every row is the median of CPU seconds of one thread on a tensor of 4096 x 4096 float32, divided by the median of a
`copy_` of the tensor into an existing buffer, the two in turn in one run, each after 64 MB of other memory have been
written, so that the caches are cold. The two-thread figure is two threads' wall seconds, divided by those of the same
copy by one thread. Buffers are used again, as a miner and a validator do. `similarity_seconds` is the CPU time
of one thread for all pairs of 20 payloads of 100 million parameters, from their bytes.

The last line is JSON: these figures, and whether every bar holds.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from benchmarks import large_model
from benchmarks.command import figures_table, measured
from benchmarks.large_model import RULE
from templar.gradient.aggregate import aggregate
from templar.gradient.codec import wire
from templar.gradient.codec.wire import Header, Payload
from templar.gradient.compress import FeedbackState, compress_each
from templar.gradient.layout import Layout
from templar.gradient.similarity import similarity

EDGE = 4096
PEERS = 20
BARS = {
    "encode_x": 14.0,
    "encode_dct_x": 25.0,
    "aggregate20_x": 25.0,
    "aggregate20_2t_x": 14.0,
    "similarity_seconds": 0.5,
}


class Stopwatch:
    """Times work in turn with copies of one tensor, each `repetitions` times after one that does not count."""

    def __init__(self, repetitions: int) -> None:
        self._repetitions = repetitions
        self._source, self._target = torch.randn(EDGE, EDGE), torch.zeros(EDGE, EDGE)
        self._other = torch.zeros(EDGE, EDGE)

    def copies(self, work: Callable[[], object], *, threads: int = 1) -> float:
        """The median time of `work`, in copies by one thread: CPU time, or wall time if it has several threads."""
        clock = time.process_time if threads == 1 else time.perf_counter
        work_times: list[float] = []
        copy_times: list[float] = []
        gc.disable()
        try:
            for _ in range(self._repetitions + 1):
                torch.set_num_threads(1)
                self._other.add_(1.0)
                before = clock()
                self._target.copy_(self._source)
                copied = clock()
                self._other.add_(1.0)
                torch.set_num_threads(threads)
                started = clock()
                work()
                work_times.append(clock() - started)
                copy_times.append(copied - before)
        finally:
            gc.enable()
        return statistics.median(work_times[1:]) / statistics.median(copy_times[1:])


def encoder(layout: Layout) -> Callable[[], bytes]:
    """All steps from an update to the bytes of a payload."""
    state, update = FeedbackState(large_model.random_tensors(layout, 0), 1), large_model.random_tensors(layout, 2)
    header = Header(layout.recipe, 0, 0, "peer", layout.digest)
    memory = torch.empty(layout.num_elements)

    def encode() -> bytes:
        each = compress_each(state, update, layout=layout, rule=RULE, memory=memory)
        coefficients = {name: found for name, found, _ in each}
        return wire.encode(Payload.of(header, coefficients, layout), layout)

    return encode


def aggregator(layout: Layout) -> Callable[[], object]:
    """All steps from the bytes of 20 peers to the update."""
    published = [
        wire.encode(large_model.payload(layout, large_model.random_tensors(layout, uid), uid=uid), layout)
        for uid in range(PEERS)
    ]
    out = {tensor.name: torch.zeros(tensor.shape) for tensor in layout.tensors}
    return lambda: aggregate([wire.decode(data, layout) for data in published], layout, out=out)


def matrix(*, use_dct: bool = False) -> Layout:
    """The layout of one large matrix."""
    return Layout.of({"matrix": (EDGE, EDGE)}, large_model.gradient(use_dct=use_dct), RULE.recipe)


def similarity_seconds(repetitions: int) -> float:
    """CPU seconds for all pairs of the peers' payloads of the whole model."""
    layout = large_model.layout()
    payloads = [large_model.payload(layout, large_model.random_tensors(layout, uid), uid=uid) for uid in range(PEERS)]
    times = []
    for _ in range(repetitions + 1):
        started = time.process_time()
        similarity(payloads, layout)
        times.append(time.process_time() - started)
    return statistics.median(times[1:])


def measure(watch: Stopwatch) -> dict[str, float]:
    """All figures but the similarity, in copies."""
    combine = aggregator(matrix())
    return {
        "encode_x": watch.copies(encoder(matrix())),
        "encode_dct_x": watch.copies(encoder(matrix(use_dct=True))),
        "aggregate20_x": watch.copies(combine),
        "aggregate20_2t_x": watch.copies(combine, threads=2),
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    threads = torch.get_num_threads()
    figures = measure(Stopwatch(15 if quick else 25))
    torch.set_num_threads(1)
    figures["similarity_seconds"] = similarity_seconds(3 if quick else 15)
    torch.set_num_threads(threads)
    title = f"{EDGE} x {EDGE} float32, 64 of 4096, in copies of it; {PEERS} peers"
    table = figures_table(title, "figure", "measured", "at most")
    for name, bar in BARS.items():
        table.add_row(name, f"{figures[name]:.2f}", f"{bar:g}")
    Console().print(table)
    rounded: dict[str, Any] = {name: round(figure, 3) for name, figure in figures.items()}
    return rounded | {"holds": all(figures[name] <= bar for name, bar in BARS.items())}


if __name__ == "__main__":
    raise SystemExit(measured("codec_speed", __doc__, run, quick="fewer repetitions"))
