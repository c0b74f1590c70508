"""aider, Continue, Open WebUI and Zed against a scripted model behind the real front.

data/*.json    requests of each program, recorded from a run and shortened: in `make test`
Zed            cannot run here. Its requests, and the way it reads the answers, are written below from its public source
               (version 1.18.0: crates/open_ai, crates/ollama, crates/language_models)
the programs   themselves, from PyPI and npm, as docs/clients.md configures them: in `make chaos`
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_rig import LARGE, PROGRAMS, QUESTION, SECRET, from_npm, from_pip, run, steps, tool_results
from api_fakes import Script, Serving, eventually, says, serving
from chromium import Browser, chromium_path
from client_pages import address_in, configurations, configured, exported
from tool_rig import QWEN, call, events_of, prompt_of, with_template

AIDER, CONTINUE, OPEN_WEBUI = "aider-chat==0.86.2", "@continuedev/cli@1.5.47", "open-webui==0.12.4"
DATA = Path(__file__).parent / "data"
AIDER_REQUESTS = json.loads((DATA / "aider_0.86.2.json").read_text())
OPEN_WEBUI_REQUESTS = json.loads((DATA / "open_webui_0.12.4.json").read_text())
CONTINUE_REQUESTS = json.loads((DATA / "continue_cli_1.5.47.json").read_text())
EDIT = "<think>\nHm.\n</think>\n\nI change the word.\n\nnotes.txt\n```\nthe secret word is heron\n```\n"
COMMIT = "docs: another secret word"


@pytest.fixture(scope="module")
def shared_server(text):
    with serving(with_template(text, QWEN), model=LARGE) as server:
        yield server


def replayed(http, server, recorded: dict[str, Any]):
    """The answer to a recorded request, which must be taken whole: nothing refused and nothing ignored."""
    answer = http.request(recorded["method"], server.url + recorded["path"], json=recorded["body"], headers=recorded["headers"])
    assert answer.status_code == 200, answer.text
    assert "x-baton-ignored" not in answer.headers
    return answer


def deltas_of(answer) -> list[dict[str, Any]]:
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


# aider


def edits_and_commits(text):
    """A model that rewrites the file, and has a message for the commit."""
    edit, commit = says(text, EDIT), says(text, COMMIT)

    def reply(request, index):
        prompt = text.tokenizer.decode(request.prompt, skip_special_tokens=False)
        return (commit if "commit message" in prompt else edit)(request, index)

    return reply


def test_aider_as_an_openai_client(server, text, http):
    server.engine.script = Script(reply=edits_and_commits(text))
    edit, commit = (recorded for recorded in AIDER_REQUESTS if recorded["path"].startswith("/v1"))
    settings = yaml.safe_load(configurations("aider")[0])
    assert edit["path"] == address_in(settings["openai-api-base"]) + "/chat/completions"
    assert edit["body"]["model"] == settings["model"].removeprefix("openai/").replace("NAME", "smol")
    deltas = deltas_of(replayed(http, server, edit))
    assert "".join(delta.get("content") or "" for delta in deltas) == EDIT.partition("</think>\n\n")[2]
    assert replayed(http, server, commit).json()["choices"][0]["message"]["content"] == COMMIT


def test_aider_as_an_ollama_client_learns_the_context_length(server, text, http):
    server.engine.script = Script(reply=edits_and_commits(text))
    show, edit, commit = (recorded for recorded in AIDER_REQUESTS if recorded["path"].startswith("/api"))
    shown = replayed(http, server, show).json()
    assert [value for key, value in shown["model_info"].items() if "context_length" in key] == [LARGE.context_tokens]
    assert "tools" in shown["template"], "litellm takes this for the model's ability to call functions"
    lines = [json.loads(line) for line in replayed(http, server, edit).text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == EDIT.partition("</think>\n\n")[2]
    assert replayed(http, server, commit).json()["message"]["content"] == COMMIT


@pytest.mark.slow
def test_aider_edits_a_file_and_commits_it(server, text, tmp_path):
    program = from_pip(AIDER, "aider")
    server.engine.script = Script(reply=edits_and_commits(text))
    work = tmp_path / "work"
    work.mkdir()
    (work / ".aider.conf.yml").write_text(configured("aider", server.url, "smol"))
    subprocess.run(["git", "init", "--quiet", str(work)], check=True)
    who = {f"GIT_{part}_{field}": "tester" for part in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [program, "--yes-always", "--no-check-update", "--analytics-disable", "--message", "Make it heron.", "notes.txt"]
    said = run(command, tmp_path, **who, **offline)
    assert "Applied edit to notes.txt" in said
    assert (work / "notes.txt").read_text() == "the secret word is heron\n"
    log = subprocess.run(["git", "-C", str(work), "log", "--format=%s"], capture_output=True, text=True, check=True)
    assert COMMIT in log.stdout


# Continue


def test_continue_runs_a_tool_loop(server, text, http):
    server.engine.script = Script(reply=steps(text, call("Read", filepath="notes.txt")))
    [model] = yaml.safe_load(configurations("Continue")[0])["models"]
    first, second = CONTINUE_REQUESTS
    assert first["path"] == address_in(model["apiBase"]) + "/chat/completions"
    assert first["body"]["max_tokens"] == model["defaultCompletionOptions"]["maxTokens"]
    assert first["body"]["stream_options"] == {"include_usage": True}
    deltas = deltas_of(replayed(http, server, first))
    calls = [each for delta in deltas for each in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "Read"
    assert json.loads("".join(each["function"]["arguments"] for each in calls)) == {"filepath": "notes.txt"}
    answer = replayed(http, server, second)
    assert "".join(delta.get("content") or "" for delta in deltas_of(answer)) == f"The secret word is {SECRET}."
    last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")][-1]
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], len(server.engine.requests[-1].prompt))


def test_continue_as_an_ollama_client_learns_the_context_length(server, http):
    """core/llm/llms/Ollama.ts asks by `name`, and reads num_ctx from the parameters; without it, it assumes 8,192."""
    shown = http.post(server.url + "/api/show", json={"name": "smol"}).json()
    parameters = dict(line.split(maxsplit=1) for line in shown["parameters"].splitlines())
    assert parameters["num_ctx"] == str(LARGE.context_tokens)
    assert {"temperature", "repeat_penalty"} <= set(parameters), "the names that Ollama has for them"
    assert "repetition_penalty" not in parameters
    assert ".Suffix" not in shown["template"], "that would say that it can fill in the middle"


def test_continue_is_configured_to_complete_through_ollama():
    """test_fill_in.py has the answers of a model that fills in the middle."""
    [model] = yaml.safe_load(configurations("Continue")[1])["models"]
    assert (model["provider"], model["roles"], address_in(model["apiBase"])) == ("ollama", ["autocomplete"], "")


@pytest.mark.slow
def test_continue_finishes_a_tool_loop(server, text, tmp_path):
    program = from_npm(CONTINUE, "cn")
    server.engine.script = Script(reply=steps(text, call("Read", filepath="notes.txt")), tokens_per_delta=4)
    config = tmp_path / "config.yaml"
    config.write_text(configured("Continue", server.url, "smol"))
    command = [program, "--config", str(config), "--allow", "Read", "-p", QUESTION]
    assert f"The secret word is {SECRET}." in run(command, tmp_path, CONTINUE_TELEMETRY_ENABLED="0")
    [found] = tool_results(server, text)
    assert f"is {SECRET}" in found


# Open WebUI

TASKS = {"title": "A secret word", "tags": ["words"], "follow_ups": ["Why?"]}
TIMESTAMP = call("get_current_timestamp")
"One of its built-in tools, which it runs itself."


def chats_and_tasks(text):
    """A model that calls a tool once in a chat, and answers the questions that Open WebUI asks about a chat with JSON."""
    chat, task = steps(text, TIMESTAMP), says(text, json.dumps(TASKS))

    def reply(request, index):
        prompt = text.tokenizer.decode(request.prompt, skip_special_tokens=False)
        return (task if "### Task:" in prompt else chat)(request, index)

    return reply


def test_open_webui_chats_and_asks_for_a_title(server, text, http):
    server.engine.script = Script(reply=chats_and_tasks(text))
    settings = exported(configurations("Open WebUI")[0])
    models, title, first, second, *tasks = OPEN_WEBUI_REQUESTS
    assert models["path"] == address_in(settings["OPENAI_API_BASE_URL"]) + "/models"
    assert replayed(http, server, models).json()["data"][0]["id"] == "smol"
    for task in (title, *tasks):
        assert json.loads(replayed(http, server, task).json()["choices"][0]["message"]["content"]) == TASKS
    deltas = deltas_of(replayed(http, server, first))
    names = [each["function"].get("name") for delta in deltas for each in delta.get("tool_calls", ())]
    assert names[0] == "get_current_timestamp"
    deltas = deltas_of(replayed(http, server, second))
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas).strip() == "It is there."
    assert "".join(delta.get("content") or "" for delta in deltas) == "The secret word is not there."


@pytest.mark.slow
def test_open_webui_shows_an_answer_that_used_a_tool(server, text, tmp_path):
    """In Chromium. The program has 3 GB, so it is run only where it is installed already."""
    program = PROGRAMS / OPEN_WEBUI.replace("==", "_") / "bin" / "open-webui"
    chromium = chromium_path()
    if not program.exists() or chromium is None:
        pytest.skip(f"needs Chromium, and {OPEN_WEBUI} in a virtual environment at {program.parents[1]}")
    server.engine.script = Script(reply=chats_and_tasks(text))
    settings = exported(configured("Open WebUI", server.url, "smol"))
    del settings["DEFAULT_MODEL_PARAMS"]  # the tools are what is tested here
    settings |= {"WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "none", "DATA_DIR": str(tmp_path), "OFFLINE_MODE": "true"}
    settings |= {"HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai", "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    port = free_port()
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(command, env=settings, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    browser = Browser(chromium)
    try:
        assert eventually(lambda: answers(f"http://127.0.0.1:{port}/health"), 300), (tmp_path / "log").read_text()[-2000:]
        browser.open(f"http://127.0.0.1:{port}/")
        browser.until("document.getElementById('chat-input') !== null")
        browser.until("document.body.innerText.includes('smol')")
        browser.evaluate("document.getElementById('chat-input').focus()")
        browser.type(QUESTION)
        assert eventually(lambda: asked(browser, server), 40), browser.evaluate("document.body.innerText")
        browser.until("document.body.innerText.includes('The secret word is not there.')")
        browser.until("document.body.innerText.includes('A secret word')")
    finally:
        browser.close()
        process.terminate()
        process.wait(30)
        log.close()


def asked(browser: Browser, server: Serving) -> bool:
    """Press Enter until the page takes it: it is shown before it is ready."""
    browser.press_enter()
    return eventually(lambda: server.engine.requests, 2.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Asked twice a second: a server that is starting needs the processor itself."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        time.sleep(0.5)
        return False


# Zed

ZED_TOOL = {
    "name": "read_file",
    "description": "Reads the content of the given file in the project.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
ZED_SYSTEM = {"role": "system", "content": "You are a highly skilled software engineer."}


def zed_chat_events(events: list[Any]) -> list[tuple[str, Any]]:
    """What OpenAiEventMapper makes of a stream. It appends `reasoning` and `reasoning_content`, whichever is there."""
    seen: list[tuple[str, Any]] = []
    calls: dict[int, dict[str, str]] = {}
    for event in events:
        if event.get("usage"):
            seen.append(("usage", (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])))
        for choice in event["choices"][:1]:
            delta = choice["delta"]
            thoughts = [delta[name] for name in ("reasoning", "reasoning_content") if delta.get(name)]
            seen += [("thinking", thought) for thought in thoughts]
            seen += [("text", delta["content"])] if delta.get("content") else []
            for part in delta.get("tool_calls") or []:
                entry = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                entry["id"] = part.get("id") or entry["id"]
                entry["name"] = part["function"].get("name") or entry["name"]
                entry["arguments"] += part["function"].get("arguments") or ""
            if choice["finish_reason"] == "tool_calls":
                seen += [("tool", entry) for entry in calls.values()]
            if choice["finish_reason"] is not None:
                seen.append(("stop", choice["finish_reason"]))
    return seen


def joined(seen: list[tuple[str, Any]], kind: str) -> str:
    return "".join(value for each, value in seen if each == kind)


def zed_chat_request(*messages: dict[str, Any]) -> dict[str, Any]:
    """into_open_ai, with the model of docs/clients.md."""
    [provider] = json.loads(configured("Zed", "", "smol", place=1))["language_models"]["openai_compatible"].values()
    [model] = provider["available_models"]
    assert provider["api_url"] == "/v1"
    return {
        "model": model["name"],
        "messages": [ZED_SYSTEM, {"role": "user", "content": QUESTION}, *messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": model["max_output_tokens"],
        "temperature": 1.0,
        "tool_choice": "auto",
        "parallel_tool_calls": model["capabilities"]["parallel_tool_calls"],
        "tools": [{"type": "function", "function": ZED_TOOL}],
    }


@pytest.mark.parametrize("cut", [1, 3, 50])
def test_zed_as_an_openai_client(server, text, http, cut):
    server.engine.script = Script(reply=steps(text, call("read_file", path="notes.txt")), tokens_per_delta=cut)
    seen = zed_chat_events(events_of(http, server.url, "/v1/chat/completions", zed_chat_request()))
    assert joined(seen, "thinking").strip() == "I need the file.", "and not every word twice"
    assert joined(seen, "text").strip() == "Let me look."
    [called] = [value for kind, value in seen if kind == "tool"]
    assert (called["name"], json.loads(called["arguments"])) == ("read_file", {"path": "notes.txt"})
    assert ("stop", "tool_calls") in seen
    assert [kind for kind, _ in seen].count("usage") == 1
    turn = {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [{"id": called["id"], "type": "function", "function": {k: called[k] for k in ("name", "arguments")}}],
        "reasoning_content": "I need the file.",
    }
    result = {"role": "tool", "content": f"the secret word is {SECRET}", "tool_call_id": called["id"]}
    seen = zed_chat_events(events_of(http, server.url, "/v1/chat/completions", zed_chat_request(turn, result)))
    assert (joined(seen, "text"), ("stop", "stop") in seen) == (f"The secret word is {SECRET}.", True)
    assert "(I need the file.)" in prompt_of(server), "the thought of the turn before"


def zed_ollama_events(lines: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """What its Ollama provider makes of a stream: of a line with calls, only the first call, and not the text."""
    seen: list[tuple[str, Any]] = []
    for line in lines:
        message = line["message"]
        assert (message["role"], isinstance(message["content"], str)) == ("assistant", True)
        seen += [("thinking", message["thinking"])] if message.get("thinking") is not None else []
        if message.get("tool_calls"):
            first = message["tool_calls"][0]
            seen.append(("tool", (first["id"], first["function"]["name"], first["function"]["arguments"])))
        elif message["content"]:
            seen.append(("text", message["content"]))
        if line["done"]:
            seen.append(("usage", (line["prompt_eval_count"], line["eval_count"])))
    return seen


def zed_ollama_model(http, url: str) -> dict[str, Any]:
    """What it learns of a model before the first chat: get_models, then show_model of each."""
    [name] = [model["name"] for model in http.get(url + "/api/tags").json()["models"] if model["name"] == "smol"]
    shown = http.post(url + "/api/show", json={"model": name}).json()
    sizes = [int(line.split("num_ctx")[1]) for line in shown["parameters"].splitlines() if "num_ctx" in line]
    info = shown["model_info"]
    size = sizes[0] if sizes else info.get(f"{info['general.architecture']}.context_length", 4096)
    can = set(shown["capabilities"])
    return {"name": name, "max_tokens": size, "tools": "tools" in can, "thinking": "thinking" in can}


@pytest.mark.parametrize("cut", [1, 3, 50])
def test_zed_as_an_ollama_client(server, text, http, cut):
    assert json.loads(configured("Zed", server.url, "smol"))["language_models"]["ollama"]["api_url"] == server.url
    model = zed_ollama_model(http, server.url)
    assert model == {"name": "smol", "max_tokens": LARGE.context_tokens, "tools": True, "thinking": True}
    two = call("read_file", path="notes.txt") + "\n" + call("read_file", path="more.txt")
    server.engine.script = Script(reply=steps(text, two), tokens_per_delta=cut)
    request = {
        "model": model["name"],
        "messages": [ZED_SYSTEM, {"role": "user", "content": QUESTION}],
        "stream": True,
        "keep_alive": -1,
        "options": {"num_ctx": model["max_tokens"], "temperature": 1.0},
        "tools": [{"type": "function", "function": ZED_TOOL}],
        "think": True,
    }
    seen = zed_ollama_events([json.loads(line) for line in http.post(server.url + "/api/chat", json=request).iter_lines()])
    assert (joined(seen, "thinking").strip(), joined(seen, "text").strip()) == ("I need the file.", "Let me look.")
    called = [value for kind, value in seen if kind == "tool"]
    assert [(name, value["path"]) for _, name, value in called] == [("read_file", "notes.txt"), ("read_file", "more.txt")]
    assert seen[-1][0] == "usage"
    made = [{"id": each, "function": {"name": name, "arguments": value}} for each, name, value in called]
    turn = {"role": "assistant", "content": "Let me look.", "tool_calls": made, "thinking": "I need the file."}
    result = {"role": "tool", "tool_name": "read_file", "content": f"the secret word is {SECRET}"}
    request["messages"] += [turn, result, result | {"content": "nothing"}]
    seen = zed_ollama_events([json.loads(line) for line in http.post(server.url + "/api/chat", json=request).iter_lines()])
    assert joined(seen, "text") == f"The secret word is {SECRET}."
