"""Kill a process at every step of a piece of work: `python -m tests.support.kill_points FOLDER NAME...`.

A work is killed with SIGKILL just before each of its operations on files. Those of `works` run in a copy of a prepared
folder for each operation, `FOLDER/{name}/{n}`, and the last copy is that of the work that was not killed. `backup` and
its restore, and a window of a `miner` or `validator` (`tests.support.node_kills`), run in one folder: each process
takes up what the one before it has left.

Names in `WRITERS` are no works: such a process enters window after window into a neuron's state file, which is then
FOLDER, until it is killed at any moment, and prints each window that the file has acknowledged.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_EVENTS = ("open", "os.", "shutil.")
BACKED_UP = "honest-3"
NODES = ("miner", "validator")
UIDS = (2, 3)
"""The miners of the book that a writer fills; both reveal in every window."""
WRITER_SEED = bytes(31) + b"\x01"
"""Of the hotkey that commits the number of each window on the ledger that a writer fills."""


def run(folder, *names):
    """Run these works in a process of their own; by name, what each kill left: a folder, or for a backup a report.

    The last report of a backup and of a restore is that of the work that was not killed. Of a node, see `killed_node`.
    """
    command = [sys.executable, "-m", "tests.support.kill_points", str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    left = json.loads(done.stdout.splitlines()[-1])
    if names[0] in NODES:
        return left
    return {name: [Path(each) if isinstance(each, str) else each for each in kills] for name, kills in left.items()}


def run_and_kill(writer, path, *, after):
    """Let a writer enter windows, kill it while it goes on; the last window that was acknowledged."""
    command = [sys.executable, "-m", "tests.support.kill_points", str(path), writer]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(after)]
        process.kill()
        acknowledged += process.stdout.readlines()
    return int([line for line in acknowledged if line.endswith("\n")][-1])


def kill_before(number, folder):
    """Let this process die just before its n-th operation, counted from 0: on a file in the folder, or on SQLite."""
    from templar.chain.ledger import LedgerLog
    from templar.statefile import StateFile

    left = number

    def count():
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def hook(event, args):
        if event.startswith(FILE_EVENTS) and any(str(folder) in str(arg) for arg in args):
            count()

    def counted(real):
        def call(*arguments):
            count()
            return real(*arguments)

        return call

    sys.addaudithook(hook)
    for owner, name in ((StateFile, "execute"), (StateFile, "transaction"), (LedgerLog, "transaction")):
        setattr(owner, name, counted(getattr(owner, name)))


def killed_at_every_step(folders, work):
    """Do work in each folder, killed before its n-th operation there; yields the folder after the kill.

    The last folder is that of the work that came to its end.
    """
    for step, folder in enumerate(folders):
        if (child := os.fork()) == 0:
            try:
                kill_before(step, folder)
                work(folder)
            except BaseException:  # noqa: BLE001 - a child never returns from here
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), f"a child ended with {status}"
        yield folder
        if status == 0:
            return


def works():
    """What prepares a folder, and the work that is killed in copies of it, by name."""
    from tests.support import checkpoint_kills, snapshots

    return {
        "save": (snapshots.prepare, snapshots.work),
        "replace": (snapshots.prepare, snapshots.work_again),
        "checkpoint": (checkpoint_kills.prepare, checkpoint_kills.work),
        "go_live": (snapshots.prepare_staged, snapshots.go_live),
        "progress": (partial(snapshots.save_progress, steps=1), snapshots.save_progress),
    }


def killed_in_copies(folder, prepare, work):
    prepare(folder / "prepared")
    copies = (shutil.copytree(folder / "prepared", folder / str(step)) for step in itertools.count())
    *killed, _ = map(str, killed_at_every_step(copies, work))
    return killed


def killed_backup_and_restore(folder):
    """What each kill leaves of a backup, and of a restore, of a network that lives in this process."""
    import torch

    from templar.exchange.encryption import Binding, decrypt
    from templar.neuron.backup import list_backups, restore_home, store_backup
    from tests.support.network import Network, tiny

    # 1. A network whose miner has a backup, and something newer.
    torch.set_num_threads(1)  # threads do not survive a fork
    network = Network(folder, tiny(storage={"private_backup_windows": 1}))
    config, member = network.config(BACKED_UP), network.member(BACKED_UP)
    network.run([1])
    store_backup(config)
    network.run([2])
    store, birth = network.bucket(BACKED_UP), config.birth()

    # 2. Another backup, killed.
    def backups():
        found = list_backups(store)
        for window, info in found:
            with (folder / "buckets" / member.account_id / info.key).open("rb") as source:
                binding = Binding(birth.network.netuid, birth.network.genesis, member.hotkey.address, window)
                whole = sum(map(len, decrypt(source, info.size, signer=member.hotkey, binding=binding)))
        return {"windows": [window for window, _ in found], "whole": whole > 0}

    made = [backups() for _ in killed_at_every_step(repeat(folder), lambda _: store_backup(config))]

    # 3. A restore on another machine, killed.
    network.nodes.pop(BACKED_UP).stop()
    shutil.rmtree(config.home)
    new = replace(config, home=config.home.parent / "new" / BACKED_UP)
    new.home.parent.mkdir()

    def home():
        files = [str(path.relative_to(new.home)) for path in new.home.rglob("*") if path.is_file()]
        shutil.rmtree(new.home, ignore_errors=True)
        return {"home": sorted(files)}

    restored = [home() for _ in killed_at_every_step(repeat(folder), lambda _: restore_home(new))]
    return {"backup": made, "restore": restored}


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


def fill_ledger(path):
    from lab.hotkeys import hotkey_from_seed
    from templar.chain.ledger import Ledger

    hotkey = hotkey_from_seed(WRITER_SEED)
    ledger = Ledger(path, hotkey=hotkey)
    if ledger.metagraph().by_hotkey(hotkey.address) is None:
        ledger.register(hotkey.address)
    return lambda window: ledger.set_commitment(str(window).ljust(128, "."))


WRITERS = {"book": fill_book, "journal": fill_journal, "ledger": fill_ledger}


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    if names[0] in WRITERS:
        enter = WRITERS[names[0]](folder)
        for window in itertools.count(1):
            enter(window)
            print(window, flush=True)
    if names[0] in NODES:
        from tests.support.node_kills import killed_node

        left = killed_node(folder, names[0])
    elif names == ["backup"]:
        left = killed_backup_and_restore(folder)
    else:
        left = {name: killed_in_copies(folder / name, *works()[name]) for name in names}
    print(json.dumps(left))


if __name__ == "__main__":
    main()
