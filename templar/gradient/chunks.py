"""Tensors as rows of chunks and back: a permutation of the elements, without any arithmetic."""

from torch import Tensor

from templar.gradient.layout import TensorLayout


def to_chunks(tensor: Tensor, layout: TensorLayout) -> Tensor:
    """Cut a tensor into chunks, block row by block row.

    Args:
        tensor: Of shape `layout.shape`.
        layout: Its chunks.

    Returns:
        Shape (num_chunks, chunk_length); each row is one chunk in row-major order.
    """
    if len(layout.edges) == 1:
        return tensor.reshape(layout.num_chunks, layout.chunk_length)
    (rows, columns), (height, width) = layout.folded_shape, layout.edges
    blocks = tensor.reshape(rows // height, height, columns // width, width).transpose(1, 2)  # (R/h, C/w, h, w)
    return blocks.reshape(layout.num_chunks, layout.chunk_length)


def from_chunks(chunks: Tensor, layout: TensorLayout) -> Tensor:
    """Put chunks of shape (num_chunks, chunk_length) together again, contiguous: the inverse of `to_chunks`."""
    if len(layout.edges) == 1:
        return chunks.reshape(layout.shape).contiguous()
    (rows, columns), (height, width) = layout.folded_shape, layout.edges
    blocks = chunks.reshape(rows // height, columns // width, height, width).transpose(1, 2)  # (R/h, h, C/w, w)
    return blocks.reshape(layout.shape).contiguous()
