"""A node that notes what is asked of it and answers what it was told: nothing of the real one is touched."""

from collections.abc import Callable
from typing import Any, TypeVar

from templar.neuron.node import Node

N = TypeVar("N", bound=Node)


def recording_node(kind, **answers):
    """A node of a kind whose named methods return these answers, or raise them if they are errors.

    And their calls: method and arguments of each, in order.
    """
    calls: list[tuple[Any, ...]] = []

    def method(name):
        def call(_, *arguments, **keywords):
            calls.append((name, *arguments, *keywords.values()))
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        return call

    members: dict[str, Any] = {"__init__": lambda _: None, **{name: method(name) for name in answers}}
    recording: Callable[[], N] = type(f"Recording{kind.__name__}", (kind,), members)
    return recording(), calls
