"""Blocks of a prefix cache as files: one file for each block, verified when it is read.

    DIR/secret          32 random bytes, from which the names of all blocks derive
    DIR/lock            held while the secret is made
    DIR/3f/3f2a….kv     a header (magic, version, key, length, CRC-32), then the block's keys and values

A file is written under a temporary name and renamed, so a process that is killed leaves whole files and temporary ones;
what a failing machine leaves is found by the checksum. Several servers may use one folder: a name says everything about
the contents, so whoever writes a name writes the same. Files are readable by their owner only. Free of torch.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from hasten.errors import ResourceError
from hasten.machine.files import locked, replacing

VERSION = 1
_MAGIC = b"hastenkv"
_HEADER = struct.Struct("<8sI16sQ")  # magic, version, key, bytes of the block; behind it the checksum
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_SECRET_BYTES = 32
_FOLDER, _NAME = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{32}\.kv")
_ABANDONED = re.compile(r"\.([0-9a-f]{32}\.kv|secret|writable)\.\d+-\d+\.partial")  # as `replacing` names them
_ABANDONED_SECONDS = 600.0  # after which a temporary file is nobody's: writing one takes less than a second
_SPARE = 0.1  # of the limit is freed at once, so that not every write has to look for room


class _Entry(NamedTuple):
    used: int  # when it was last written or read, in ns
    bytes: int
    path: Path


class BlockFiles:
    """The files of one folder, for any number of models. `read` and `has` may be called beside one thread that writes.

    limit: bytes of all files together; what was used longest ago goes first. Several servers count what the others
    wrote when they look (`sweep`), so together they may exceed the limit by an eighth each.
    """

    def __init__(self, folder: Path, *, limit: int) -> None:
        """Create the folder if it is missing. Raises ResourceError if it cannot be read or written."""
        self.folder, self.limit = folder, limit
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(folder / "writable", flush=False) as temporary:
                temporary.touch()
            (folder / "writable").unlink(missing_ok=True)
            self.secret = _secret_of(folder)  # last: taking a lock that cannot be created may be tried for ever
        except OSError as error:
            raise ResourceError(
                f"the folder of the prefix cache, {folder}, cannot be written: {error.strerror}; name another one"
            ) from None
        self._held: int | None = None  # bytes of all files, once they were counted
        self._written = 0  # bytes since then
        self._warned: set[str] = set()

    def has(self, key: bytes) -> bool:
        """Whether there is a file of this name. What it holds is seen when it is read."""
        return os.path.exists(self.path(key))  # False, too, where it may not be looked at

    def path(self, key: bytes) -> Path:
        """The file of a key."""
        name = key.hex()
        return self.folder / name[:2] / f"{name}.kv"

    def write(self, key: bytes, block: memoryview) -> bool:
        """Write a block; False where its file is there already, or is larger than all may be. Raises OSError."""
        path, size = self.path(key), HEADER_BYTES + block.nbytes
        if size > self.limit:
            return False
        if path.exists():
            return False
        full = self._held is None or self._held + size > self.limit or self._written > self.limit // 8
        if full and self.sweep(room=size) + size > self.limit:
            raise OSError(errno.ENOSPC, "older blocks cannot be removed")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        head = _HEADER.pack(_MAGIC, VERSION, key, block.nbytes)
        with replacing(path, flush=False) as temporary, open(temporary, "wb", opener=_private, buffering=0) as file:
            _write_all(file, head + _CHECKSUM.pack(zlib.crc32(block, zlib.crc32(head))))
            _write_all(file, block)
        self._held = (self._held or 0) + size
        self._written += size
        return True

    def read(self, key: bytes, block: memoryview) -> bool:
        """Read a block into `block`; False where there is none that is whole. A damaged file is removed.

        What `block` holds after False is undefined.
        """
        path = self.path(key)
        try:
            with open(path, "rb", opener=_cautious, buffering=0) as file:
                fault = _fault(file, key, block)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.warn("read", f"{path} cannot be read ({error.strerror}); its block is computed")
            return False
        if fault is None:
            return True
        self.warn("damaged", f"{path} {fault}: it is removed and its block computed; further ones are not reported")
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.warn("remove", f"{path} cannot be removed ({error.strerror})")
        return False

    def read_ahead(self, key: bytes) -> None:
        """Have the system read a file that is wanted soon."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError), open(self.path(key), "rb", opener=_cautious, buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def touch(self, keys: Sequence[bytes]) -> list[bytes]:
        """Record that the blocks of a beginning were used now; returns those whose files were removed meanwhile.

        The first gets the latest time, since without it the others are of no use.
        """
        now, removed = time.time_ns(), []
        for place, key in enumerate(keys):
            try:
                os.utime(self.path(key), ns=(now - place, now - place))
            except FileNotFoundError:
                removed.append(key)
            except OSError:
                continue  # not ours to date: it goes sooner
        return removed

    def sweep(self, *, room: int = 0) -> int:
        """Count the files, remove those used longest ago where `room` is missing, and what interrupted writers left.

        Returns the bytes of the files that stay.
        """
        entries = sorted(self._entries())
        held = sum(entry.bytes for entry in entries)
        if held + room > self.limit:
            wanted = max(0, min(int(self.limit * (1 - _SPARE)), self.limit - room))
            for entry in entries:
                if held <= wanted:
                    break
                try:
                    entry.path.unlink(missing_ok=True)
                except OSError as error:
                    self.warn("remove", f"{entry.path} cannot be removed ({error.strerror})")
                else:
                    held -= entry.bytes
        self._held, self._written = held, 0
        return held

    def _entries(self) -> Iterator[_Entry]:
        """The files of all blocks. Files of other names are nobody's business here, and are left alone."""
        now = time.time_ns()
        for folder in (self.folder, *_folders(self.folder)):
            for item in _scan(folder):
                try:
                    state = item.stat(follow_symlinks=False)
                    if not stat.S_ISREG(state.st_mode):
                        continue
                    if folder != self.folder and _NAME.fullmatch(item.name):
                        yield _Entry(state.st_mtime_ns, state.st_size, Path(item.path))
                    elif _ABANDONED.fullmatch(item.name) and now - state.st_mtime_ns > _ABANDONED_SECONDS * 1e9:
                        os.unlink(item.path)
                except OSError:
                    continue  # removed meanwhile

    def warn(self, kind: str, text: str) -> None:
        """Log a warning, the first of its kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logging.getLogger("hasten.engine").warning("the prefix cache on disk: %s", text)


def _fault(file: FileIO, key: bytes, block: memoryview) -> str | None:
    """Read a block from an open file; what is wrong with the file, or None."""
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode):
        return "is not a regular file"
    if state.st_size != HEADER_BYTES + block.nbytes:
        return f"has {state.st_size:,} bytes instead of {HEADER_BYTES + block.nbytes:,}"
    header = memoryview(bytearray(HEADER_BYTES))
    if not (_read_all(file, header) and _read_all(file, block)):
        return "is shorter than it was"
    head, checksum = bytes(header[: _HEADER.size]), _CHECKSUM.unpack(header[_HEADER.size :])[0]
    if head != _HEADER.pack(_MAGIC, VERSION, key, block.nbytes):
        return "is of another format, or holds another block"
    return None if zlib.crc32(block, zlib.crc32(head)) == checksum else "is damaged (its checksum differs)"


def _read_all(file: FileIO, into: memoryview) -> bool:
    """Fill `into` from a file; False where the file ends before."""
    at = 0
    while at < into.nbytes:
        if not (count := file.readinto(into[at:])):
            return False
        at += count
    return True


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest[file.write(rest) :]


def _private(path: str, flags: int) -> int:
    """Open a file that its owner alone may read."""
    return os.open(path, flags, 0o600)


def _cautious(path: str, flags: int) -> int:
    """Open a file that anybody may have put there: a pipe does not block, and a link is not followed."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))


def _secret_of(folder: Path) -> bytes:
    """The folder's secret, made when it is first used. Raises ResourceError for one that is damaged, and OSError."""
    path = folder / "secret"
    with locked(folder / "lock", waiting=""):
        if not path.exists():
            with replacing(path) as temporary, open(temporary, "wb", opener=_private) as file:
                file.write(secrets.token_bytes(_SECRET_BYTES))
        with open(path, "rb", opener=_cautious, buffering=0) as file:
            secret = file.read(_SECRET_BYTES + 1) or b""  # None of a pipe
    if len(secret) != _SECRET_BYTES:
        raise ResourceError(
            f"{path} should hold {_SECRET_BYTES} bytes and does not: the folder is of something else, or damaged; "
            "name another one, or remove it"
        )
    return secret


def _folders(folder: Path) -> Iterator[Path]:
    for item in _scan(folder):
        if _FOLDER.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
            yield Path(item.path)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
