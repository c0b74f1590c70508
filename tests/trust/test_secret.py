"""The cluster's secret is in a file that nobody else can read, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.errors import InvalidConfig
from baton.trust.secret import Secret, create_secret, read_secret


def test_a_secret_is_made_once_and_read_back(tmp_path: Path):
    old = os.umask(0)
    try:
        made = create_secret(tmp_path / "secret")
    finally:
        os.umask(old)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert read_secret(tmp_path / "secret").key == made.key
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


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_one_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int):
    create_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        read_secret(tmp_path / "secret")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 31 + b"\n" * 9, b"x" * 5000])
def test_one_that_is_too_short_or_no_secret_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(InvalidConfig, match="32 to 4096 are wanted"):
        read_secret(path)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "nothing", "a\0b"):
        with pytest.raises(InvalidConfig, match="cluster secret"):
            read_secret(place)


def test_no_message_shows_it():
    assert "sss" not in f"{Secret(b's' * 32)!r} {Secret(b's' * 32)}"
