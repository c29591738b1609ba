"""The files of a prefix cache: what is whole is read as it was written, and anything else is never used."""

import errno
import io
import logging
import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hasten.engine.block_files import HEADER_BYTES, BlockFiles
from hasten.errors import ResourceError

KEY = bytes(range(16))
BLOCK = bytes(range(200)) * 5


@pytest.fixture
def files(tmp_path):
    return BlockFiles(tmp_path / "cache", limit=1 << 20)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def read(files: BlockFiles, name: bytes, size: int) -> bytes | None:
    block = bytearray(size)
    return bytes(block) if files.read(name, memoryview(block)) else None


def kept(files: BlockFiles) -> list[Path]:
    return sorted(files.folder.glob("??/*.kv"))


@given(name=st.binary(min_size=16, max_size=16), block=st.binary(max_size=4096))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_block_is_read_as_it_was_written(files, name, block):
    files.path(name).unlink(missing_ok=True)
    assert files.write(name, memoryview(block))
    assert files.has(name)
    assert read(files, name, len(block)) == block
    assert files.path(name).stat().st_size == HEADER_BYTES + len(block)


@given(data=st.data(), block=st.binary(min_size=1, max_size=300))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_other_bytes_are_never_a_block(files, data, block):
    """Flipped bits, truncation, additions, whole other files: the file is refused and removed."""
    path = files.path(KEY)
    path.unlink(missing_ok=True)
    files.write(KEY, memoryview(block))
    whole = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << bit
    choices = [st.just(bytes(flipped)), st.integers(0, len(whole) - 1).map(lambda size: whole[:size])]
    choices += [st.binary(min_size=1, max_size=20).map(whole.__add__), st.binary(max_size=400)]
    changed = data.draw(st.one_of(choices).filter(lambda found: found != whole))
    path.write_bytes(changed)
    assert read(files, KEY, len(block)) is None
    assert not files.has(KEY)
    assert files.write(KEY, memoryview(block))
    assert read(files, KEY, len(block)) == block


def test_a_block_under_another_name_or_of_another_size_is_refused(files):
    files.write(key(1), memoryview(BLOCK))
    files.path(key(2)).parent.mkdir(exist_ok=True)
    files.path(key(2)).write_bytes(files.path(key(1)).read_bytes())
    assert read(files, key(2), len(BLOCK)) is None
    assert read(files, key(1), len(BLOCK) - 1) is None
    assert kept(files) == []


def test_damage_is_one_warning(files, caplog):
    for number in range(3):
        files.write(key(number), memoryview(BLOCK))
        files.path(key(number)).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert [read(files, key(number), len(BLOCK)) for number in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "has 1 bytes instead of" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_links_and_folders_are_not_read_and_do_not_block(files, tmp_path):
    (tmp_path / "target").write_bytes(b"somebody's")
    paths = [files.path(key(number << 120)) for number in range(3)]
    for path in paths:
        path.parent.mkdir()
    os.mkfifo(paths[0])
    paths[1].symlink_to(tmp_path / "target")
    paths[2].mkdir()
    for number in range(3):
        files.read_ahead(key(number << 120))
        assert read(files, key(number << 120), 10) is None
    assert (tmp_path / "target").read_bytes() == b"somebody's"
    files.sweep()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_secret_that_is_a_pipe_or_a_link_is_refused(tmp_path):
    (tmp_path / "target").write_bytes(bytes(32))
    for name, make in (("pipe", os.mkfifo), ("link", lambda path: path.symlink_to(tmp_path / "target"))):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "secret")
        with pytest.raises(ResourceError, match=r"name another one"):
            BlockFiles(tmp_path / name, limit=1)


def test_a_folder_whose_files_cannot_be_removed_does_not_grow(files, monkeypatch):
    size = HEADER_BYTES + len(BLOCK)
    files = BlockFiles(files.folder, limit=4 * size)
    for number in range(4):
        files.write(key(number), memoryview(BLOCK))

    def refuse(path, missing_ok=False):
        raise PermissionError(errno.EPERM, "it is not yours")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="older blocks cannot be removed"):
        files.write(key(4), memoryview(BLOCK))
    monkeypatch.undo()
    assert len(kept(files)) == 4
    assert files.write(key(4), memoryview(BLOCK))


def test_a_touch_names_the_files_that_are_gone(files):
    files.write(KEY, memoryview(BLOCK))
    assert files.touch([KEY, key(1)]) == [key(1)]
    files.path(KEY).unlink()
    assert files.touch([KEY]) == [KEY]


def test_the_end_of_a_text_goes_before_its_beginning(files):
    size = HEADER_BYTES + len(BLOCK)
    files = BlockFiles(files.folder, limit=10 * size)
    chain = [key(number) for number in range(10)]
    for one in chain:
        files.write(one, memoryview(BLOCK))
    files.touch(chain)
    files.write(key(10), memoryview(BLOCK))
    there = [files.has(one) for one in chain]
    assert not all(there)
    assert there == sorted(there, reverse=True)


def test_what_was_used_longest_ago_goes_first(files):
    size = HEADER_BYTES + len(BLOCK)
    files = BlockFiles(files.folder, limit=10 * size)
    now = time.time()
    for number in range(10):
        files.write(key(number), memoryview(BLOCK))
        os.utime(files.path(key(number)), (now - 100 + number,) * 2)
    assert not files.touch([key(0), key(3)])  # used now
    assert not files.write(key(3), memoryview(BLOCK))  # there already
    files.write(key(10), memoryview(BLOCK))
    assert [number for number in range(11) if not files.has(key(number))] == [1]
    for number in range(11, 40):
        files.write(key(number), memoryview(BLOCK))
        assert sum(path.stat().st_size for path in kept(files)) <= files.limit
    assert len(kept(files)) >= 8
    assert not files.write(key(50), memoryview(bytes(files.limit)))  # larger than all may be


def test_two_servers_share_a_folder_and_its_limit(files):
    size = HEADER_BYTES + len(BLOCK)
    one, other = (BlockFiles(files.folder, limit=40 * size) for _ in range(2))
    assert one.secret == other.secret == files.secret
    one.write(KEY, memoryview(BLOCK))
    assert read(other, KEY, len(BLOCK)) == BLOCK
    for number in range(100):
        (one, other)[number % 2].write(key(number), memoryview(BLOCK))
        assert len(kept(files)) <= 40 + 2 * 6  # an eighth each, and one


def test_only_its_own_files_are_removed(files):
    for name in ("notes.txt", "ab/notes.kv", "ab/.hidden", "long/0123.kv"):
        path = files.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1 << 10))
    old, fresh = (files.folder / "ab" / f".{name * 32}.kv.1-2.partial" for name in "ab")
    for path in (old, fresh):
        path.write_bytes(b"half")
    (files.folder / ".theirs.partial").write_bytes(b"x")
    for path in (old, files.folder / ".theirs.partial"):
        os.utime(path, (1, 1))
    BlockFiles(files.folder, limit=1).sweep()
    left = {str(path.relative_to(files.folder)) for path in files.folder.rglob("*") if path.is_file()}
    assert left == {
        *("secret", "lock", "notes.txt", "ab/notes.kv", "ab/.hidden", "long/0123.kv", ".theirs.partial"),
        str(fresh.relative_to(files.folder)),
    }


def test_others_may_not_read_the_files(files):
    files.write(KEY, memoryview(BLOCK))
    for path in (files.path(KEY), files.folder / "secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert len(files.secret) == 32


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "inner", Path("/proc/cache"), Path("/proc/self")):
        with pytest.raises(ResourceError, match=r"cannot be written: .*; name another one"):
            BlockFiles(folder, limit=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("password")
    with pytest.raises(ResourceError, match="secret should hold 32 bytes and does not"):
        BlockFiles(tmp_path / "other", limit=1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_leaves_nothing(files, monkeypatch, number):
    class Full(io.FileIO):
        def write(self, data):
            if len(data) > HEADER_BYTES:
                raise OSError(number, os.strerror(number))
            return super().write(data)

    def full(path, mode, *, opener, buffering):
        return Full(path, mode, opener=opener)

    monkeypatch.setattr("hasten.engine.block_files.open", full, raising=False)
    with pytest.raises(OSError, match=os.strerror(number)):
        files.write(KEY, memoryview(BLOCK))
    monkeypatch.undo()
    assert not list(files.folder.rglob("*.*"))
    assert files.write(KEY, memoryview(BLOCK))
