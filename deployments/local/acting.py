"""A bad actor in the local network: `python -m deployments.local.acting ACTOR MODULE ...` runs a module beside one.

In that process, and in no other, the miner of every neuron is the actor: no block and no variable of an operator's
neuron can name one. `make run` starts the worker of its `lazy` miner so.
"""

import runpy
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from blocks.neuron import Neuron

if TYPE_CHECKING:
    from templar.neuron.miner import Miner

GROUP = "templar.actors"  # the entry points that offer actors: each a mapping from names to classes
HONEST = "honest"


def actors() -> "dict[str, type[Miner]]":
    """Every kind of miner by name: the honest one, and those that entry points offer."""
    from templar.neuron.miner import Miner  # noqa: PLC0415 - torch takes seconds, and most commands need no actor

    found: dict[str, type[Miner]] = {HONEST: Miner}
    for entry_point in entry_points(group=GROUP):
        found |= entry_point.load()
    return found


def acting_command(actor: str, command: list[str]) -> list[str]:
    """The command of a worker, `PYTHON -m MODULE ...`, whose miner is this actor."""
    python, option, *module = command
    return command if actor == HONEST else [python, option, "deployments.local.acting", actor, *module]


def main() -> None:
    """Run a module whose miner is an actor."""
    _, actor, module, *arguments = sys.argv
    kind = actors()[actor]
    Neuron.node_class = lambda self: kind  # type: ignore[method-assign]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
