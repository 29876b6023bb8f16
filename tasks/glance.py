"""The training at a glance: a page per neuron and one per network, whose content every window replaces.

A page costs no window anything but its milliseconds: what cannot be read now is a warning in the log, and the next
window shows it.
"""

import logging
from uuid import UUID
from weakref import WeakKeyDictionary

from tasks.artifacts import Rows as TableRows
from tasks.artifacts import page
from templar.errors import TemplarError
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.reports.training_curve import (
    NetworkCurve,
    NodeCurve,
    Rows,
    draw_curve,
    draw_held_out,
    newest_evaluations,
    node_rows,
)

log = logging.getLogger("templar.glance")

_curves: "WeakKeyDictionary[Node, NodeCurve]" = WeakKeyDictionary()


def neuron_key(neuron: str) -> str:
    """The key of a neuron's page."""
    return f"glance-{neuron}"


def network_key(netuid: int, genesis: str) -> str:
    """The key of a network's page."""
    return f"network-{netuid}-{genesis[:8]}"


def open_page(key: str) -> UUID | None:
    """Make the page that the first window will fill, or find the one that is there: its id is part of its address."""
    what = "The training at a glance: no window is over yet."
    return page(key, (), what, [[{"newest window": "none"}]], replace=False)


def show_neuron(neuron: str, node: Node, window: int) -> None:
    """Show a neuron's page after a window."""
    if isinstance(node, Miner):
        what = "loss of the last inner step of each window"
    elif isinstance(node, Validator):
        what = "loss of the evaluation batch before each window's step"
    else:
        what = "payloads that each window applied"
    try:
        points = _curves.setdefault(node, NodeCurve()).points(node, window)
        svg, rows = draw_curve(points, f"{neuron}: {what}"), node_rows(node, points)
    except (TemplarError, ValueError) as error:  # ValueError: an entry of another release
        log.warning("window %d: the page of %s is not shown: %s", window, neuron, error)
        return
    page(neuron_key(neuron), (svg,), f"Window {window}: {neuron}, the training at a glance.", [_table(rows)])


def show_network(curve: NetworkCurve, key: str, settled: int) -> None:
    """Show a network's page when a window settles, up to the one before: that is measured by then, and decided."""
    window = settled - 1
    if window < curve.start_window:
        return
    try:
        glance = curve.look(window)
    except TemplarError as error:
        log.warning("window %d: the network's page is not shown: %s", window, error)
        return
    drawings = [draw_curve(glance.points, "loss of the evaluation batch before each window's step")]
    drawings += [draw_held_out(glance.held_out)] if glance.held_out else []
    tables = [_table(glance.rows), newest_evaluations(glance.held_out), list(map(dict, glance.miners))]
    page(key, drawings, f"Window {window}: the network's training at a glance.", tables)


def _table(rows: Rows) -> TableRows:
    return [{"figure": name, "value": value} for name, value in rows]
