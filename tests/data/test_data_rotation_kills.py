"""A rotation that is killed again and again, also across a swap, and read all the while: never a wrong byte."""

import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployments.s3_endpoint import AccessKey
from templar.data.shards.rotation import ShardPlan, is_whole, rotate
from templar.data.shards.shard_dataset import ShardedDataset
from templar.store.directory import DirectoryStore
from tests.support.rotating import BUCKET, READ, start
from tests.support.servers import Server, random_key, start_rclone
from tests.support.shards import PREFIX, Shards, on_disk, write_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 50
SEED = 20


@dataclass(frozen=True)
class Scene:
    """A dataset of three shards behind a real endpoint, and the folder that it is rotated in."""

    shards: Shards
    server: Server
    key: AccessKey
    root: Path
    folder: Path

    def start(self, what: str) -> subprocess.Popen[str]:
        return start(self.server.endpoint_url, self.root, self.folder, self.key, what)

    def opened(self) -> ShardedDataset:
        return ShardedDataset([DirectoryStore(self.root / BUCKET)], PREFIX, folder=self.folder)

    def check(self) -> None:
        """What has a final name is right, and so is what it is called complete by."""
        if self.folder.exists():
            assert self.shards.wrong_files(self.folder) == []


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    root, key = tmp_path / "root", random_key()
    shards = write_shards(root / BUCKET / PREFIX, length=2000, block_bytes=4096)
    server = start_rclone(root, key)
    try:
        yield Scene(shards, server, key, root, tmp_path / "local")
    finally:
        server.stop()


def killed_after(process: subprocess.Popen[str], num_lines: int) -> bool:
    """Kill a process when it has printed so many lines; False if it ended well before."""
    assert process.stdout is not None
    last = ""
    for number, line in enumerate(process.stdout):
        last = line
        if number + 1 == num_lines:
            process.send_signal(signal.SIGKILL)
    status = process.wait(60)
    process.stdout.close()
    if status == 0:
        assert last == "done well\n"
        return False
    assert status == -signal.SIGKILL, last
    return True


def kill_many(scene: Scene, kills: int) -> list[str]:
    """Kill rotations at random places; each round goes on where the last was, then starts over; what was wanted."""
    chance, done, wanted = random.Random(SEED), 0, "0"
    history: list[str] = []
    while done < kills:
        history.append(wanted)
        # Some at the very beginning: while the manifest is fetched, or the files are made.
        num_lines = chance.choice([1, 1, 2, 3, chance.randrange(4, 40)])
        done += killed_after(scene.start(wanted), num_lines)
        scene.check()
        if chance.random() < 0.2:
            wanted = "1" if wanted == "0" else "0"
    return history


def finish(scene: Scene) -> None:
    """Rotate to the second shard; what is there then is right and all."""
    report = rotate(scene.opened(), ShardPlan((1,), 2, ()))
    assert report.on_disk == (1, 2)
    assert on_disk(scene.folder) == scene.shards.names(1, 2)
    assert scene.shards.wrong_files(scene.folder) == []
    again = scene.opened()
    assert all(is_whole(again, number) for number in report.on_disk)
    for number in report.on_disk:
        before = again.endpoints[0].reads
        again.shard(number).download()
        assert again.endpoints[0].reads == before, "every block was right"


def test_after_fifty_kills_every_file_is_what_it_should_be(scene: Scene) -> None:
    history = kill_many(scene, KILLS)
    assert {"0", "1"} == set(history)
    finish(scene)


@contextmanager
def reading(scene: Scene) -> Iterator[list[str]]:
    """A reader beside; the lines that it has printed. It ends by being killed, and not by a wrong sample."""
    process, lines = scene.start(READ), list[str]()
    assert process.stdout is not None
    assert process.stdout.readline() == "ok\n"
    collector = threading.Thread(target=lines.extend, args=(process.stdout,))
    collector.start()
    try:
        yield lines
        assert process.poll() is None, "the reader has ended: a sample was wrong, or could not be read"
    finally:
        process.kill()
        process.wait(60)
        collector.join(60)
        process.stdout.close()


def test_a_reader_beside_it_reads_what_is_true(scene: Scene) -> None:
    with reading(scene) as lines:
        kill_many(scene, KILLS // 2)
        finished = len(lines)
    assert finished > 0
    assert set(lines[:finished]) == {"ok\n"}
    finish(scene)
