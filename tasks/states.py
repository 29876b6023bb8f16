"""Final states that say what happened without failing."""

from prefect.client.schemas.objects import State
from prefect.states import Completed

from templar.window import Action, Opening


def not_run(opening: Opening) -> State[None]:
    """`Skipped` or `CatchingUp`, with the reason code and what it means."""
    name = "CatchingUp" if opening.action is Action.CATCHING_UP else "Skipped"
    return Completed(name=name, message=f"window {opening.window} [{opening.reason}] {opening.detail}")
