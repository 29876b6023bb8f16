"""Debug values: two elements of every parameter, published beside the sync proof for people and tools to compare.

They decide nothing: whether a node is in sync is said by its proof and its root. Anybody can copy another's values, or
make some up; what they are good for is to see how far apart two states are, where roots only say that they differ.
Miners publish other elements than everybody else, as documented: what a validator shows is not what a miner must have.
Compared with `templar.scoring.debug_values`.
"""

import logging
import math
import re
from collections.abc import Mapping

from torch import Tensor, float32

from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason
from templar.exchange.context import Exchange
from templar.exchange.keys import Kind, window_key
from templar.exchange.objects import DEBUG_ELEMENTS, DEBUG_NAME, MAX_DEBUG_PARAMETERS, Debug
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.read import read_signed

log = logging.getLogger(__name__)

MINER_START = 10
"""First of the elements that miners publish, counted over the flattened parameter."""
START = 0
"""First of the elements that everybody else publishes."""


def debug_values(params: Mapping[str, Tensor], start: int) -> dict[str, tuple[float, float]]:
    """The elements of each parameter that are published.

    Args:
        params: Parameters by name, of any shape and float type.
        start: The first element of the flattened parameter.

    Returns:
        Name -> elements `start` and `start + 1`, exactly, in name order, of at most `MAX_DEBUG_PARAMETERS` parameters.
        Left out are parameters that have no such elements, those with one that is not finite, and names that are no
        legal ones.
    """
    found: dict[str, tuple[float, float]] = {}
    for name in sorted(params):
        piece = params[name].detach().reshape(-1)[start : start + DEBUG_ELEMENTS].to("cpu", float32).tolist()
        if len(piece) == DEBUG_ELEMENTS and all(map(math.isfinite, piece)) and re.fullmatch(DEBUG_NAME, name):
            found[name] = (piece[0], piece[1])
        if len(found) == MAX_DEBUG_PARAMETERS:
            break
    return found


def publish_debug(
    exchange: Exchange, params: Mapping[str, Tensor], *, window: int, role: str | None
) -> PublishReceipt | None:
    """Publish the own debug values of the state after a window; a later call with the same state changes nothing.

    Args:
        exchange: The own view of the network.
        params: The agreed parameters after the window, by name.
        window: The window.
        role: The node's role; it says which elements are published.

    Returns:
        None if other values stand there already: they stay, and nothing depends on them.

    Raises:
        TransientError: Chain or store failed; a later call goes on.
    """
    start = MINER_START if role == "miner" else START
    body = Debug(**exchange.author(window), window=window, start=start, values=debug_values(params, start))
    key = window_key(Kind.DEBUG, window, body.uid)
    try:
        return publish_body(exchange.buckets.own, key, body, exchange.own_signer, clock=exchange.chain.clock)
    except PermanentError as error:
        if error.reason is not Reason.OBJECT_DIFFERS:
            raise
        log.warning("the debug values of a state that was left stand: %s", error)
        return None


def read_debug(exchange: Exchange, neuron: NeuronInfo, window: int) -> Debug | None:
    """A node's debug values of the state after a window; None if there are none.

    Raises:
        RejectedError: They are not legal.
        TransientError: The store failed.
    """
    store = exchange.buckets.reader(neuron)
    key = window_key(Kind.DEBUG, window, neuron.uid)
    found = read_signed(store, key, Debug, network=exchange.network, author=neuron, window=window)
    return None if found is None else found.body
