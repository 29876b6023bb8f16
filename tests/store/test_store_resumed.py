"""A large download goes on where it stopped, and never shows half a file."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from templar.errors import PermanentError, Reason, TransientError
from templar.interrupt import StoppedError
from templar.store.files import locked
from templar.store.s3_protocol import S3Settings
from templar.store.s3_transfer import download
from tests.support.errors import raising

SMALL = S3Settings(multipart_threshold_bytes=1, part_bytes=4, concurrency=2)
DATA = bytes(range(30))
GONE = TransientError(Reason.STORE_UNREACHABLE, "for a test")


@dataclass
class Source:
    """An object that is read in parts, and fails where a test says so."""

    data: bytes = DATA
    fails: Callable[[int], None] = lambda start: None

    def __post_init__(self):
        self.asked: list[int] = []

    def read(self, start, buffer):
        self.asked.append(start)
        self.fails(start)
        buffer[:] = self.data[start : start + len(buffer)]

    def download(self, path, version="one", settings=SMALL):
        download(path, len(self.data), version=version, settings=settings, read=self.read)


def failing_from(start, error=GONE):
    def fails(asked):
        if asked >= start:
            raise error

    return fails


def partials(folder):
    return sorted(folder.glob(".*.partial"))


class TestParts:
    ONE_BY_ONE = replace(SMALL, concurrency=1)

    def test_only_what_is_missing_is_fetched_again(self, tmp_path):
        source = Source(fails=failing_from(12))
        with pytest.raises(TransientError):
            source.download(tmp_path / "copy", settings=self.ONE_BY_ONE)
        assert source.asked[:4] == [0, 4, 8, 12]
        assert [path.name for path in tmp_path.iterdir()] == [partials(tmp_path)[0].name]
        rest = Source()
        rest.download(tmp_path / "copy", settings=self.ONE_BY_ONE)
        assert rest.asked == [12, 16, 20, 24, 28]
        assert (tmp_path / "copy").read_bytes() == DATA
        assert [path.name for path in tmp_path.iterdir()] == ["copy"]

    def test_a_part_that_was_half_written_is_fetched_again(self, tmp_path):
        with pytest.raises(TransientError):
            Source(fails=failing_from(8)).download(tmp_path / "copy", settings=self.ONE_BY_ONE)
        with partials(tmp_path)[0].open("r+b") as file:  # killed in the middle of the third part
            os.pwrite(file.fileno(), b"??", 8)
        rest = Source()
        rest.download(tmp_path / "copy")
        assert sorted(rest.asked) == [8, 12, 16, 20, 24, 28]
        assert (tmp_path / "copy").read_bytes() == DATA

    def test_another_version_and_other_parts_begin_afresh(self, tmp_path):
        for version, part_bytes, starts in (("two", 4, [*range(0, 30, 4)]), ("one", 10, [0, 10, 20])):
            with pytest.raises(TransientError):
                Source(fails=failing_from(8)).download(tmp_path / "copy")
            other = Source(bytes(reversed(DATA)))
            other.download(tmp_path / "copy", version=version, settings=replace(SMALL, part_bytes=part_bytes))
            assert sorted(other.asked) == starts
            assert (tmp_path / "copy").read_bytes() == other.data
            assert partials(tmp_path) == []
        with raising(PermanentError, Reason.LOCAL_FILE):
            Source().download(tmp_path / "no" / "copy")

    def test_files_beside_each_other_keep_their_parts(self, tmp_path):
        for name in ("copy", "copy.2", "c[o]py"):
            with pytest.raises(TransientError):
                Source(fails=failing_from(8)).download(tmp_path / name, settings=self.ONE_BY_ONE)
        for name in ("copy.2", "c[o]py"):
            rest = Source()
            rest.download(tmp_path / name, settings=self.ONE_BY_ONE)
            assert rest.asked[0] == 8

    @pytest.mark.parametrize("version", ["one", None])
    @pytest.mark.parametrize(
        ("error", "stays"),
        [
            (GONE, True),
            (TransientError(Reason.OBJECT_DIFFERS, "for a test"), False),
            (PermanentError(Reason.OBJECT_MISSING, "for a test"), False),
            (PermanentError(Reason.LOCAL_FILE, "for a test"), True),
            (StoppedError("for a test"), True),
            (KeyboardInterrupt(), True),
        ],
    )
    def test_useful_parts_stay(self, tmp_path, error, stays, version):
        (tmp_path / "copy").write_bytes(b"what was there")
        with pytest.raises(type(error)):
            Source(fails=failing_from(8, error)).download(tmp_path / "copy", version)
        assert (tmp_path / "copy").read_bytes() == b"what was there"
        assert bool(partials(tmp_path)) == (stays and version is not None)

    def test_one_place_has_one_writer(self, tmp_path):
        with pytest.raises(TransientError):
            Source(fails=failing_from(8)).download(tmp_path / "copy")
        before = partials(tmp_path)
        with locked(before[0], wait=False):
            with raising(TransientError, Reason.LOCAL_FILE, "another download"):
                Source().download(tmp_path / "copy")
            Source().download(tmp_path / "copy", version="two")
            assert partials(tmp_path) == before  # nobody takes it away from its writer
        assert (tmp_path / "copy").read_bytes() == DATA
