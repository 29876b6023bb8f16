"""The known answers of the codes of the reference system."""

import pytest
import torch

from benchmarks.reference_codes import StatisticalQuantiser, pack_12_bits


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=atol)


VALUES = torch.tensor([[0.5, -1.25, 2, -0.75], [3.5, -2.5, 0.1, -0.2]])


def test_statistical_quantiser_reads_back_level_means_and_constants():
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
def test_statistical_quantiser(bins, codes, scale, lookup):
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
def test_12_bit_packing(indices, packed):
    assert pack_12_bits(torch.tensor(indices)).tolist() == packed
