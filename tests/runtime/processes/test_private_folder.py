"""Directories for sockets: private, removed at the end, and by the next one if their owner was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.runtime.processes import private_folder
from baton.runtime.processes.private_folder import PREFIX, PrivateFolder, usual_parent

OWNER = """
import socket, sys
from pathlib import Path
from baton.runtime.processes.private_folder import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1]))
socket.socket(socket.AF_UNIX).bind(str(folder.path / "peer.sock"))
print(folder.path, flush=True)
sys.stdin.read()
"""


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=20)


def test_it_is_private_and_removed_with_what_is_in_it(tmp_path: Path):
    folder = PrivateFolder(tmp_path)
    assert folder.path.parent == tmp_path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder.path / "peer.sock"))
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_nobody_finds_it_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever did would take it for abandoned, and remove it."""
    lock, found = private_folder.fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        found.append(list(tmp_path.glob(f"{PREFIX}*")))
        lock(fd, how)

    monkeypatch.setattr(private_folder.fcntl, "flock", flock)
    folder = PrivateFolder(tmp_path)
    assert found == [[]]
    folder.remove()


def test_one_whose_owner_was_killed_is_removed_by_the_next_and_one_in_use_is_not(tmp_path: Path):
    dead, of_dead = owner(tmp_path)
    living, of_living = owner(tmp_path)
    dead.send_signal(signal.SIGKILL)
    end(dead)
    assert of_dead.is_dir()
    folder = PrivateFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([of_living, folder.path])
    assert (of_living / "peer.sock").is_socket()
    end(living)
    folder.remove()


def test_what_is_not_ours_stays(tmp_path: Path):
    """Files of somebody else, links, directories with something in them."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "dear.sock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}full").mkdir()
    (tmp_path / f"{PREFIX}full" / "letters").touch()
    before = sorted(tmp_path.rglob("*"))
    folder = PrivateFolder(tmp_path)
    folder.remove()
    assert sorted(tmp_path.rglob("*")) == before


def test_its_name_is_short_enough_for_a_socket(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(private_folder.tempfile, "gettempdir", lambda: "/long" * 30)
    assert usual_parent() == Path("/tmp")
    monkeypatch.setattr(private_folder.tempfile, "gettempdir", lambda: "/short")
    assert usual_parent() == Path("/short")
    folder = PrivateFolder(Path("/tmp"))
    assert len(os.fsencode(folder.path / "peer.sock")) <= 107
    folder.remove()


def test_one_whose_owner_was_killed_before_it_was_locked_is_removed_later(tmp_path: Path):
    new, old = tmp_path / f".{PREFIX}new", tmp_path / f".{PREFIX}old"
    for path in (new, old):
        path.mkdir(0o700)
    os.utime(old, (1.0, 1.0))
    PrivateFolder(tmp_path).remove()
    assert list(tmp_path.iterdir()) == [new], "somebody may be about to lock it"
