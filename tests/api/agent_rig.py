"""Editors and agents that run a tool loop: a scripted model for them, and the programs themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from api_fakes import MODEL, Serving

from baton.text.loading import ModelText

QUESTION, SECRET = "What is the secret word in notes.txt?", "plover"
LARGE = replace(MODEL, context_tokens=400_000)
PROGRAMS = Path(__file__).parents[2] / "build" / "agents"
"Where programs are installed: a folder that git does not see."


def steps(text: ModelText, *calls: str) -> Callable:
    """A model that thinks and calls, one call a turn, and then says the secret word, if some result had it."""

    def reply(request, index):
        prompt = text.tokenizer.decode(request.prompt, skip_special_tokens=False)
        done = prompt.count("\n<tool_response>")
        found = SECRET if f"is {SECRET}" in prompt else "not there"
        thought, rest = ("It is there.", f"The secret word is {found}.")
        if done < len(calls):
            thought, rest = "I need the file.", f"Let me look.\n{calls[done]}"
        answer = f"<think>\n{thought}\n</think>\n\n{rest}"
        return [*text.tokenizer.encode(answer, add_special_tokens=False), text.tokenizer.eos_ids[0]]

    return reply


def from_npm(package: str, program: str) -> str:
    """The program, installed once. Skips where that is not possible."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not here")
    folder = PROGRAMS / package.strip("@").replace("/", "_")
    path = folder / "node_modules" / ".bin" / program
    if not path.exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install {package}: {done.stderr.strip()[-300:]}")
    return str(path)


def from_pip(package: str, program: str, *before: str) -> str:
    """The same for a Python program, in an environment of its own. `before` is installed first."""
    folder = PROGRAMS / package.replace("==", "_")
    path = folder / "bin" / program
    if not path.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        for each in (*before, package):
            command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", each]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
            if done.returncode:
                pytest.skip(f"pip cannot install {each}: {done.stderr.strip()[-300:]}")
    return str(path)


def run(command: list[str], folder: Path, **settings: str) -> str:
    """With a home of its own and nothing else of this machine's settings."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    (work / "notes.txt").write_text(f"the secret word is {SECRET}\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", "LANG": "C.UTF-8", **settings}
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=180, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def tool_results(server: Serving, text: ModelText) -> list[str]:
    prompt = text.tokenizer.decode(server.engine.requests[-1].prompt, skip_special_tokens=False)
    return [part.partition("</tool_response>")[0] for part in prompt.split("\n<tool_response>")[1:]]
