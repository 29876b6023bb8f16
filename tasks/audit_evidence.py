"""Step: rebuild a closed window from public objects, and hold what validators published against it."""

from typing import Any

from prefect import task
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.artifacts import table
from tasks.host import load_block
from tasks.observing import Viewpoint, auditing
from tasks.policy import HOUSEKEEPING
from templar.audit.evidence_audit import WindowAudit
from templar.errors import TransientError


@task(task_run_name="audit evidence", **HOUSEKEEPING)
def audit_evidence(neuron: str, window: int | None, validator: int | None, tolerance: float) -> WindowAudit:
    """See `templar.neuron.evidence_audit`. The differences are a table artifact.

    What a store that fails now hides is tried again, unless a difference is known already.
    """
    with auditing(Viewpoint.of(load_block(neuron)).node(), tolerance) as auditor:
        audit = auditor.audit(auditor.newest_window() if window is None else window, validator)
    if audit.differing is None and isinstance(audit.problem, TransientError):
        raise audit.problem
    table(f"audit-{neuron}", audit_rows(audit), audit.summary)
    return audit


def audit_rows(audit: WindowAudit) -> list[dict[str, Any]]:
    """A row per difference, then one per note; where there is neither, one that says so."""
    rows = []
    for part in audit.parts:
        first = {"window": part.window, "audited": part.title}
        rows += [
            {
                **first,
                "what": "difference",
                "field": each.where,
                "published": each.published,
                "recomputed": each.recomputed,
                "at fault": " or ".join(f"uid {uid}" for uid in each.suspects),
            }
            for each in part.differences
        ]
        others = [("cannot be audited", str(part.problem))] if part.problem is not None else []
        others += [("note", note) for note in part.notes]
        others += [] if part.differences or others else [("verified", "")]
        empty = dict.fromkeys(("recomputed", "at fault"), "")
        rows += [{**first, "what": what, "field": "", "published": text, **empty} for what, text in others]
    return rows


def audit_state(audit: WindowAudit) -> State[None]:
    """`Verified`, `Differs` or `NotAudited`, with what is wrong."""
    if audit.differing is not None:
        return Failed(name="Differs", message=audit.summary)
    if audit.problem is not None:
        return Failed(name="NotAudited", message=audit.summary)
    return Completed(name="Verified", message=audit.summary)
