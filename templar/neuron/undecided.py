"""Windows that nobody decided on, because every validator was away: the slots still say what they were (PROTOCOL 6).

Without this rule a network that stood still for one window could never go on. What a late node concludes is what an
early one would have: a roster that was stored in its slot still lies there with its time, and one that is not there was
never published. As soon as one validator decided, decisions alone count (PROTOCOL 15).
"""

import logging
from collections.abc import Iterable

from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.decisions import read_decision
from templar.exchange.keys import Kind, parse_current_key
from templar.interrupt import StoppedError
from templar.store.base import ObjectInfo

log = logging.getLogger(__name__)


def nobody_decided(exchange: Exchange, window: int) -> bool:
    """Whether it is certain that no validator decided on a window.

    Every bucket has to answer: an error is never absence (PROTOCOL 11). And nothing of the window may have expired:
    what was deleted was there once.
    """
    for validator in exchange.metagraph(window).validators():
        try:
            if read_decision(exchange, validator, window) is not None or _may_have_expired(exchange, validator, window):
                return False
        except StoppedError:
            raise
        except TransientError as error:
            log.warning("window %d: decision of uid %d cannot be read now: %s", window, validator.uid, error)
            return False
        except PermanentError as error:
            log.warning("window %d: decision of uid %d is left out: %s", window, validator.uid, error)
    return True


def newest_window(objects: Iterable[ObjectInfo]) -> int | None:
    """The newest window that a bucket's owner worked in; None if it has no object of any."""
    keys = (parse_current_key(info.key) for info in objects)
    return max(
        (
            key.window
            for key in keys
            if key and key.window is not None and key.kind not in (Kind.PEERS, Kind.CHECKPOINT)
        ),
        default=None,
    )


def _may_have_expired(exchange: Exchange, validator: NeuronInfo, window: int) -> bool:
    """Whether a clean-up, which counts from the bucket's newest window, may have deleted objects of a window."""
    newest = newest_window(exchange.buckets.reader(validator).list())
    return newest is not None and window < newest - exchange.hparams.storage.retention_windows
