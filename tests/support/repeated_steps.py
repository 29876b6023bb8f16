"""Nodes that die after a step of a window, or take every step twice: a window's steps must be safe to repeat."""

from dataclasses import replace

import pytest

from templar.window import Action, drive_window, open_window


class Died(BaseException):
    """The process ended here."""


def steps_of(role):
    """The names of a role's steps."""
    return sorted({name for each in role.__mro__ for name in vars(each) if name != "Protocol" and name[0] != "_"})


def payload_made(node, window):
    """The manifest of the payload that a miner makes in a window which nothing interrupts; the node is stopped then."""
    try:
        assert open_window(node, window).action is Action.RUN
        node.update_peers(window)
        node.fetch_pages(window)
        assert node.train(window).reason is None
        node.compress(window)
        return node._manifest(window)
    finally:
        node.stop()


def die_after(node, window, step):
    """Let a node take the steps of a window up to this one, and no more."""
    real = getattr(node, step)

    def last(*arguments):
        real(*arguments)
        raise Died

    setattr(node, step, last)
    with pytest.raises(Died):
        drive_window(node, window)


def take_each_step_twice(node, windows, role, look):
    """Let a node do windows; a step that is repeated answers as before, and changes nothing of what `look` shows."""
    taken = []

    def twice(step, real):
        def call(*arguments):
            answer = real(*arguments)
            seen = look()
            again = real(*arguments)
            assert look() == seen, step
            if step == "train":  # its figures say how long it took
                again, answer = (replace(report, figures=None) for report in (again, answer))
            if step != "gather":  # it says how long it took
                assert repr(again) == repr(answer), step
            taken.append(step)
            return again

        return call

    for step in steps_of(role):
        setattr(node, step, twice(step, getattr(node, step)))
    for window in windows:
        assert drive_window(node, window).action is Action.RUN
    assert set(taken) == {*steps_of(role)}
