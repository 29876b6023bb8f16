"""Windows that nobody decided on, because every validator was away: the slots still say what they were (PROTOCOL 6).

Without this rule a network that stood still for one window could never go on. What a late node concludes is what an
early one would have: a roster that was stored in its slot still lies there with its time, and one that is not there was
never published. As soon as one validator decided, decisions alone count (PROTOCOL 15).
"""

import logging

from templar.errors import PermanentError, TransientError
from templar.exchange.absence import may_have_expired
from templar.exchange.context import Exchange
from templar.exchange.decisions import may_be_decided, read_decision
from templar.interrupt import StoppedError

log = logging.getLogger(__name__)


def is_undecided_for_good(exchange: Exchange, window: int) -> bool:
    """Whether nobody decided on a window, and nobody can any more."""
    return not may_be_decided(exchange, window) and nobody_decided(exchange, window)


def nobody_decided(exchange: Exchange, window: int) -> bool:
    """Whether it is certain that no validator decided on a window.

    Every bucket has to answer: an error is never absence (PROTOCOL 11). And nothing of the window may have expired:
    what was deleted was there once.
    """
    for validator in exchange.metagraph(window).validators():
        try:
            if read_decision(exchange, validator, window) is not None or may_have_expired(exchange, validator, window):
                return False
        except StoppedError:
            raise
        except TransientError as error:
            log.warning("window %d: decision of uid %d cannot be read now: %s", window, validator.uid, error)
            return False
        except PermanentError as error:
            log.warning("window %d: decision of uid %d is left out: %s", window, validator.uid, error)
    return True
