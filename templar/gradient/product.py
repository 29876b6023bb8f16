"""Inner products of payloads' updates with gradients: how much a small step along an update lowers a loss.

The update is that of `single_update`, with its clip, and is never held as a whole: a tensor's coefficients are
multiplied one by one with the gradient at their places, and only a transform or a sign makes that tensor dense for a
moment. Products are summed in float64.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient import kernels
from templar.gradient.aggregate import combine_sections, magnitudes, peer_norms, signed_magnitudes
from templar.gradient.codec.values import QUANTUM
from templar.gradient.codec.wire import Payload, check_layout
from templar.gradient.dct import to_chunks
from templar.gradient.layout import Layout, TensorLayout

CACHE_BYTES = 1 << 26
"""Size of the cache of unpacked coefficients, which later gradients use again, for models too small for the kernels."""


class UpdateProducts:
    """Inner products with the updates of payloads; `targets` as in `single_update`. ValueError for another layout."""

    def __init__(self, payloads: Sequence[Payload], layout: Layout, targets: Mapping[str, int]) -> None:
        check_layout(payloads, layout)
        self._payloads = payloads
        self._layout = layout
        self._unpacked: dict[tuple[int, str], tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        self._free_cache_bytes = CACHE_BYTES
        self._tables = [
            {
                name: magnitudes(payload.sections[name], norms[name], targets[name], layout.recipe)
                for name in layout.names
            }
            for payload, norms in zip(payloads, peer_norms(payloads, layout), strict=True)
        ]

    @np.errstate(invalid="ignore")  # infinities may cancel; the caller checks whether the products are finite
    def with_gradients(self, gradients: Mapping[str, Tensor], which: Sequence[int]) -> list[float]:
        """The inner products of the payloads with the indices `which` with float32 gradients by parameter name.

        One number per index; not finite where the gradients are not.
        """
        totals = np.zeros(len(which))
        for tensor in self._layout.tensors:
            gradient = gradients[tensor.name].detach()
            if self._layout.updates_are_plain:
                totals += self._sparse(tensor, gradient.cpu().contiguous(), which)
                continue
            for place, index in enumerate(which):
                section, table = self._payloads[index].sections[tensor.name], self._tables[index][tensor.name]
                update = combine_sections([section], [table], tensor, self._layout, torch.empty(tensor.shape))
                totals[place] += float((update.to(gradient.device).double() * gradient.double()).sum())
        return totals.tolist()

    def _sparse(self, tensor: TensorLayout, gradient: Tensor, which: Sequence[int]) -> NDArray[np.float64]:
        """The inner products of one tensor, shape (len(which),)."""
        if not which:
            return np.zeros(0)
        if kernels.uses_kernels(self._layout.num_elements):
            from templar.gradient.kernels.combine import chunk_products  # noqa: PLC0415 - numba takes a second

            name = tensor.name
            sections = [self._payloads[index].sections[name] for index in which]
            tables = [self._tables[index][name] for index in which]
            products = chunk_products(sections, tables, tensor, gradient.numpy())
        else:
            chunks = to_chunks(gradient, tensor).numpy()
            products = np.stack([self._chunk_products(index, tensor, chunks) for index in which])
        # Add the chunks one after the other: the number of threads and the implementation change no bit of the sum.
        with np.errstate(invalid="ignore", over="ignore"):
            return np.cumsum(products, axis=1)[:, -1] * QUANTUM

    def _chunk_products(self, index: int, tensor: TensorLayout, chunks: NDArray[np.float32]) -> NDArray[np.float64]:
        """The inner product of each chunk, in quanta, shape (C,)."""
        key = index, tensor.name
        if (unpacked := self._unpacked.get(key)) is None:
            places, signed = signed_magnitudes(self._payloads[index].sections[key[1]], self._tables[index][key[1]])
            unpacked = places, signed.astype(np.float64)
            self._free_cache_bytes -= places.nbytes + signed.nbytes
            if self._free_cache_bytes >= 0:
                self._unpacked[key] = unpacked
        places, factors = unpacked
        with np.errstate(invalid="ignore", over="ignore"):
            products = np.where(factors != 0, np.take_along_axis(chunks, places, axis=1) * factors, 0.0)
            return np.cumsum(products, axis=1)[:, -1]
