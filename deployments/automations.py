"""The automations of a neuron: who is told when a window is missed, weights are refused, a disk is nearly full, ...

`templar neuron start` and `templar neuron register` deploy them; doing it again changes what differs and removes what
this release does not have. Each waits for an event of the neuron (`tasks.alerts`), or for one of its flow runs, and
notifies with the block that TEMPLAR_ALERT_BLOCK names, such as `slack-webhook/ops`. Without a block there are none: the
events stand in the UI's event feed all the same.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import SendNotification
from prefect.events.filters import AutomationFilter, AutomationFilterTags
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from deployments.clock import WINDOW_FLOWS
from deployments.schedules import HOUSEKEEPING_POOL
from tasks.alerts import EVENT, RESOURCE, Alert
from templar.errors import PermanentError, Reason

Resource = dict[str, str | list[str]]

VARIABLE = "TEMPLAR_ALERT_BLOCK"
LATE_TIMES = 3  # windows in a row that are late before somebody is told
SILENT_WINDOWS = 3  # windows without a run after which a neuron is silent
SHORTEST_SILENCE = 10.0  # seconds: Prefect waits no shorter for an event that does not come
CRASHED = "A flow run has crashed: its process was killed. `templar neuron start` starts it again; look at its logs."
FAILED = "Scheduled work has failed: the message of its run in the UI has the reason. The next run tries again."
SILENT = f"No window has begun for {SILENT_WINDOWS} windows: look at `templar neuron status`."
REMEDIES: Mapping[Alert, str] = {
    Alert.WINDOW_MISSED: "Open the run of this window in the UI: its message has the reason.",
    Alert.LATE: "The machine is too slow, or does other work: look at time-{neuron} among the artifacts.",
    Alert.BEHIND: "It catches up by itself; if it does not, run `templar neuron doctor`.",
    Alert.STATE_DIFFERS: "It returns by itself. If it happens again, audit the window with `templar audit`.",
    Alert.WEIGHTS_REFUSED: "The next window tries again; docs/validator.md says what each reason asks for.",
    Alert.KEY_REFUSED: "Look at the rights of the keys with `templar bucket access`, and correct .env.",
    Alert.LEASE_LOST: "Another process runs under this hotkey: stop one of them.",
    Alert.DISK_LOW: "Make room, lower snapshots_kept, or choose another TEMPLAR_HOME.",
    Alert.SCHEDULE_STALLED: "Start the neuron again; if it stays, look at the Prefect server's log.",
    Alert.SERVER_ERRORS: "Look at the Prefect server's log: what it cannot do by itself, such as schedules, stands.",
}
"""The remedy for each alert."""


def definitions(neuron: str, window_seconds: float, block: NotificationBlock | None) -> list[AutomationCore]:
    """Return all automations of a neuron; none without a block that notifies."""
    if block is None:
        return []
    runs: Resource = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.neuron:{neuron}"}
    pool: Resource = {"prefect.resource.role": "work-pool", "prefect.resource.name": HOUSEKEEPING_POOL}
    windows: Resource = {"prefect.resource.role": "flow", "prefect.resource.name": [*WINDOW_FLOWS]}
    crashed = _reactive("prefect.flow-run.Crashed", match_related=runs)
    failed = _reactive("prefect.flow-run.Failed", match_related=[runs, pool])
    silent = EventTrigger(
        posture=Posture.Proactive,
        match_related=[runs, windows],
        expect={"prefect.flow-run.Running"},
        threshold=1,
        within=timedelta(seconds=max(SHORTEST_SILENCE, SILENT_WINDOWS * window_seconds)),
    )
    found = [
        _automation(neuron, "crashed", crashed, block, CRASHED),
        _automation(neuron, "failed", failed, block, FAILED),
        _automation(neuron, "silent", silent, block, SILENT),
    ]
    for alert in Alert:
        times = LATE_TIMES if alert is Alert.LATE else 1
        seconds = (times + 0.5) * window_seconds if times > 1 else 0.0
        match: Resource = {"prefect.resource.id": f"{RESOURCE}{neuron}"}
        trigger = _reactive(f"{EVENT}{alert}", times, seconds, match=match)
        body = "{{ event.payload.text }}\n" + REMEDIES[alert].format(neuron=neuron)
        found.append(_automation(neuron, alert.value, trigger, block, body))
    return found


def _reactive(event: str, times: int = 1, seconds: float = 0.0, **matching: Any) -> EventTrigger:
    within = timedelta(seconds=seconds)
    return EventTrigger(posture=Posture.Reactive, expect={event}, threshold=times, within=within, **matching)


def _automation(neuron: str, what: str, trigger: EventTrigger, block: NotificationBlock, body: str) -> AutomationCore:
    name = f"{neuron}: {what}"
    document: Any = block._block_document_id  # it was loaded from the server
    action = SendNotification(block_document_id=document, subject=name, body=body)
    description, tags = body.rpartition("\n")[2], [f"neuron:{neuron}"]
    return AutomationCore(name=name, description=description, tags=tags, trigger=trigger, actions=[action])


def alert_block(environment: Mapping[str, str]) -> NotificationBlock | None:
    """The notification block that the environment names, or None; `bad_environment` if it cannot notify."""
    name = environment.get(VARIABLE, "")
    if not name:
        return None
    try:
        block = Block.load(name)
    except ValueError as error:
        problem = f"{VARIABLE} is {name!r}: {error}; create the block in the UI, or leave it empty"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem) from None
    if not isinstance(block, NotificationBlock):
        problem = f"{VARIABLE} is {name!r}, which cannot notify: name a notification block, such as slack-webhook/ops"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    return block


def deploy_automations(client: SyncPrefectClient, wanted: Sequence[AutomationCore], neuron: str) -> None:
    """Create, change and remove a neuron's automations as needed; one that was switched off in the UI stays off."""
    own = AutomationFilter(tags=AutomationFilterTags(all_=[f"neuron:{neuron}"]))
    there = {each.name: each for each in client.read_automations(automations=own)}
    for automation in wanted:
        known = there.pop(automation.name, None)
        if known is None:
            client.create_automation(automation)
        else:
            same = automation.model_copy(update={"enabled": known.enabled})
            if same.model_dump() != known.model_dump(include=set(same.model_dump())):
                client.update_automation(known.id, same)
    for stale in there.values():
        client.delete_automation(stale.id)
