"""The messages of a clean-up's final state and of its table; a retried task counts its last try only."""

from dataclasses import replace

from tasks import housekeeping
from tasks.housekeeping import cleanup_state
from templar.housekeeping.bucket_cleanup import CleanupReport, CleanupRow

ROW = CleanupRow("gradient", found=5, kept=1, num_bytes=900, deleted=4)
DONE = CleanupReport(7, (ROW,), ())
FAILED = CleanupReport(7, (replace(ROW, deleted=3, failed=1),), (("key", "access_denied"),))
NOTE = " (try 2; what the tries before it deleted is not counted)"


def test_a_state_counts_what_was_found_kept_and_deleted():
    message = "window 7: 5 objects expired, 1 of them stay for the network, 4 deleted, 900 bytes"
    assert cleanup_state(DONE, verb="expired").message == message
    assert cleanup_state(replace(DONE, tries=2), verb="expired", note="; so").message == f"{message}{NOTE}; so"
    alone = cleanup_state(replace(DONE, rows=(replace(ROW, kept=0),)), verb="meant")
    assert (alone.is_completed(), alone.message) == (True, "window 7: 5 objects meant, 4 deleted, 900 bytes")


def test_a_failure_is_named_first():
    state = cleanup_state(FAILED, verb="expired")
    assert (state.is_failed(), state.message) == (
        True,
        "[objects_left] window 7: 5 objects expired, 1 of them stay for the network, 3 deleted, 900 bytes, "
        "1 failed, the first: key (access_denied)",
    )


def test_the_line_above_a_table_says_what_failed_and_that_it_is_a_later_try(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(housekeeping, "table", lambda key, rows, description: lines.append(description))
    for report, dry_run, runs, tries in ((FAILED, False, 1, 1), (DONE, False, 2, 2), (DONE, True, 2, 1)):
        monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__RUN_COUNT", str(runs))
        assert housekeeping._shown("cleanup-a", "Bucket b", report, dry_run=dry_run) == replace(report, tries=tries)
    assert lines == [
        "Bucket b: what was deleted; 1 failed, the first: key (access_denied).",
        f"Bucket b: what was deleted; 0 failed{NOTE}.",
        "Bucket b: what would be deleted; 0 failed.",
    ]
