"""A miner or validator that dies at every step of a window: a work of `tests.support.kill_points`.

Everybody lives through a window once. Then the victim's folder and bucket, and the ledger, are as before it, and the
victim lives through it again: its n-th process dies just before its n-th operation on a file, and the next one takes up
what it has left, until one comes to the end. The time stands still between two processes, so the victim is never late.
"""

import itertools
import json
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import torch
from safetensors.torch import load_file

from templar.agreement import state
from templar.canonical import canonical_json, sha256_hex
from templar.exchange.object_keys import Kind, window_key
from templar.statefile import copy_state_file
from templar.window import Action, drive_window
from tests.support.kill_points import killed_at_every_step
from tests.support.network import Network, tiny
from tests.support.snapshots import save_private

VICTIMS = {"miner": "honest-4", "validator": "validator-2"}
WINDOW = 3
AWAY = "honest-3"
"""An honest miner that misses the window, so that somebody is slashed who had earned something."""
HPARAMS = tiny(
    windows={"blocks_per_window": 60},
    weights={"windows_per_weights": 1},
    peers={"gather_peer_count": 5, "peer_replacement_frequency": 1},
    storage={"snapshot_frequency": WINDOW},  # each process replays the windows before from its disk
)
LEDGER = "ledger.sqlite"


def killed_node(folder, role):
    """What a node leaves of the window without a kill, and with many; how often it died, and what it found then."""
    # 1. Everybody lives through the window.
    torch.set_num_threads(1)  # threads do not survive a fork, nor does the one that hashes parameters
    network = Network(folder / "network", HPARAMS, actors=("honest", "honest", "honest", "silent", "garbage"))
    member, root = network.member(VICTIMS[role]), network.world.root
    parts, before = (f"nodes/{member.name}", f"buckets/{member.account_id}"), folder / "before"
    network.run(range(1, WINDOW))
    _stop(network)
    for part in parts:
        shutil.copytree(root / part, before / part)
    copy_state_file(root / LEDGER, before / LEDGER)
    start = network.clock.now()
    for each in network.members:
        if each.name != AWAY:
            network.restart(each)
    network.run([WINDOW])
    calm = _left_by(network, network.nodes[member.name])
    _stop(network)

    # 2. The victim does so again, in many processes.
    for part in parts:
        shutil.rmtree(root / part)
    shutil.copytree(before, root, dirs_exist_ok=True)
    time, found, left = folder / "time", folder / "found", folder / "left"
    time.write_text(str(start))
    clock, sleep_until = network.clock, network.clock.sleep_until

    def sleep(timestamp):
        sleep_until(timestamp)
        time.write_text(str(clock.now()))

    def live(_):
        state._hasher = ThreadPoolExecutor(1)
        clock._now, clock.sleep_until = float(time.read_text()), sleep
        node = network.started(member)
        with found.open("a") as notes:
            notes.write(json.dumps([_is_entered(node), node.state.window == WINDOW]) + "\n")
        assert drive_window(node, WINDOW).action is not Action.CATCHING_UP
        left.write_text(json.dumps(_left_by(network, node)))

    seen, died = {}, -1
    for _ in killed_at_every_step(itertools.repeat(root), live):
        died += 1
        objects = {key: data for key, (_, data) in network.objects(member).items()}
        for key in [key for key in seen if not key.startswith(Kind.DECISION)]:
            assert objects.get(key) == seen[key], f"{key} is gone, or was replaced"
        seen |= objects
    notes = [json.loads(line) for line in found.read_text().splitlines()]
    return {"calm": calm, "killed": json.loads(left.read_text()), "died": died, "found": notes}


def _stop(network):
    """Stop every node, and close the ledger, which must not be open when a process forks."""
    chains = [node.chain for node in network.nodes.values()]
    network.stop()
    for chain in (*chains, network.world.chain):
        chain.close()


def _is_entered(node):
    """Whether a miner's payload or a validator's scores are entered."""
    if node.role == "miner":
        return node.journal.result(WINDOW, "compress") is not None
    return node.book.evidence(WINDOW) is not None


def _left_by(network, node):
    """What a node has made of the window, without signatures; what a decision has depends on when it was made."""
    objects = {key: data for key, (_, data) in network.objects(node).items() if not key.startswith(Kind.DECISION)}
    left = {"root": node.state.root, "published": {key: _unsigned(data) for key, data in objects.items()}}
    left["snapshots"] = node.snapshots.windows()
    if node.role == "miner":
        path = network.world.root.parent / "private.safetensors"
        save_private(node.private, path)
        tensors = sorted(load_file(path).items())
        private = sha256_hex(b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors))
        return left | {"private": private, "applied": node.settle(WINDOW).uids}
    evidence = json.loads(objects[window_key(Kind.EVIDENCE, WINDOW, network.uid(node))])["body"]
    weights = {str(uid): weight for uid, weight in node.chain.weights()[network.uid(node)].items()}
    return left | {"evidence": evidence, "book": _rows(node.home / "scores.sqlite"), "weights": weights}


def _rows(path):
    """The rows of every table of an SQLite file."""
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        tables = {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for (name,) in names}
    return {
        name: sorted(([_unsigned(each) if isinstance(each, bytes) else each for each in row] for row in rows), key=str)
        for name, rows in tables.items()
    }


def _unsigned(data):
    """Digest of JSON without any signatures, since no two of them are alike; of other data as it is."""
    with suppress(ValueError):
        data = canonical_json(_without_signatures(json.loads(data)))
    return sha256_hex(data)


def _without_signatures(value):
    if isinstance(value, list):
        return [_without_signatures(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_signatures(each) for name, each in value.items() if not name.endswith("signature")}
    return value
