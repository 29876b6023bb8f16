"""Windows in a row in which a neuron published or scored nothing, told on the terminal in one line.

What happened is read from the final states of the neuron's window runs, on its Prefect server. A streak is told once it
has `FIRST_TOLD` windows, and again whenever it is twice as long as when it was told last.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Thread

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import temporary_settings

from deployments.automations import CRASHED, REMEDIES
from deployments.clock import WINDOW_FLOWS
from deployments.neuron.folder import Address
from deployments.work_pool import is_outage
from tasks.alerts import Alert, of_missed
from templar.errors import Reason
from templar.window import Missed

log = logging.getLogger(__name__)
FIRST_TOLD = 3  # windows in a row
SPARE = 5  # runs that are read besides: some count for nothing
MOST_READ = 200  # most runs that a Prefect server lists in one answer
LOOK_SECONDS = 10.0
_DONE = {Missed.NOTHING_PUBLISHED: "published nothing", Missed.NOTHING_SCORED: "scored nothing"}
_CODE = re.compile(r"\[([a-z_]+)\]")


@dataclass(frozen=True)
class Streak:
    """Windows in a row in which a neuron did not do what it owed; `state` is that of the newest."""

    neuron: str
    windows: int
    state: State[None]

    @property
    def line(self) -> str:
        """Neuron, count, reason and remedy."""
        reason, name = _reason_of(self.state), str(self.state.name)
        done = _DONE.get(Missed(name), name) if name in set(Missed) else "took no part"
        code = f" [{reason}]" if reason else ""
        what = f"neuron {self.neuron!r} {done} in {self.windows} windows in a row{code}"
        if self.state.is_crashed():
            remedy = CRASHED
        elif name == "CatchingUp":
            remedy = REMEDIES[Alert.BEHIND]
        elif reason is None:
            remedy = REMEDIES[Alert.WINDOW_MISSED]
        else:
            *_, raised = of_missed(reason, "")  # the most particular one is the last
            remedy = REMEDIES[raised.alert]
        return f"{what}: {remedy.format(neuron=self.neuron)}"


def newest_windows(name: str, limit: int) -> list[FlowRun]:
    """The newest window runs of a neuron that have begun, on the server that is set, the newest first."""
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=list(WINDOW_FLOWS))),
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[f"neuron:{name}"])),
            sort=FlowRunSort.START_TIME_DESC,
            limit=limit,
        )


def streak_of(neuron: str, runs: Iterable[FlowRun]) -> Streak | None:
    """The streak that goes on, from the newest runs, the newest first; None if it has fewer than `FIRST_TOLD` windows.

    A window that several runs took counts once. A run that is not over, was cancelled, or found nothing to do in its
    window neither ends a streak nor counts.
    """
    names: list[str] = []
    newest: State[None] | None = None
    for run in runs:
        state = run.state
        if state is None or not state.is_final() or state.is_cancelled():
            continue
        is_late = state.name == "Skipped" and _reason_of(state) is Reason.WINDOW_PASSED
        if not (state.is_failed() or state.is_crashed() or state.name == "CatchingUp" or is_late):
            if state.name == "Skipped":
                continue
            break
        newest = newest or state
        if run.name not in names:
            names.append(run.name)
    return Streak(neuron, len(names), newest) if newest is not None and len(names) >= FIRST_TOLD else None


class Teller:
    """Tells of the streaks of some neurons; `say` gets each line."""

    def __init__(self, neurons: Sequence[str], say: Callable[[str], None]) -> None:
        self._told = dict.fromkeys(neurons, 0)
        self._say = say

    def look(self) -> None:
        """Read the newest runs, and tell what is new; what Prefect's client raises is raised."""
        for neuron, told in self._told.items():
            few = min(MOST_READ, 2 * max(FIRST_TOLD, told) + SPARE)
            streak = streak_of(neuron, newest_windows(neuron, few))
            if streak is None:
                self._told[neuron] = 0
            elif told == 0 or streak.windows >= 2 * told:
                streak = streak_of(neuron, newest_windows(neuron, MOST_READ)) or streak  # its whole length
                self._told[neuron] = streak.windows
                self._say(streak.line)


def tell_of_streaks(neurons: Sequence[str], address: Address, say: Callable[[str], None]) -> None:
    """Tell of the streaks of neurons on a server, in a thread that ends with this process."""
    Thread(target=_tell, args=(Teller(neurons, say), address), name="streaks", daemon=True).start()


def _tell(teller: Teller, address: Address) -> None:
    """Look for ever; an outage of the server is waited out, and what it refuses costs a warning."""
    with temporary_settings(address.settings):
        while True:
            try:
                teller.look()
            except Exception as error:  # noqa: BLE001 - this thread must outlive what the server refuses
                if not is_outage(error):
                    log.warning("the newest windows were not looked at: %r", error)
            time.sleep(LOOK_SECONDS)


def _reason_of(state: State[None]) -> Reason | None:
    """The first reason that the state's message names."""
    known = {reason.value: reason for reason in Reason}
    return next((known[code] for code in _CODE.findall(state.message or "") if code in known), None)
