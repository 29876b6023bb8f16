"""The known answers of the reference system: error feedback and codes."""

import pytest
import torch
from torch import Tensor

from benchmarks.reference_codes import RawCoding, StatisticalQuantiser, pack_12_bits
from templar.gradient import dct
from templar.gradient.aggregate import outer_step
from templar.gradient.compress import FeedbackRule, FeedbackState, compress_with
from templar.gradient.dct import from_chunks, to_chunks
from templar.gradient.layout import Layout
from templar.hparams import Gradient


def gradient(target: int, k: int, *, use_dct: bool = False, decay: float = 0.95) -> Gradient:
    return Gradient(momentum_decay=decay, topk_compression=k, target_chunk=target, use_dct=use_dct)


def close(actual: Tensor, expected: list, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=atol)


DEMO_TABLE = {
    1: (0.99, [0, 1], [0.212132, -0.4949748], [0.1, 0.2, -0.3, 0.4]),
    2: (0.9801, [0, 1], [0.4030508, -0.940452], [0.19, 0.38, -0.57, 0.76]),
    5: (0.9509901, [0, 1], [0.8687019, -2.0269709], [0.40951, 0.81902, -1.2285298, 1.6380399]),
    6: (0.9414802, [0, 1], [0.9939636, -2.3192484], [-0.2342794, 0.2342796, 0.2342795, 0.2342796]),
    7: (0.9320654, [1, 1], [-0.3688998, -0.4949748], [0.1500001, 0.1500001, 0.2608516, 0.2608516]),
    8: (0.9227448, [0, 1], [0.403051, -0.4949748], [-0.05, 0.05, 0.2847664, 0.2847665]),
}


def test_error_feedback_of_demo() -> None:
    layout = Layout.of({"p": (4,)}, gradient(2, 1, use_dct=True), "demo")
    rule = FeedbackRule("demo", decay=0.9, learning_rate=0.1)
    # A momentum from before a restart: the first call discards it.
    state = FeedbackState({"p": torch.tensor([7.0, 7.0, 7.0, 7.0])}, num_calls=0)
    params = {"p": torch.ones(4)}
    for call in range(1, 9):
        outer_step(params, {"p": torch.zeros(4)}, learning_rate=0.1, weight_decay=0.1)
        update = {"p": torch.tensor([1.0, 2.0, -3.0, 4.0])}
        compressed = compress_with(RawCoding(), state, update, layout=layout, rule=rule)
        state = compressed.state
        if call in DEMO_TABLE:
            decayed, indices, values, buffer = DEMO_TABLE[call]
            close(params["p"], [decayed] * 4)
            assert compressed.tensors["p"].indices.flatten().tolist() == indices
            close(compressed.tensors["p"].values.flatten(), values)
            close(as_elements(state, layout), buffer)
    assert state.num_calls == 8


def as_elements(state: FeedbackState, layout: Layout) -> Tensor:
    """The only buffer, as the reference keeps it: ours is in the transform domain."""
    tensor = layout.tensors[0]
    return from_chunks(dct.inverse(to_chunks(state.buffers[tensor.name], tensor), tensor.edges), tensor)


SPARSELOCO_TABLE = {
    1: ([{3: 3, 2: 1}, {3: 2, 0: 2}], 0.125, 4.431775, [0, -3.125, -0.375, 3.875],
        [1, 2, 0, 0, 0.75, -0.25, 0.125, -0.75]),
    2: ([{3: 3, 1: 3}, {3: 1, 0: 2}], 1.85, 4.054887, [0, -3.5625, -0.6375, 2.1],
        [1.95, -0.05, -3, 0.05, 0, -0.4875, 0.24375, 0]),
    3: ([{2: 1, 3: 3}, {3: 2, 1: 2}], -0.878906, 6.063625, [0, -4.971094, 0.022344, 4.926406],
        [2.8525, 1.9525, 0, 0, 0.5, 0.143438, 0.356562, -0.143438]),
}  # fmt: skip
SPARSELOCO_TABLE[5] = SPARSELOCO_TABLE[1]


def test_error_feedback_of_sparseloco() -> None:
    layout = Layout.of({"p": (8,)}, gradient(4, 2), "sparseloco")
    state = FeedbackState.zeros(layout)
    update = {"p": torch.tensor([1, 2, -3, 4, 0.5, -0.25, 0.125, -1])}
    for call in range(1, 6):
        kept = 0.0 if call == 4 else 1.0  # a null round of the reference forgets buffer and update
        rule = FeedbackRule("sparseloco", decay=0.95 * kept, learning_rate=kept)
        compressed = compress_with(StatisticalQuantiser(4, 6.0), state, update, layout=layout, rule=rule)
        state, coded = compressed.state, compressed.tensors["p"]
        if call == 4:
            assert coded.codes.tolist() == [[2, 2], [2, 2]]
            assert (coded.shift, coded.scale, coded.lookup.tolist()) == (0.0, 1.0, [0.0] * 4)
            assert state.buffers["p"].tolist() == [0.0] * 8
            continue
        levels, shift, scale, lookup, buffer = SPARSELOCO_TABLE[call]
        rows = zip(coded.indices.tolist(), coded.codes.tolist(), strict=True)
        assert [dict(zip(*row, strict=True)) for row in rows] == levels
        close(torch.tensor([coded.shift, coded.scale]), [shift, scale])
        close(coded.lookup, lookup)
        close(state.buffers["p"], buffer)


VALUES = torch.tensor([[0.5, -1.25, 2, -0.75], [3.5, -2.5, 0.1, -0.2]])


def test_statistical_quantiser_reads_back_level_means_and_constants() -> None:
    quantiser = StatisticalQuantiser(4, 6.0)
    decoded = quantiser.decode(quantiser.encode(torch.zeros(2, 4), VALUES))
    close(decoded, [[-0.0875, -1.875, 2.75, -0.0875], [2.75, -1.875, -0.0875, -0.0875]])
    for values in ([[2.0, 2.0]], [[2.0]]):
        coded = quantiser.encode(torch.zeros(1, 2), torch.tensor(values))
        assert (coded.codes.flatten().tolist(), coded.scale) == ([2] * len(values[0]), 1.0)
        assert quantiser.decode(coded).tolist() == values


@pytest.mark.parametrize(
    ("bins", "codes", "scale", "lookup"),
    [
        (4, [[2, 1, 3, 2], [3, 1, 2, 2]], 2.8165331, {1: -2.05, 2: -0.2625, 3: 2.575}),
        (16, [[8, 6, 11, 7], [13, 4, 8, 7]], 0.70413327,
         {4: -2.675, 6: -1.425, 7: -0.65, 8: 0.125, 11: 1.825, 13: 3.325}),
        (256, [[135, 96, 169, 107], [204, 67, 126, 119]], 0.04400833, {}),
    ],
)  # fmt: skip
def test_statistical_quantiser(bins: int, codes: list, scale: float, lookup: dict[int, float]) -> None:
    coded = StatisticalQuantiser(bins, 6.0).encode(torch.zeros(2, 4), VALUES)
    assert coded.codes.tolist() == codes
    assert coded.offset == bins // 2
    close(torch.tensor([coded.shift, coded.scale]), [0.175, scale])
    for level, mean in lookup.items():
        close(coded.lookup[level], mean)


@pytest.mark.parametrize(
    ("indices", "packed"),
    [
        ([0, 255, 256, 1000, 2000, 4000, 4095, 4094], [0, 240, 15, 0, 129, 62, 208, 7, 250, 255, 239, 255]),
        ([[1, 2], [3, 4095]], [1, 32, 0, 3, 240, 255]),
    ],
)
def test_12_bit_packing(indices: list, packed: list[int]) -> None:
    assert pack_12_bits(torch.tensor(indices)).tolist() == packed
