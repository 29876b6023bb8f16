"""Measure how large payloads are and how much accuracy the value codes lose.

    python -m benchmarks.codec_size [--quick]

Sizes are those of whole payloads (header, scales, signs, indices, checksum) of a Llama of 100 million parameters, as
bits per published coefficient; the least possible for the indices alone is `log2 C(4096, k) / k`. Errors are relative
squared errors of the values that receivers read, on the coefficients that a small Llama publishes when it is trained on
text: all workers, tensors and last windows together.

The last line is JSON: `bits_k64`, `bits_k32`, `value_error`, `value_error_reference` (templar 2.1.3), and whether the
bars hold.
"""

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.command import figures_table, measured
from benchmarks.large_model import RULE, layout, payload, random_tensors
from benchmarks.pseudo_gradients import REFERENCE, Chosen, Setup, chosen, chosen_coefficients, embedded_text, train
from benchmarks.reference_codes import QuantisedValues, RawCoding, StatisticalQuantiser, pack_12_bits
from templar.gradient.codec import wire
from templar.gradient.codec.values import decode_values, encode_values
from templar.gradient.compress import FeedbackState
from templar.gradient.layout import Layout

BITS_AT_64, BITS_AT_32 = 8.9, 9.9  # bits per coefficient that a payload may take at most
ERROR_SHARE = 0.5  # the error of our value code may be at most this part of the reference's
CHUNK = 4096
OURS, OTHERS = "sign and scale per chunk", "templar 2.1.3: 4 levels"
VALUE_BITS: Mapping[str, str] = {
    OTHERS: "8 as stored",
    "sign and one scale per tensor": "1",
    "sign and exact mean per chunk": "1 + 32/k",
    OURS: "1 + 8/k",
}
"""Value code -> the bits that it takes per value."""


@dataclass(frozen=True)
class Size:
    """The size of a whole payload."""

    bits: float  # per published coefficient
    times: float  # bytes of the parameters in float32 per byte of the payload


def num_coefficients(chunks: Layout) -> int:
    """Coefficients of a payload without silent chunks."""
    return sum(tensor.num_coefficients for tensor in chunks.tensors)


def payload_size(k: int) -> Size:
    """The size of a payload of the large model."""
    chunks = layout(k)
    num_bytes = len(wire.encode(payload(chunks, random_tensors(chunks, seed=k)), chunks))
    return Size(8 * num_bytes / num_coefficients(chunks), 4 * chunks.num_elements / num_bytes)


def recorded_size(k: int, coding: RawCoding | StatisticalQuantiser) -> Size:
    """The size of the public reference's file: a dictionary of tensors, as `torch.save` writes it."""
    chunks = layout(k)
    update = random_tensors(chunks, seed=k)
    stored: dict[str, Any] = {}
    for name, one in chosen(FeedbackState.zeros(chunks), update, chunks, RULE).items():
        coded = coding.encode(one.indices, one.values)
        if isinstance(coded, QuantisedValues):
            stored |= {f"{name}idxs": pack_12_bits(coded.indices), f"{name}vals": coded.codes}
            table = torch.tensor(coded.shift), coded.scale, coded.offset, coded.lookup, torch.float32
            stored[f"{name}quant_params"] = table
        else:
            stored |= {f"{name}idxs": coded.indices, f"{name}vals": coded.values}
    file = io.BytesIO()
    torch.save(stored, file)
    num_bytes = len(file.getvalue())
    return Size(8 * num_bytes / num_coefficients(chunks), 4 * chunks.num_elements / num_bytes)


def index_floor(k: int) -> float:
    """The least possible bits per index: `log2 C(4096, k) / k`."""
    return math.log2(math.comb(CHUNK, k)) / k


def value_codes(one: Chosen) -> Iterator[tuple[str, Tensor]]:
    """The values that receivers read of one tensor, by the name of the code."""
    magnitude, sign = one.values.abs(), torch.where(one.values < 0, -1.0, 1.0)
    yield OTHERS, REFERENCE.decode(REFERENCE.encode(one.indices, one.values))
    yield "sign and one scale per tensor", sign * magnitude.mean()
    yield "sign and exact mean per chunk", sign * magnitude.mean(dim=1, keepdim=True)
    yield OURS, decode_values(encode_values(one.indices, one.values))


def train_small(windows: int, last: int) -> dict[str, float]:
    """Train the small network; the relative squared error by value code, over all values of its last windows."""
    lost: dict[str, float] = dict.fromkeys(VALUE_BITS, 0.0)
    energy = 0.0
    with embedded_text() as text:
        setup = Setup.of(text, seed=1, workers=4, windows=windows)
        for window in train(setup):
            if window.learnt.window < windows - last:
                continue
            for one in (one for tensors in chosen_coefficients(window.learnt) for one in tensors.values()):
                energy += float(one.values.double().square().sum())
                for name, read in value_codes(one):
                    lost[name] += float((read - one.values).double().square().sum())
    return {name: error / energy for name, error in lost.items()}


def size_table(sizes: Mapping[int, Size]) -> Table:
    """The sizes of our payloads, and of the reference's files."""
    title = "bits per coefficient, everything included (100 M parameters, chunks of 4096)"
    table = figures_table(title, "payload", "bits", "least for the indices", "times smaller than fp32")
    for k, size in sizes.items():
        table.add_row(f"k = {k}", f"{size.bits:.2f}", f"{index_floor(k):.2f}", f"{size.times:.0f}")
    for release, k, coding in (("0.2.82", 32, RawCoding()), ("2.1.3", 64, REFERENCE)):
        size = recorded_size(k, coding)
        name = f"templar {release}, k = {k}"
        table.add_row(name, f"{size.bits:.2f}", f"{index_floor(k):.2f}", f"{size.times:.0f}")
    return table


def error_table(errors: Mapping[str, float]) -> Table:
    """The errors of the value codes."""
    title = "value codes on real pseudo-gradients (64 of 4096)"
    table = figures_table(title, "code", "bits per value", "relative squared error")
    for name, error in errors.items():
        table.add_row(name, VALUE_BITS[name], f"{error:.3%}")
    return table


def run(quick: bool) -> dict[str, Any]:
    """Measure, print the tables, and return the figures."""
    sizes = {k: payload_size(k) for k in ((64, 32) if quick else (1024, 128, 64, 32, 16))}
    errors = train_small(*((8, 2) if quick else (30, 6)))
    console = Console()
    console.print(size_table(sizes))
    console.print(error_table(errors))
    at_64, at_32 = sizes[64].bits, sizes[32].bits
    error, reference = errors[OURS], errors[OTHERS]
    return {
        "bits_k64": round(at_64, 4),
        "bits_k32": round(at_32, 4),
        "times_k64": round(sizes[64].times, 1),
        "value_error": round(error, 6),
        "value_error_reference": round(reference, 6),
        "holds": at_64 <= BITS_AT_64 and at_32 <= BITS_AT_32 and error <= ERROR_SHARE * reference,
    }


if __name__ == "__main__":
    raise SystemExit(measured("codec_size", __doc__, run, quick="fewer densities and windows"))
