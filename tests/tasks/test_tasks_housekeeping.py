"""The messages of a clean-up's final state and of its table; a retried task counts its last try only."""

from dataclasses import replace

from tasks import housekeeping
from tasks.housekeeping import state_message
from templar.housekeeping.bucket_cleanup import CleanupReport, CleanupRow

ROW = CleanupRow("gradient", found=5, kept=1, num_bytes=900, deleted=4)
DONE = CleanupReport(7, (ROW,), ())
FAILED = CleanupReport(7, (replace(ROW, deleted=3, failed=1),), (("key", "access_denied"),))
NOTE = " (try 2; what the tries before it deleted is not counted)"


def test_a_message_counts_what_was_found_kept_and_deleted():
    message = "window 7: 5 objects expired, 1 of them stay for the network, 4 deleted, 900 bytes"
    assert state_message(DONE, "window 7", verb="expired") == message
    assert state_message(replace(DONE, tries=2), "window 7", verb="expired") == message + NOTE
    alone = replace(DONE, rows=(replace(ROW, kept=0),))
    assert state_message(alone, "window 7", verb="meant") == "window 7: 5 objects meant, 4 deleted, 900 bytes"


def test_a_failure_is_named_first():
    assert state_message(FAILED, "window 7", verb="expired") == (
        "[objects_left] window 7: 5 objects expired, 1 of them stay for the network, 3 deleted, 900 bytes, "
        "1 failed, the first: key (access_denied)"
    )


def test_a_report_says_that_it_is_that_of_a_later_try(monkeypatch):
    for dry_run, runs, tries in ((False, 1, 1), (False, 2, 2), (True, 2, 1)):
        monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__RUN_COUNT", str(runs))
        assert housekeeping._count_tries(DONE, dry_run=dry_run).tries == tries


def test_the_line_above_a_table_says_what_failed():
    line = housekeeping._description("Bucket b", FAILED, dry_run=False)
    assert line == "Bucket b: what was deleted; 1 failed, the first: key (access_denied)."
    assert housekeeping._description("Bucket b", DONE, dry_run=True) == "Bucket b: what would be deleted; 0 failed."
