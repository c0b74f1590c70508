"""What people type first and wrongly: each is answered in one line that says what to do. Names of options are in
test_familiar.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from command_rig import baton, baton_here
from fake_hub import fake_hub

from baton.models.missing_traits import missing_traits


def only_line(*arguments: str | Path, stdin: str = "", **environment: str) -> str:
    """The one line that the command says before it ends with an error."""
    ran = (baton if environment else baton_here)(*arguments, stdin=stdin, **environment)  # libraries read it when imported
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1, ran.stderr
    return ran.stderr.strip()


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        *(("serve", "Gemma2ForCausalLM"), ("run", "MambaForCausalLM"), ("chat", "MPNetModel"), ("up", "Gemma2ForCausalLM")),
        *(pytest.param(verb, "MPNetModel", marks=pytest.mark.slow) for verb in ("serve", "run", "up")),
    ],
)
def test_a_folder_of_another_architecture_without_a_tokenizer(tmp_path, verb, name):
    """Not "has no tokenizer.json": converting that would be in vain."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    more = {"run": ["Hello"], "chat": []}.get(verb, ["--port", "0"])
    ran = baton_here(verb, tmp_path, *more)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    lacks = missing_traits(name)
    supported = f"{f' (Baton lacks {lacks})' if lacks else ''}; supported are LlamaForCausalLM, "
    assert last.startswith(f"baton {verb}: {tmp_path / 'config.json'}: architecture {name} is not supported{supported}")
    assert "tokenizer" not in ran.stderr


def test_a_folder_without_a_tokenizer(tiny_model, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(tiny_model, folder)
    (folder / "tokenizer.json").unlink()
    ran = baton("serve", folder, "--port", "0", "--log-level", "error")
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"baton serve: {folder}")
    assert "tokenizer.json" in last


def test_a_model_of_the_hub_that_cannot_run(tmp_path):
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    with fake_hub() as hub:
        config = b'{"architectures": ["Gemma2ForCausalLM"]}'
        hub.add("google/gemma", {"config.json": config, "model.safetensors": bytes(1 << 20), "tokenizer.json": b"{}"})
        said = only_line("serve", "google/gemma", "--port", "0", HF_ENDPOINT=hub.url, HF_HUB_CACHE=str(tmp_path))
    assert "google/gemma: config.json: architecture Gemma2ForCausalLM is not supported" in said
    assert said.endswith("Its weights were not downloaded")
    assert hub.sent == ["config.json"]


@pytest.fixture(params=[200, 403, 404, 500])
def web_page(request) -> Iterator[str]:
    """A server of something else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = b"<!DOCTYPE html><html><body>Something else</body></html>" * 30
            self.send_response(request.param)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("command", ["chat", "ps"])
def test_an_address_of_something_else(web_page, command):
    said = only_line(command, "--url", web_page)
    assert web_page in said
    assert "no OpenAI-style server" in said or "no Baton server" in said
    assert "<" not in said


TYPED = {
    "true as the model": (
        ["serve", "true"],
        "true: a flag takes no value; write --NAME to switch it on",
    ),
    "no such model": (["serve", "smolm2"], "smolm2: no such model; did you mean smollm2? Else give a folder"),
    "no model at all": (["serve", ""], "--model is empty"),
    "no prompt": (["run", "smollm2"], "no prompt; write one after the model, or give --file"),
    "nobody generates": (
        ["up", "--prefill", "1"],
        "--decode is 0, and so is mixed: no instance would generate",
    ),
    "two models": (["chat", "one", "--model", "two"], "two models: one and --model two; give one of them"),
    "no server": (["chat", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
    "no address": (["chat", "--url", "localhost"], "localhost: not an address; write http://HOST:PORT"),
}


@pytest.mark.parametrize("mistake", TYPED)
def test_typed(mistake):
    typed, words = TYPED[mistake]
    assert only_line(*typed).startswith(f"baton {typed[0]}: {words}")


MISUSED = {
    "an empty variable": (["serve", "--api-key", "--port", "0"], "--api-key needs a value, and --port follows"),
    "an empty variable before a flag": (
        ["serve", "smollm2", "--port", "99999", "--api-key", "--quiet"],
        "write --api-key=--quiet",
    ),
    "a short option": (["serve", "-m", "--port", "0"], "-m needs a value, and --port follows. Is a variable empty?"),
    "a number with a unit": (["serve", "--max-model-len", "8k"], "'--max-model-len': it must be a whole number in digits"),
    "a word as a number": (["run", "smollm2", "Hi", "--temperature", "x"], "'--temperature': it must be a number in digits"),
}


@pytest.mark.parametrize("mistake", MISUSED)
def test_typed_against_usage(mistake):
    typed, words = MISUSED[mistake]
    ran = baton_here(*typed)
    assert ran.returncode == 2
    assert words in ran.stderr
    assert "pars" not in ran.stderr


def test_a_value_that_looks_like_an_option_may_be_meant():
    assert only_line("serve", "--api-key=--port", "--port", "99999").startswith("baton serve: --port is 99999")
