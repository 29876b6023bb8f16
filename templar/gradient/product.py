"""Inner products of payloads' updates with gradients: how far a small step along an update lowers a loss.

The update is the one that `single_update` makes, clipped as there, and is never held as a whole: a tensor's
coefficients are multiplied where they stand, and only a transform or a sign makes that tensor dense for a moment.
Products are summed in float64.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient import backend
from templar.gradient.aggregate import magnitudes, peer_norms, tensor_update
from templar.gradient.codec.sections import Section, unpack
from templar.gradient.codec.values import QUANTUM
from templar.gradient.codec.wire import Payload, check_layout
from templar.gradient.dct import to_chunks
from templar.gradient.layout import Layout, TensorLayout

CACHE_BYTES = 1 << 26
"""Unpacked coefficients that are kept for the next gradient, of models that are too small for the kernels."""


class UpdateProducts:
    """Inner products with the updates of some payloads.

    Args:
        payloads: Payloads that were decoded with `layout`.
        layout: Tensors, chunks and recipe.
        medians: As in `single_update`.

    Raises:
        ValueError: A payload was made for another layout.
    """

    def __init__(self, payloads: Sequence[Payload], layout: Layout, medians: Mapping[str, int]) -> None:
        check_layout(payloads, layout)
        self._payloads = payloads
        self._layout = layout
        self._unpacked: dict[tuple[int, str], tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        self._room = CACHE_BYTES
        self._is_sparse = layout.recipe == "sparseloco" and not layout.use_dct
        self._tables = [
            {
                name: magnitudes(payload.sections[name], norms[name], medians[name], layout.recipe)
                for name in layout.names
            }
            for payload, norms in zip(payloads, peer_norms(payloads, layout), strict=True)
        ]

    @np.errstate(invalid="ignore")  # infinities may cancel; whoever asks looks whether the products are finite
    def with_gradients(self, gradients: Mapping[str, Tensor], which: Sequence[int]) -> list[float]:
        """The inner product of each update with gradients.

        Args:
            gradients: By parameter name, float32.
            which: Indices of the payloads.

        Returns:
            One number per index; not finite where the gradients are not.
        """
        totals = np.zeros(len(which))
        for tensor in self._layout.tensors:
            gradient = gradients[tensor.name].detach()
            if self._is_sparse:
                totals += self._sparse(tensor, gradient.cpu().contiguous(), which)
            else:
                totals += [self._dense(index, tensor, gradient) for index in which]
        return totals.tolist()

    def _sparse(self, tensor: TensorLayout, gradient: Tensor, which: Sequence[int]) -> list[float]:
        sections = [self._payloads[index].sections[tensor.name] for index in which]
        tables = [self._tables[index][tensor.name] for index in which]
        if backend.uses_kernels(self._layout.num_elements):
            from templar.gradient.kernels.combine import chunk_products  # noqa: PLC0415 - numba takes a second

            array = gradient.numpy()
            products = [
                chunk_products(section, table, tensor, array) for section, table in zip(sections, tables, strict=True)
            ]
        else:
            chunks = to_chunks(gradient, tensor).numpy()
            products = [self._chunk_products(index, tensor, chunks) for index in which]
        return [_sum(each) * QUANTUM for each in products]

    def _chunk_products(self, index: int, tensor: TensorLayout, chunks: NDArray[np.float32]) -> NDArray[np.float64]:
        """The inner product of each chunk, in quanta, shape (C,); `kernels.multiply` gives the same bits."""
        key = index, tensor.name
        if (known := self._unpacked.get(key)) is None:
            known = _signed(self._payloads[index].sections[tensor.name], self._tables[index][tensor.name])
            self._room -= known[0].nbytes + known[1].nbytes
            if self._room >= 0:
                self._unpacked[key] = known
        places, signed = known
        with np.errstate(invalid="ignore", over="ignore"):  # whoever asks looks whether it is finite
            products = np.where(signed != 0, np.take_along_axis(chunks, places, axis=1) * signed, 0.0)
            return np.cumsum(products, axis=1)[:, -1]

    def _dense(self, index: int, tensor: TensorLayout, gradient: Tensor) -> float:
        section, table = self._payloads[index].sections[tensor.name], self._tables[index][tensor.name]
        update = tensor_update(section, table, tensor, self._layout, torch.empty(tensor.shape))
        return float((update.to(gradient.device).double() * gradient.double()).sum())


def _sum(values: NDArray[np.float64]) -> float:
    """One after the other, so that no number of threads and no other way to the values changes the sum."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.cumsum(values)[-1])


def _signed(section: Section, table: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Places in their chunks and signed magnitudes in quanta of a section, each of shape (C, k)."""
    coefficients, levels = unpack(section), table[section.codes].astype(np.float64)
    sizes = np.where(coefficients.upper, levels[:, -1:], levels[:, :1])
    return coefficients.indices.astype(np.int64), np.where(coefficients.negative, -sizes, sizes)
