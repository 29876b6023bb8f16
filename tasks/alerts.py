"""Alerts: what an operator is told at once, from how a window of a neuron went, and the events that they are sent as.

Each alert is something that somebody can do something about; a healthy window has none. Who is told, and how, is set by
the automations that are deployed with the neuron. Events are sent by a thread of Prefect's client, so a server that is
away delays no window.
"""

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from prefect.events import emit_event

from tasks.host import current
from templar.errors import Reason, TemplarError
from templar.neuron.node import Node
from templar.training.device import num_parameters
from templar.window import Action, Opening, WindowResult

log = logging.getLogger("templar.alerts")

RESOURCE = "templar.neuron."  # beginning of the id of the resource that a neuron's events are about
EVENT = "templar.alert."  # beginning of the events' names
BEHIND_WINDOWS = 3  # a node whose state lacks so many windows or more is behind
FREE_SHARE = 0.05  # a disk with less than this share free is nearly full
AGREED_BYTES, PRIVATE_BYTES, PROGRESS_BYTES = 4, 12, 12
"""Room that a window with a snapshot takes per parameter; a miner has private state, and perhaps a progress file."""


class Alert(StrEnum):
    """The event; its name is part of the event's in Prefect."""

    WINDOW_MISSED = "window-missed"
    LATE = "late"
    BEHIND = "behind"
    STATE_DIFFERS = "state-differs"
    WEIGHTS_REFUSED = "weights-refused"
    KEY_REFUSED = "key-refused"
    LEASE_LOST = "lease-lost"
    DISK_LOW = "disk-low"
    SCHEDULE_STALLED = "schedule-stalled"
    SERVER_ERRORS = "server-errors"


_LATE = frozenset({Reason.NO_TIME_LEFT, Reason.COMMIT_LATE, Reason.REVEAL_LATE, Reason.ROSTER_LATE})
_OF_REASON = {
    Reason.LEASE_LOST: Alert.LEASE_LOST,
    Reason.ACCESS_DENIED: Alert.KEY_REFUSED,
    Reason.WRITE_KEY_REFUSED: Alert.KEY_REFUSED,
    Reason.BUCKET_MISSING: Alert.KEY_REFUSED,
    Reason.DISK_FULL: Alert.DISK_LOW,
    Reason.MINORITY: Alert.STATE_DIFFERS,
}
"""Alerts that a reason raises besides the missed window."""


@dataclass(frozen=True, order=True)
class Raised:
    """One alert; the text names the window or the object."""

    alert: Alert
    reason: Reason
    text: str


def of_result(result: WindowResult) -> Iterator[Raised]:
    """Yield the alerts of a window that was run to its end."""
    if result.missed is not None and result.reason is not None:
        yield from of_missed(result.reason, f"{result.missed}: {result.message}")


def of_opening(opening: Opening) -> Iterator[Raised]:
    """Yield the alerts of a window that is not run."""
    if opening.reason is None:
        return
    text = f"window {opening.window} is not run: {opening.detail}"
    if opening.action is Action.CATCHING_UP or opening.reason is Reason.WINDOW_PASSED:
        yield from of_missed(opening.reason, text)
    if opening.behind >= BEHIND_WINDOWS:
        yield Raised(Alert.BEHIND, opening.reason, f"the state is {opening.behind} windows behind: {text}")


def of_node(node: Node) -> Iterator[Raised]:
    """Yield the alerts of a node's own condition: its disk, and a history that was not decided."""
    usage = shutil.disk_usage(node.home)
    is_miner = node.role == "miner"
    progress = PROGRESS_BYTES if is_miner and node.config.trainer.inner_snapshot_seconds else 0
    needed = (AGREED_BYTES + PRIVATE_BYTES * is_miner + progress) * num_parameters(node.hparams.model)
    if usage.free < max(needed, FREE_SHARE * usage.total):
        free = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f}"
        yield Raised(Alert.DISK_LOW, Reason.DISK_FULL, f"{node.home} has {free}: windows will fail soon")
    if node.left_window is not None:
        window, node.left_window = node.left_window, None
        yield Raised(
            Alert.STATE_DIFFERS, Reason.MINORITY, f"window {window} was decided otherwise than this node had applied it"
        )


def of_missed(reason: Reason, text: str) -> Iterator[Raised]:
    """Yield the alerts of a window that was missed for a reason, the most particular one last."""
    yield Raised(Alert.WINDOW_MISSED, reason, text)
    if reason in _LATE:
        yield Raised(Alert.LATE, reason, text)
    if (besides := _OF_REASON.get(reason)) is not None:
        yield Raised(besides, reason, text)


def send(neuron: str, alerts: Iterable[Raised]) -> None:
    """Send an event per alert; one that cannot be made costs a warning."""
    for raised in alerts:
        try:
            emit_event(
                f"{EVENT}{raised.alert}",
                resource={
                    "prefect.resource.id": f"{RESOURCE}{neuron}",
                    "prefect.resource.name": neuron,
                    "templar.reason": raised.reason.value,
                },
                payload={"reason": raised.reason.value, "text": raised.text},
            )
        except Exception as error:  # noqa: BLE001 - Prefect's client may raise anything; a window is worth more
            log.warning("the alert %s is not sent: %r", raised.alert, error)


@contextmanager
def alerting(neuron: str) -> Iterator[None]:
    """Send the alerts of an error that ends a window's run, and those of the neuron's own condition."""
    try:
        yield
    except TemplarError as error:
        if error.reason is not Reason.STOPPED:
            send(neuron, of_missed(error.reason, f"a step failed: {error}"))
        raise
    finally:
        if (node := current(neuron)) is not None:
            try:
                send(neuron, of_node(node))
            except OSError as error:
                log.warning("the disk of %s is not known: %s", neuron, error)
