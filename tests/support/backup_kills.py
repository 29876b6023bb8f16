"""Kill a backup and a restore before each operation on files: `python -m tests.support.backup_kills FOLDER`.

The network runs in this process, which then forks: each fork does the work from where the one before it was killed, as
the next process of a neuron would. It prints what each of them left, as JSON.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import torch

from templar.exchange.encryption import Binding, decrypt
from templar.neuron.backup import list_backups, restore_home, store_backup
from tests.support.kill_points import ROOT, killed_at_every_step
from tests.support.network import Network, tiny

NAME = "honest-3"


def run(folder):
    """What the kills leave, by work: for each kill, and at the end for the work that was not killed."""
    command = [sys.executable, "-m", "tests.support.backup_kills", str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    network = Network(folder, tiny(storage={"private_backup_windows": 1}))
    config, member = network.config(NAME), network.member(NAME)
    network.run([1])
    store_backup(config)
    network.run([2])
    store, birth = network.bucket(NAME), config.birth()

    def backups():
        found = list_backups(store)
        for window, info in found:
            with (folder / "buckets" / member.account_id / info.key).open("rb") as source:
                binding = Binding(birth.network.netuid, birth.network.genesis, member.hotkey.address, window)
                whole = sum(map(len, decrypt(source, info.size, signer=member.hotkey, binding=binding)))
        return {"windows": [window for window, _ in found], "whole": whole > 0}

    made = [backups() for _ in killed_at_every_step(repeat(folder), lambda _: store_backup(config))]
    network.nodes.pop(NAME).stop()
    shutil.rmtree(config.home)
    new = replace(config, home=config.home.parent / "new" / NAME)
    new.home.parent.mkdir()

    def home():
        files = [str(path.relative_to(new.home)) for path in new.home.rglob("*") if path.is_file()]
        shutil.rmtree(new.home, ignore_errors=True)
        return {"home": sorted(files)}

    restored = [home() for _ in killed_at_every_step(repeat(folder), lambda _: restore_home(new))]
    print(json.dumps({"backup": made, "restore": restored}))


if __name__ == "__main__":
    main()
