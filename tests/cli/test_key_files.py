"""Keys from files. A file without keys must never start a server that needs none."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.key_files import with_key_files
from baton.cli.say import Failed
from baton.config import ServeConfig, shown
from baton.errors import InvalidConfig


def config(tmp_path: Path, content: str | bytes, **more) -> ServeConfig:
    (tmp_path / "keys").write_bytes(content if isinstance(content, bytes) else content.encode())
    return ServeConfig(api_key_file=str(tmp_path / "keys"), **more)


def test_keys_of_a_file_are_beside_the_others(tmp_path: Path):
    read = with_key_files(config(tmp_path, "# for the web app\nfirst\n\n  second  \nfirst\n", api_key=("given",)))
    assert read.api_key == ("given", "first", "second")
    assert shown(read)["api_key"] == 3
    assert "first" not in str(shown(read))


def test_admin_keys_too(tmp_path: Path):
    (tmp_path / "admin").write_text("root-key")
    read = with_key_files(ServeConfig(admin_api_key_file=str(tmp_path / "admin")))
    assert read.admin_api_key == ("root-key",)


@pytest.mark.parametrize("content", ["", "\n\n", "# nothing\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: str):
    with pytest.raises(Failed, match="holds no key"):
        with_key_files(config(tmp_path, content))


def test_what_cannot_be_read_is_refused_without_being_repeated(tmp_path: Path):
    with pytest.raises(Failed, match=r"--api-key-file .*: cannot be read"):
        with_key_files(ServeConfig(api_key_file=str(tmp_path / "not-there")))
    with pytest.raises(Failed, match="line 2 is no key") as wrong:
        with_key_files(config(tmp_path, "good\nwith space\n"))
    assert "with space" not in str(wrong.value)
    with pytest.raises(Failed, match="not ASCII"):
        with_key_files(config(tmp_path, b"\xff\xfe"))


def test_a_key_of_both_files_is_refused(tmp_path: Path):
    (tmp_path / "admin").write_text("same")
    with pytest.raises(InvalidConfig, match="admin_api_key has a key that is an api_key too"):
        with_key_files(config(tmp_path, "same", admin_api_key_file=str(tmp_path / "admin")))
