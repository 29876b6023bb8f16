"""Gradients that the framework templar published: known answers, every refusal, and garbage."""

import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.reference.recorded import Comparison, RecordedTensor, compare, import_v0, import_v2
from benchmarks.reference.wire import (
    StatisticalQuantiser,
    aggregate_values,
    pack_12_bits,
    pack_signs,
    scatter_mean,
    unpack_signs,
)
from templar.errors import Reason, RejectedError

Rule = Literal["mean", "unit_norm", "median_clip"]
MATRIX = (torch.arange(24.0) ** 2 / 10 - 3).reshape(4, 6)
VECTOR = torch.tensor([3.0, -1, 4, 1, -5, 9])
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (4, 6), "vector": (6,)}


def close(actual: Tensor, expected: list, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=atol)


def v0() -> dict[str, Any]:
    """Both vectors of the reference, coded by hand: for an edge of 2 the DCT is a sum and a difference."""
    basis = torch.tensor([[1.0, 1], [1, -1]]) / math.sqrt(2)
    blocks = MATRIX.reshape(2, 2, 3, 2).transpose(1, 2)  # (R/h, C/w, h, w)
    matrix = (basis @ blocks @ basis.T).reshape(2, 3, 4)
    kept = torch.tensor([2, 0]).expand(2, 3, 2)  # an order that a top-k may give
    vector = VECTOR.reshape(3, 2) @ basis.T
    best = torch.tensor([[1], [0], [1]])
    return {
        "matrixidxs": kept.to(torch.int16),
        "matrixvals": matrix.gather(2, kept),
        "vectoridxs": best.to(torch.int16),
        "vectorvals": vector.gather(1, best),
        "metadata": {"pages_info": [("default", 7, "train")], "window": 3},
    }


def v2() -> dict[str, Any]:
    """The payload of the first call in the error-feedback table of release 2.1.3."""
    lookup = torch.tensor([0, -3.125, -0.375, 3.875])
    return {
        "pidxs": pack_12_bits(torch.tensor([[3, 2], [3, 0]])),
        "pvals": torch.tensor([[3, 1], [2, 2]], dtype=torch.uint8),
        "pquant_params": (torch.tensor(0.125), 4.431775, 2, lookup, torch.float32),
    }


def of_v0(**changes: object) -> dict[str, RecordedTensor]:
    return import_v0(v0() | changes, SHAPES, target_chunk=2)


def of_v2(**changes: object) -> RecordedTensor:
    return import_v2(v2() | changes, {"p": (8,)}, target_chunk=4)["p"]


def rejected(read: Callable[[], object], reason: Reason, message: str) -> None:
    with pytest.raises(RejectedError, match=message) as caught:
        read()
    assert caught.value.reason is reason, caught.value


# Known answers.


def test_v0_matrix_and_vector() -> None:
    tensors = of_v0()
    assert tensors["matrix"].indices.tolist() == [[0, 2]] * 6
    close(tensors["matrix"].values[[0, 5]], [[-1.7, -4.2], [71.9, -23.4]], atol=1e-5)
    close(tensors["matrix"].dense()[0], [-2.95, -2.95, -2.35, -2.35, -0.95, -0.95])
    close(tensors["vector"].values, [[2.82842712], [3.53553391], [-9.89949494]])
    close(tensors["vector"].dense(), [2, -2, 2.5, 2.5, -7, 7])
    for name, tensor in tensors.items():
        assert (tensor.dense().dtype, tuple(tensor.dense().shape)) == (torch.float32, SHAPES[name])


def test_v0_flat_rows_and_the_published_wrapper() -> None:
    gradient = v0()
    flat = gradient | {key: gradient[key].reshape(6, 2) for key in ("matrixidxs", "matrixvals")}
    published = io.BytesIO()
    torch.save({"state_dict": flat, "global_step": 5}, published)
    published.seek(0)
    read = import_v0(torch.load(published, weights_only=True), SHAPES, target_chunk=2)
    for name, tensor in of_v0().items():
        assert compare(tensor, read[name]) == Comparison(1.0, 1.0, 0.0)
        assert torch.equal(tensor.dense(), read[name].dense())


def test_v0_duplicates_are_averaged() -> None:
    indices, values = torch.tensor([[1, 1], [0, 1], [1, 0]]), torch.tensor([[1.0, 4], [2, 2], [3, 5]])
    tensor = of_v0(vectoridxs=indices.to(torch.int16), vectorvals=values)["vector"]
    assert tensor.indices.tolist() == [[1, 1], [0, 1], [0, 1]]
    assert tensor.values.tolist() == [[1, 4], [2, 2], [5, 3]]
    half = math.sqrt(0.5)
    close(tensor.dense(), [2.5 * half, -2.5 * half, 4 * half, 0, 8 * half, 2 * half])


@pytest.mark.parametrize("sequence", [tuple, list])
def test_v2_first_call_of_the_error_feedback(sequence: type) -> None:
    tensor = of_v2(pquant_params=sequence(v2()["pquant_params"]))
    assert tensor.indices.tolist() == [[2, 3], [0, 3]]
    assert tensor.values.tolist() == [[-3.0, 4.0], [-0.25, -0.25]]
    # The update of that call less what stays in the buffer.
    update, buffer = [1, 2, -3, 4, 0.5, -0.25, 0.125, -1], [1, 2, 0, 0, 0.75, -0.25, 0.125, -0.75]
    assert tensor.dense().tolist() == [a - b for a, b in zip(update, buffer, strict=True)]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32), st.sampled_from([4, 16, 256]), st.booleans())
@settings(max_examples=15)
def test_v2_reads_what_the_quantiser_wrote(rows: int, columns: int, seed: int, bins: int, use_dct: bool) -> None:
    shape, k, chunks = (4 * rows, 4 * columns), 6, rows * columns
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(chunks, k, generator=generator)
    indices = torch.rand(chunks, 16, generator=generator).argsort(dim=1)[:, :k]
    quantiser = StatisticalQuantiser(bins, 6.0)
    coded = quantiser.encode(indices, values)
    gradient = {
        "pidxs": pack_12_bits(indices),
        "pvals": coded.codes.reshape(rows, columns, k),
        "pquant_params": (torch.tensor(coded.shift), coded.scale, coded.offset, coded.lookup, torch.float32),
    }
    tensor = import_v2(gradient, {"p": shape}, target_chunk=4, use_dct=use_dct)["p"]
    expected = RecordedTensor("p", shape, (4, 4), indices, quantiser.decode(coded), use_dct)
    assert compare(expected, tensor) == Comparison(1.0, 1.0, 0.0)
    assert torch.equal(scatter_mean(indices, expected.values, 16), scatter_mean(tensor.indices, tensor.values, 16))


PEERS = [
    (torch.tensor([[0, 1]] * 3), torch.tensor([[1.0, 2], [3, 4], [5, 6]])),
    (torch.tensor([[1, 0]] * 3), torch.tensor([[10.0, 20], [30, 40], [50, 60]])),
    (torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.tensor([[-1, 1], [2, 2], [0.5, 0.5]])),
]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mean", [[6.6666667, 4.3333333], [15, 12], [21.8333333, 18.8333333]]),
        ("median_clip", [[2 / 3, 4 / 3], [3, 3], [23 / 6, 23 / 6]]),
    ],
)
def test_aggregate_of_three_peers(rule: Rule, expected: list) -> None:
    close(torch.stack([values.norm() for _, values in PEERS]), [9.5393920, 95.3939201, 3.2403703])
    close(aggregate_values(PEERS, 2, rule=rule), expected, atol=1e-5)


def test_aggregate_divides_by_the_publishers_of_an_element() -> None:
    one = (torch.tensor([[0], [1], [0]]), torch.tensor([[1.0], [2], [3]]))
    two = (torch.tensor([[0], [0], [1]]), torch.tensor([[3.0], [5], [7]]))
    assert aggregate_values([one, two], 2, rule="mean").tolist() == [[2, 0], [5, 2], [3, 7]]


def test_aggregate_of_unit_norms_then_the_sign() -> None:
    """A huge peer weighs no more than another; without a publisher the sign is 0, and -1 if it was packed."""
    one = (torch.tensor([[0, 1]] * 4), torch.tensor([[300.0, 400], [0, 0], [0, 0], [0, 0]]))
    two = (torch.tensor([[0, 2]] * 4), torch.tensor([[-0.8, 0.6], [0, 0], [0, 0], [0, 0]]))
    aggregate = aggregate_values([one, two], 4, rule="unit_norm")
    close(aggregate[0], [-0.1, 0.8, 0.6, 0])
    signs = aggregate.sign()
    assert signs[0].tolist() == [-1, 1, 1, 0]
    packed = unpack_signs(pack_signs(aggregate), (4, 4))
    assert packed[0].tolist() == [-1, 1, 1, -1]
    assert torch.equal(signs == 0, aggregate == 0)
    assert torch.equal(packed, torch.where(signs == 0, -1.0, signs))


# Comparison.


def sparse(indices: list, values: list) -> RecordedTensor:
    return RecordedTensor("p", (8,), (4,), torch.tensor(indices), torch.tensor(values), use_dct=False)


def test_comparison() -> None:
    first, second = sparse([[0, 1], [2, 3]], [[1.0, 2], [-2, 4]]), sparse([[1, 2], [2, 3]], [[2.0, 1], [2, 1]])
    assert compare(first, second) == Comparison(0.75, 2 / 3, (1 + 1 + 16 + 9) / 25)


def test_comparison_at_the_edges() -> None:
    zero, one, apart = (sparse([[i], [i]], [[v], [v]]) for i, v in ((0, 0.0), (0, 1.0), (1, 1.0)))
    assert compare(zero, zero) == Comparison(1.0, 1.0, 0.0)
    assert compare(zero, one) == Comparison(1.0, 0.0, math.inf)
    assert compare(one, apart) == Comparison(0.0, None, 2.0)
    twice = sparse([[0, 0], [0, 0]], [[3.0, -1], [0.5, 1.5]])
    assert compare(one, twice) == Comparison(1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"use_dct True: compare their dense\(\) tensors"):
        compare(one, replace(one, use_dct=True))


# Refusals.


def int16(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int16)


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"other": 1}, Reason.WRONG_SHAPES, "'other': no parameter"),
        ({"vectorvals": None}, Reason.MALFORMED, "vectorvals: a NoneType"),
        ({"vectorvals": torch.zeros(3, 1).to_sparse()}, Reason.MALFORMED, "vectorvals: a Tensor, not a dense"),
        ({"vectorvals": torch.zeros(3, 1).double()}, Reason.MALFORMED, "vectorvals: torch.float64, not torch.float32"),
        ({"vectorvals": torch.tensor(1.0)}, Reason.WRONG_SHAPES, r"vectorvals: shape \(\), not \(3, k\) with k in 1"),
        ({"vectorvals": torch.zeros(3, 2)}, Reason.WRONG_SHAPES, "vectoridxs: 1 per chunk; vectorvals has 2"),
        ({"vectoridxs": int16([2], [0], [1])}, Reason.BAD_PAYLOAD, r"vectoridxs: an index is not in 0\.\.1"),
        ({"vectorvals": torch.tensor([[1.0], [math.nan], [2]])}, Reason.BAD_PAYLOAD, "vectorvals: .* not finite"),
    ],
)
def test_v0_refuses(changes: dict[str, object], reason: Reason, message: str) -> None:
    rejected(lambda: of_v0(**changes), reason, message)


def quantised(**changes: object) -> dict[str, object]:
    fields = dict(zip(("shift", "scale", "offset", "lookup", "dtype"), v2()["pquant_params"], strict=True))
    return {"pquant_params": tuple((fields | changes).values())}


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"pidxs": torch.zeros(5, dtype=torch.uint8)}, Reason.WRONG_SHAPES, r"pidxs: shape \(5,\) .* the 4 .* 6 bytes"),
        ({"pidxs": pack_12_bits(torch.tensor([3, 2, 4, 0]))}, Reason.BAD_PAYLOAD, r"pidxs: an index is not in 0\.\.3"),
        ({"pvals": torch.full((2, 2), 4, dtype=torch.uint8)}, Reason.BAD_PAYLOAD, "pvals: code 4 is beyond the 4"),
        ({"pquant_params": v2()["pquant_params"][:4]}, Reason.MALFORMED, "pquant_params: not the five"),
        (quantised(shift=0.125), Reason.MALFORMED, "the shift is not a tensor"),
        (quantised(shift=torch.tensor(math.nan)), Reason.BAD_PAYLOAD, "the shift or a level"),
        (
            quantised(shift=torch.tensor(3e38), lookup=torch.full((4,), 3e38)),
            Reason.BAD_PAYLOAD,
            "pvals: a value is not finite",
        ),
        (quantised(scale=0.0), Reason.BAD_PAYLOAD, "the scale"),
        (quantised(offset=4), Reason.BAD_PAYLOAD, r"the offset is not an int in 0\.\.3"),
        (quantised(lookup=[0.0] * 4), Reason.MALFORMED, "the lookup is not a float32 vector"),
        (quantised(lookup=torch.zeros(0)), Reason.WRONG_SHAPES, "a lookup of 0 levels"),
        (quantised(dtype=torch.int8), Reason.MALFORMED, "the original dtype"),
    ],
)
def test_v2_refuses(changes: dict[str, object], reason: Reason, message: str) -> None:
    rejected(lambda: of_v2(**changes), reason, message)


def test_other_dictionaries_are_refused() -> None:
    for gradient in (None, [], {"state_dict": None}, {"state_dict": [1]}):
        rejected(lambda gradient=gradient: import_v0(gradient, SHAPES), Reason.MALFORMED, "gradient is a")
    rejected(lambda: import_v2({3: 4}, {"p": (8,)}), Reason.MALFORMED, "a key is a int")
    rejected(lambda: import_v2({}, {"p": (8,)}), Reason.WRONG_SHAPES, "pidxs is missing: 3 of 3")
    for key in v0().keys() - {"metadata"}:
        gradient = {name: entry for name, entry in v0().items() if name != key}
        rejected(lambda gradient=gradient: import_v0(gradient, SHAPES), Reason.WRONG_SHAPES, f"{key} is missing")


# Garbage.

dtypes = st.sampled_from(
    [torch.uint8, torch.int16, torch.int64, torch.bool, torch.float16, torch.float32, torch.float64, torch.complex64]
)
sizes = st.lists(st.integers(0, 6), max_size=3)
numbers = st.sampled_from([-math.inf, -1.0, 0.0, 1.0, 2.0, 3e38, math.inf, math.nan])


def filled(size: list[int], dtype: torch.dtype, number: float) -> Tensor:
    return torch.full(size, number, dtype=torch.float64).to(dtype)


tensors = st.builds(filled, sizes, dtypes, numbers) | st.builds(filled, st.just([2, 2]), dtypes, numbers)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | dtypes
garbage = st.recursive(
    scalars | tensors,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=2), inner) | st.tuples(inner, inner),
    max_leaves=8,
)
keys = st.sampled_from(["pidxs", "pvals", "pquant_params", "metadata", "global_step", "state_dict"])


def only_rejected(read: Callable[[], dict[str, RecordedTensor]]) -> None:
    try:
        read_tensors = read()
    except RejectedError:
        return
    for tensor in read_tensors.values():
        assert bool(tensor.values.isfinite().all())
        assert tuple(tensor.dense().shape) == tensor.shape


@given(st.dictionaries(keys, garbage), st.sampled_from(["shift", "scale", "offset", "lookup", "dtype"]), st.booleans())
@settings(max_examples=25)
def test_garbage_is_only_ever_rejected(changes: dict[str, object], field: str, use_dct: bool) -> None:
    some = next(iter(changes.values()), None)
    for gradient in (v2() | changes, v2() | quantised(**{field: some}), changes, some):
        only_rejected(lambda g=gradient: import_v2(g, {"p": (8,)}, target_chunk=4, use_dct=use_dct))  # type: ignore[misc]
    only_rejected(lambda: import_v0(changes, {"p": (8,)}))
