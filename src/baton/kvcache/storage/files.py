"""The file backend: one file per object in a directory that several engines may share.

Writing: to a temporary name, then renamed, so that a name always stands for a complete file. Nothing is synced: after a power
failure a file may be torn, and the checksum detects that. Reading: one `preadv` into header and block. From the first file that
is not in memory, those of the next blocks are opened and requested ahead (`WILLNEED`): the disk works while one is verified.

A damaged file is removed. Any process may remove any file at any time: that is a miss.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import time

from baton.errors import InvalidConfig, StorageFailed, StorageReason
from baton.kvcache.storage.backend import Deadline, LayoutName, StorageBackend
from baton.kvcache.storage.counters import Counters
from baton.kvcache.storage.file_names import SUFFIX, folder_name
from baton.kvcache.storage.object import HEADER_BYTES, fault_of, seal
from baton.kvcache.storage.quota import Quota
from baton.kvcache.storage.url import StorageURL

QUOTA_GIB = 10.0
FILES_AHEAD = 16
"""Number of files that are open and requested while one is read."""
TOUCH_SECONDS = 60.0
"""Precision in seconds of a file's time of last use; renewing it on every read would write an inode per hit."""
TOUCHED_MAX = 65_536
OBJECTS_FREED = 8
"""Minimum of objects freed when the disk is full."""

READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a foreign FIFO must not block us
NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)  # Linux: only what is in memory; elsewhere nothing counts as cold
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

REASONS: dict[int, StorageReason] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "full"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "denied"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE), "gone"),
    **dict.fromkeys((errno.ETIMEDOUT, errno.EAGAIN), "timeout"),
}
NO_OBJECT = (errno.ENOENT, errno.EISDIR, errno.ESPIPE, errno.ELOOP, errno.EINVAL, errno.ENXIO)
"""Error numbers of open or read for a missing file, or for anything but a regular file."""

logger = logging.getLogger("baton.cache")

MARK = ".baton-kv"


def open_files(url: StorageURL, layout: LayoutName) -> StorageBackend:
    root, quota_bytes = file_settings(url)
    return FileBackend(root, layout, quota_bytes)


def file_settings(url: StorageURL) -> tuple[Path, int]:
    """Directory and quota in bytes. Nothing is opened."""
    url.allow("quota_gib")
    return directory_of(url), int(url.number("quota_gib", QUOTA_GIB, 1e-6, 1e9) * 2**30)


def directory_of(url: StorageURL) -> Path:
    if url.host:
        raise InvalidConfig(f"file://{url.host}{url.path} names a host; write file:DIR or file:///DIR")
    if not url.path:
        raise InvalidConfig("file: names no directory; write file:DIR, for example file:/var/cache/baton")
    return Path(url.path).expanduser().absolute()


class FileBackend:
    wants_tokens = False

    def __init__(self, root: Path, layout: LayoutName, quota_bytes: int = int(QUOTA_GIB * 2**30)) -> None:
        self.root, self.layout = str(root), layout
        self.object_bytes = HEADER_BYTES + layout.block_bytes
        if quota_bytes < 2 * self.object_bytes:
            raise InvalidConfig(
                f"a quota of {quota_bytes} bytes holds no two objects of {self.object_bytes}; raise quota_gib of file:{root}"
            )
        try:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(f"the KV storage directory {root} cannot be made: {error.strerror}; name another one")
        self._warn_of_writers()
        self._marked = self._mark()
        self._counters = Counters()
        self._quota = Quota(self.root, quota_bytes, self.object_bytes, self._count_evicted)
        self._suffix = layout.object_name(b"") + SUFFIX
        self._touched: dict[bytes, float] = {}
        "Time at which this process last checked an object's time of last use, by object."
        self._writer, self._numbers = os.urandom(6).hex(), count()  # names of temporary files, unique also between machines

    def identify(self, identity: bytes) -> None:
        self.layout = replace(self.layout, identity=identity)
        self._suffix = self.layout.object_name(b"") + SUFFIX

    def _warn_of_writers(self) -> None:
        """Warn if others may write to the directory: they can change answers, since a checksum is no signature
        (docs/security.md)."""
        with suppress(OSError):
            found = os.stat(self.root)
            others = "all users" if found.st_mode & 0o002 else "its group" if found.st_mode & 0o020 else ""
            if others:
                logger.warning("%s may write to the KV storage %s, and so can change answers: chmod go-w", others, self.root)

    def _mark(self) -> bool:
        """Create the file that distinguishes this directory from the mount point of an unmounted disk. False: it is
        read-only."""
        try:
            os.close(os.open(f"{self.root}/{MARK}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        except OSError:
            return False
        return True

    def contains_prefix(self, keys: Sequence[bytes], deadline: Deadline, tokens: Sequence[int] | None = None) -> int:
        for place, key in enumerate(keys):
            if place % 64 == 0 and deadline.passed():
                raise StorageFailed("timeout", f"looking into {self.root} took too long", place)
            try:
                if os.stat(self.path_of(key), follow_symlinks=False).st_size != self.object_bytes:
                    return place
            except OSError as error:
                if error.errno in NO_OBJECT:
                    return place
                raise self._failed(error, place)
        return len(keys)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        reading = _FileRead(self, keys)
        try:
            for key, block in zip(keys, into, strict=True):
                if deadline.passed():
                    raise StorageFailed("timeout", f"reading {self.root} took too long", reading.done)
                if not self._read(reading, key, block):
                    break
                reading.done += 1
        except OSError as error:
            raise self._failed(error, reading.done)
        finally:
            reading.close()
            self._counters.add("hits", reading.done)
            self._counters.add("misses", len(keys) - reading.done)
            self._counters.add("bytes_read", reading.done * self.object_bytes)
        return reading.done

    def _read(self, reading: _FileRead, key: bytes, block: memoryview) -> bool:
        """Read one object. True: the block is in place, complete and verified. A damaged file is removed."""
        descriptor = reading.next_file()
        if descriptor is None:
            return False
        try:
            nbytes = reading.read(descriptor, block)
            if nbytes == HEADER_BYTES + block.nbytes and not fault_of(reading.header, key, self.layout, block):
                self._touch(key, descriptor)
                return True
            self._remove_damaged(key)
            return False
        except OSError as error:
            self._remove_damaged(key)
            if error.errno in NO_OBJECT:
                return False
            raise
        finally:
            os.close(descriptor)

    def _remove_damaged(self, key: bytes) -> None:
        """Remove a damaged file. If another engine has just rewritten it, a good file is lost: one more miss."""
        self._counters.add("corrupt")
        with suppress(OSError):
            os.unlink(self.path_of(key))

    def _touch(self, key: bytes, file: int | str) -> None:
        """Renew the file's time of last use."""
        now = time()
        if now - self._touched.get(key, 0.0) < TOUCH_SECONDS:
            return
        if len(self._touched) >= TOUCHED_MAX:
            self._touched.clear()
        self._touched[key] = now
        with suppress(OSError):  # a read-only directory serves hits too
            if now - os.stat(file).st_mtime > TOUCH_SECONDS:
                os.utime(file)

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        done = 0
        for key, block in zip(keys, blocks, strict=True):
            if deadline.passed():
                raise StorageFailed("timeout", f"writing to {self.root} took too long", done)
            try:
                self._put_one(key, block)
            except OSError as error:
                if REASONS.get(error.errno or 0) == "full":
                    with suppress(OSError):
                        self._quota.evict(key[0], OBJECTS_FREED * self.object_bytes)
                raise self._failed(error, done)
            done += 1
        return done

    def _put_one(self, key: bytes, block: memoryview) -> None:
        """Write one object under a temporary name and rename it. An object of the right size only gets a new time of last
        use."""
        path = self.path_of(key)
        with suppress(FileNotFoundError):
            if os.stat(path, follow_symlinks=False).st_size == self.object_bytes:
                self._touch(key, path)
                self._counters.add("present")
                return
        self._quota.make_room(key[0], self.object_bytes)
        folder = f"{self.root}/{folder_name(key[0])}"
        temporary = f"{folder}/.{self._writer}-{next(self._numbers)}.tmp"
        try:
            self._write(temporary, folder, [seal(key, self.layout, block), block])
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._counters.add("stored")
        self._counters.add("bytes_written", self.object_bytes)

    def _write(self, path: str, folder: str, parts: list[bytes | memoryview]) -> None:
        try:
            descriptor = os.open(path, WRITE_FLAGS, 0o600)
        except FileNotFoundError:
            # Create only this folder, and only if the mark exists: an unmounted disk leaves the mount point, or nothing.
            if self._marked:
                os.stat(f"{self.root}/{MARK}")
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            descriptor = os.open(path, WRITE_FLAGS, 0o600)
        try:
            if os.pwritev(descriptor, parts, 0) != self.object_bytes:
                raise OSError(errno.ENOSPC, "the file could only be written in part", path)
        finally:
            os.close(descriptor)

    def path_of(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.root}/{name[:2]}/{name}{self._suffix}"

    def _failed(self, error: OSError, done: int) -> StorageFailed:
        reason = REASONS.get(error.errno or 0, "io")
        return StorageFailed(reason, f"KV storage {self.root}: {error.strerror or error}", done)

    def _count_evicted(self, objects: int, nbytes: int) -> None:
        self._counters.add("evicted", objects)
        self._counters.add("bytes_evicted", nbytes)

    def counters(self) -> dict[str, int]:
        return self._counters.totals()

    def close(self) -> None:
        """Nothing to close: no file is open between calls."""


class _FileRead:
    """The files of one `get`. While they are in memory, one is open at a time; from the first that is not, the next ones are
    requested from the disk too."""

    __slots__ = ("_backend", "_cold", "_keys", "_opened", "_opened_upto", "done", "header")

    def __init__(self, backend: FileBackend, keys: Sequence[bytes]) -> None:
        self._backend, self._keys = backend, keys
        self._opened: deque[int] = deque()
        self._opened_upto = 0
        self._cold = False
        self.header = bytearray(HEADER_BYTES)
        self.done = 0

    def next_file(self) -> int | None:
        """The descriptor of the next file, closed by the caller; None if there is no such file."""
        if not self._opened:
            self._open(1)
        return self._opened.popleft() if self._opened else None

    def read(self, descriptor: int, block: memoryview) -> int:
        """Fill header and block. Returns the number of bytes read."""
        parts: list[bytearray | memoryview] = [self.header, block]
        whole = HEADER_BYTES + block.nbytes
        if not self._cold:
            try:
                if os.preadv(descriptor, parts, 0, NOWAIT) == whole:
                    return whole
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                    raise
            self._cold = True
        with suppress(OSError):  # a later file's error is raised at its turn: the present file is complete
            self._open(FILES_AHEAD)
        return os.preadv(descriptor, parts, 0)

    def _open(self, count: int) -> None:
        """Open files until `count` are open, or one is missing."""
        while len(self._opened) < count and self._opened_upto < len(self._keys):
            try:
                descriptor = os.open(self._backend.path_of(self._keys[self._opened_upto]), READ_FLAGS)
            except OSError as error:
                if error.errno in NO_OBJECT:
                    self._keys = self._keys[: self._opened_upto]  # the run ends here
                    return
                raise
            self._opened.append(descriptor)
            self._opened_upto += 1
            if self._cold:
                with suppress(OSError):  # only advice, and not supported for every file
                    os.posix_fadvise(descriptor, 0, self._backend.object_bytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)
