"""Digest of the weights by content: over every byte of the mapped files, regardless of their names.

Reading gigabytes twice is expensive, so a file's digest is cached in a private folder of this user, with the facts that
identify the file's state: device, inode, size, mtime and ctime. ctime cannot be set back, so a file that was changed in place
is detected even if its mtime was restored. Threads compute the digest during loading, from the same mapped pages.

Of several ranks, the first computes the digest; the others take it if they have mapped the same files in the same state.

    file = BLAKE2b over (size, BLAKE2b of each chunk)        weights = BLAKE2b over the sorted digests of their files
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from baton.errors import EngineError, ModelFileBroken
from baton.models.files import MappedFile
from baton.native.build_cache import open_folder, user_cache
from baton.worker.collective.base import Collective

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
DIGEST_BYTES = 32
FORMAT = b"baton weights 1"
ENTRIES_MAX = 512
"""Maximum of cached digests; the oldest are removed."""
RECENT_SECONDS = 2.0
"""Seconds in which a changed file may change again without a visible change of its times: file systems have coarse clocks."""


@dataclass(frozen=True, slots=True)
class Digest:
    value: bytes
    seconds: float
    "Seconds spent. About 0 if all digests were cached."
    read_bytes: int
    "Bytes read: 0 if all digests were cached."


class DigestInProgress:
    """A context manager: at its end its threads are stopped."""

    def __init__(
        self, files: Sequence[MappedFile], threads: int, folder: Path | None = None, collective: Collective | None = None
    ) -> None:
        """`collective`: of ranks that all make this call and then call result()."""
        self._files = files
        self._collective = collective
        self._computes = collective is None or _differs_from_first(files, collective) or collective.rank == 0
        self._store = DigestStore(folder)
        self._begun = time.perf_counter()
        self._ended = self._begun
        self._pool = ThreadPoolExecutor(max(1, threads), "weights-digest")
        computed = files if self._computes else ()
        self._kept = [self._store.find(file) for file in computed]
        self._chunks = [[] if kept else self._begin(file) for file, kept in zip(computed, self._kept, strict=True)]

    def _begin(self, file: MappedFile) -> list[Future[bytes]]:
        return [self._pool.submit(self._chunk, file, at) for at in range(0, len(file.buffer), CHUNK_BYTES)]

    def _chunk(self, file: MappedFile, at: int) -> bytes:
        with memoryview(file.buffer) as view, view[at : at + CHUNK_BYTES] as part:
            digest = _hash(part)
        self._ended = time.perf_counter()
        return digest

    def __enter__(self) -> DigestInProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def result(self) -> Digest:
        """The digest. Must be called after the weights are loaded. Raises ModelFileBroken if a file has changed: the loaded
        content is unknown."""
        computed, read = self._computed() if self._computes else (bytes(DIGEST_BYTES), 0)
        for file in self._files:
            if _changed(file):
                raise ModelFileBroken(f"{file.path}: it was changed while it was loaded; start again")
        of_first = computed if self._collective is None else self._collective.notes(computed)[0]
        return Digest(computed if self._computes else of_first, self._ended - self._begun, read)

    def _computed(self) -> tuple[bytes, int]:
        """The digest of all files, and the bytes that were read for it."""
        found: list[bytes] = []
        read = 0
        for file, kept, chunks in zip(self._files, self._kept, self._chunks, strict=True):
            digest = kept or _hash(FORMAT, len(file.buffer).to_bytes(8, "little"), *(chunk.result() for chunk in chunks))
            if not kept:
                read += len(file.buffer)
                if not _changed(file):
                    self._store.keep(file, digest)
            found.append(digest)
        return _hash(FORMAT, *sorted(found)), read


def _hash(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _changed(file: MappedFile) -> bool:
    """Whether the file was changed in place. A file replaced by another one is still mapped unchanged."""
    try:
        now = os.stat(file.path)
    except OSError:
        return False
    return now.st_ino == file.stat.st_ino and now.st_dev == file.stat.st_dev and _state(now) != _state(file.stat)


def _differs_from_first(files: Sequence[MappedFile], collective: Collective) -> bool:
    """Whether this rank has mapped other files than rank 0, or the same ones in another state."""
    states = [f"{file.stat.st_dev} {file.stat.st_ino} {_state(file.stat)}\n".encode() for file in files]
    state = _hash(FORMAT, *states)
    return collective.notes(state)[0] != state


def _state(stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


class DigestStore:
    """Stored digests: one small file per inode, with the digested state. Without a private folder nothing is cached."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder: Path | None = None
        try:
            folder = folder or user_cache("digests")
            open_folder(folder)
            self._folder = folder
        except (OSError, RuntimeError, EngineError) as error:
            log.warning("digests of weights are not kept, every start reads the weights once more: %s", error)

    def find(self, file: MappedFile) -> bytes | None:
        with suppress(OSError, ValueError):
            if self._folder is not None:
                entry = self._entry(self._folder, file)
                state, digest = entry.read_text().splitlines()
                if state == _state(file.stat) and len(found := bytes.fromhex(digest)) == DIGEST_BYTES:
                    os.utime(entry)
                    return found
        return None

    def keep(self, file: MappedFile, digest: bytes) -> None:
        recent = time.time() - max(file.stat.st_ctime, file.stat.st_mtime) < RECENT_SECONDS
        if self._folder is None or recent:
            return
        with suppress(OSError):  # writing fails on a full disk or in a read-only folder
            entry = self._entry(self._folder, file)
            written = entry.with_suffix(f".{os.getpid()}")
            written.write_text(f"{_state(file.stat)}\n{digest.hex()}\n")
            written.replace(entry)
            self._tidy(self._folder)

    @staticmethod
    def _entry(folder: Path, file: MappedFile) -> Path:
        return folder / f"{file.stat.st_dev:x}-{file.stat.st_ino:x}"

    @staticmethod
    def _tidy(folder: Path) -> None:
        entries = list(folder.iterdir())
        if len(entries) > ENTRIES_MAX:
            for entry in sorted(entries, key=lambda path: path.stat().st_mtime)[:-ENTRIES_MAX]:
                entry.unlink()
