"""A process that fills a neuron's state file: `python -m tests.support.state_writer book|journal PATH`.

It enters window after window until it is killed, and prints each one that the file has acknowledged.
"""

import itertools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
UIDS = (2, 3)
"""The miners of the book; both reveal in every window."""


def fill_book(path):
    from templar.hparams import load_hparams
    from templar.scoring.conclude import conclude
    from templar.scoring.evidence_chain import ScoreBook
    from tests.support.facts import AUTHOR, revealed, window_of

    book, hparams = ScoreBook(path), load_hparams("templar-2.1.3")

    def enter(window):
        facts = window_of(*(revealed(uid, uid / 10) for uid in UIDS), window=window)
        book.record(conclude(facts, book.standing, hparams, AUTHOR))

    return enter


def fill_journal(path):
    from templar.neuron.journal import Applied, Journal, Status

    journal = Journal(path)

    def enter(window):
        journal.claim(window)
        journal.enter(window, "settle", str(window))
        journal.enter_applied(Applied(window, None, f"{window:064x}"))
        journal.close_window(window, Status.FINISHED)

    return enter


def run_and_kill(kind, path, *, after):
    """Let the process enter windows, kill it while it goes on; the last window that was acknowledged."""
    command = [sys.executable, "-m", "tests.support.state_writer", kind, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(after)]
        process.kill()
        acknowledged += process.stdout.readlines()
    return int([line for line in acknowledged if line.endswith("\n")][-1])


def main():
    enter = {"book": fill_book, "journal": fill_journal}[sys.argv[1]](Path(sys.argv[2]))
    for window in itertools.count(1):
        enter(window)
        sys.stdout.write(f"{window}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
