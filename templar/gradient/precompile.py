"""Compile what a window will need before the first one opens: it takes seconds, and a window has none to spare."""

import logging
import time
from dataclasses import replace

import torch

from templar.gradient import backend
from templar.gradient.aggregate import aggregate
from templar.gradient.codec.wire import Header, Payload, decode, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout, TensorLayout

log = logging.getLogger(__name__)


SLOW_SECONDS = 2.0


def prepare(layout: Layout) -> None:
    """Take one tiny payload all the way, if kernels do the work for this layout.

    The compiled code is kept, so this is quick but for the first time on a machine.

    Args:
        layout: The model's.
    """
    if not backend.uses_kernels(layout.num_elements):
        return
    started = time.monotonic()
    levels = layout.tensors[0].levels
    tiny = replace(layout, tensors=(TensorLayout("matrix", (4, 4), (2, 2), 2, levels),))
    rule = FeedbackRule(layout.recipe, decay=0.5, learning_rate=1.0)
    update = {"matrix": torch.arange(1.0, 17.0).reshape(4, 4)}
    update["matrix"][:2, :2] = 1e-8  # too faint beside the rest: its residual is made again
    with backend.forced("numba"):
        compressed = compress(FeedbackState.zeros(tiny), update, layout=tiny, rule=rule)
        header = Header(layout.recipe, 0, 0, "nobody", tiny.digest)
        published = encode(Payload.of(header, compressed.tensors, tiny), tiny)
        aggregate([decode(published, tiny)], tiny)
    seconds = time.monotonic() - started
    if seconds > SLOW_SECONDS:
        log.info("the codec was compiled for this machine in %.0f s", seconds)
