"""Whether a roster follows the history that this node applied; if not, one of them is of a minority (PROTOCOL 15)."""

from templar.errors import Reason, RejectedError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.decisions import majority
from templar.exchange.objects import Roster
from templar.neuron.journal import Journal


def check_history(exchange: Exchange, journal: Journal, roster: Roster) -> None:
    """Hold what a roster says of the window before against what this node applied there.

    Raises:
        RejectedError: `minority`; the roster is of a minority, for the majority decided as this node did: it does not
            count, and the next rank has its turn.
        TransientError: `minority`; this node is, or nobody can say yet: it catches up first.
    """
    before = journal.applied(roster.window - 1)
    if before is None or before.roster == roster.previous:
        return
    message = f"window {roster.window}: its roster follows another decision on the window before than this node's"
    try:
        decided = majority(exchange, roster.window - 1).roster
    except TransientError as error:
        raise TransientError(Reason.MINORITY, f"{message}; which is the majority's is not known: {error}") from error
    if decided == before.roster:
        raise RejectedError(Reason.MINORITY, f"{message}, which is the majority's")
    raise TransientError(Reason.MINORITY, f"{message}; the node catches up with the majority")
