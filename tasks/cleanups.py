"""What clean-ups show: rows of their artifacts, and one line about each."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from prefect.runtime import task_run

from templar.errors import Reason
from templar.housekeeping.bucket_cleanup import CleanupReport


def cleanup_rows(report: CleanupReport) -> list[dict[str, Any]]:
    """A row per kind of object, then one per object that could not be deleted."""
    return with_failures([asdict(row) for row in report.rows], report.failed)


def with_failures(rows: list[dict[str, Any]], failed: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows, and one for each failure; the UI takes the columns from the first row, so all have the same."""
    if not failed:
        return rows
    columns = dict.fromkeys(rows[0] if rows else ("kind",), "")
    first, *_ = columns
    return [
        *({**row, "left": "", "answer": ""} for row in rows),
        *({**columns, first: "not deleted", "left": key, "answer": answer} for key, answer in failed),
    ]


def counting_tries(report: CleanupReport, *, dry_run: bool) -> CleanupReport:
    """A report that says how many times the running task was tried; a dry run deletes nothing in any of them."""
    tries: int = task_run.run_count
    return report if dry_run or tries <= 1 else replace(report, tries=tries)


def described(what: str, report: CleanupReport, *, dry_run: bool) -> str:
    """The line above a table: what was done, and what failed."""
    failed = report.total("failed")
    first = "" if not report.failed else ", the first: {} ({})".format(*report.failed[0])
    return f"{what}: what {'would be' if dry_run else 'was'} deleted; {failed} failed{first}{_of_tries(report)}."


def told(report: CleanupReport, where: str, *, verb: str) -> str:
    """What a run's final state says of a clean-up.

    Args:
        report: The clean-up.
        where: What the message begins with.
        verb: What the objects had done to be found, such as `expired`.
    """
    kept, failed = report.total("kept"), report.total("failed")
    message = f"{where}: {report.total('found')} objects {verb}"
    message += f", {kept} of them stay for the network" if kept else ""
    message += f", {report.total('deleted')} deleted, {report.total('num_bytes')} bytes{_of_tries(report)}"
    if not failed:
        return message
    return "[{}] {}, {} failed, the first: {} ({})".format(Reason.OBJECTS_LEFT, message, failed, *report.failed[0])


def _of_tries(report: CleanupReport) -> str:
    if report.tries <= 1:
        return ""
    return f" (try {report.tries}; what the tries before it deleted is not counted)"
