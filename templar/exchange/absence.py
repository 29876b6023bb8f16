"""What the absence of an object proves: nothing, where a clean-up may have deleted it."""

from templar.chain.base import NeuronInfo
from templar.exchange.context import Exchange
from templar.exchange.retention import newest_window
from templar.windows import window_of


def may_have_expired(exchange: Exchange, neuron: NeuronInfo, window: int) -> bool:
    """Whether a clean-up, which counts from the bucket's newest window, may have deleted a neuron's old objects.

    Then their absence proves nothing: what was deleted was there once.

    Raises:
        RejectedError: The neuron committed no bucket that can be read.
        TransientError: Chain or store failed.
    """
    current = window_of(exchange.chain.block(), exchange.hparams.windows)
    retention = exchange.hparams.storage.retention_windows
    if window >= current - retention:
        return False
    newest = newest_window(exchange.buckets.reader(neuron).list(), current)
    return newest is not None and window < newest - retention
