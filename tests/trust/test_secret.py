"""The cluster's secret is in a file that nobody else can read, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.errors import InvalidConfig
from baton.trust.secret import Secret, access_fault, create_secret, read_secrets


def test_a_secret_is_made_once_and_read_back(tmp_path: Path):
    old = os.umask(0)
    try:
        made = create_secret(tmp_path / "secret")
    finally:
        os.umask(old)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert read_secrets(tmp_path / "secret").secrets[0].key == made.key
    assert len(made.key) == 64
    with pytest.raises(FileExistsError):
        create_secret(tmp_path / "secret")
    assert create_secret(tmp_path / "other").key != made.key


def test_a_strange_umask_leaves_a_secret_that_its_owner_can_read(tmp_path: Path):
    old = os.umask(0o777)
    try:
        create_secret(tmp_path / "secret")
    finally:
        os.umask(old)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_one_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int):
    create_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        read_secrets(tmp_path / "secret")


ROOT, US, OTHER, OUR_GROUP, OTHER_GROUP = 0, 1000, 1001, 2000, 2001


@pytest.mark.parametrize(
    ("mode", "owner", "group", "fault"),
    [
        (0o400, US, OTHER_GROUP, ""),
        (0o600, US, OUR_GROUP, ""),
        (0o600, ROOT, OTHER_GROUP, ""),
        (0o440, ROOT, OUR_GROUP, ""),  # a Kubernetes secret with fsGroup
        (0o640, ROOT, OUR_GROUP, ""),
        (0o440, ROOT, OTHER_GROUP, "others may read or write it (mode 0440); do: chmod 600"),
        (0o444, ROOT, OUR_GROUP, "others may read or write it (mode 0444); do: chmod 640"),
        (0o460, ROOT, OUR_GROUP, "others may read or write it (mode 0460); do: chmod 640"),
        (0o450, ROOT, OUR_GROUP, "others may read or write it (mode 0450); do: chmod 640"),
        (0o640, US, OUR_GROUP, "others may read or write it (mode 0640); do: chmod 600"),
        (0o640, OTHER, OUR_GROUP, "others may read or write it (mode 0640); do: chmod 600"),
        (0o600, OTHER, OUR_GROUP, "belongs to another user (uid 1001)"),
    ],
)
def test_the_group_may_read_a_file_of_root_and_nobody_else_any(mode: int, owner: int, group: int, fault: str):
    status = os.stat_result((0o100000 | mode, 1, 1, 1, owner, group, 64, 0, 0, 0))
    assert access_fault(status, US, {OUR_GROUP}).removesuffix(" {path}") == fault


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to a group")
def test_a_secret_as_kubernetes_mounts_it_is_read_by_a_process_of_the_group():
    program = "import os, sys; from baton.trust.secret import read_secrets; "
    program += f"os.setgroups([{OUR_GROUP}]); os.setgid({US}); os.setuid({US}); "
    program += "print(read_secrets(sys.argv[1]).secrets[0].key.decode())"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path, link = Path(folder, "..data"), Path(folder, "secret")  # a mounted secret is a link
        key = create_secret(path).key
        os.chown(path, ROOT, OUR_GROUP)
        path.chmod(0o440)
        link.symlink_to(path)
        done = subprocess.run([sys.executable, "-c", program, str(link)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (key.decode(), "")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 31 + b"\n" * 9, b"x" * 5000])
def test_one_that_is_too_short_or_no_secret_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(InvalidConfig, match="32 to 4096 are wanted"):
        read_secrets(path)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "nothing", "a\0b"):
        with pytest.raises(InvalidConfig, match="cluster secret"):
            read_secrets(place)


def test_no_message_shows_it():
    assert "sss" not in f"{Secret(b's' * 32)!r} {Secret(b's' * 32)}"
