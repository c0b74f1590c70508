"""The configurations of docs/clients.md, as the programs that read them get them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
ADDRESS, NAME, CONTEXT = "http://127.0.0.1:8000", "NAME", "32768"
"What the page writes for the server's address, the model's name and its context length."


def configurations(program: str) -> list[str]:
    """The fenced blocks below the program's heading, in the order of the page."""
    [section] = re.findall(rf"^### {re.escape(program)}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
    return re.findall(r"^```\w+\n(.*?)^```", section, re.M | re.S)


def configured(program: str, url: str, model: str, *, context: int | None = None, place: int = 0) -> str:
    """One of them, for a server at `url` that serves `model`."""
    text = configurations(program)[place].replace(ADDRESS, url)
    text = re.sub(rf"\b{NAME}\b", model, text)
    return text if context is None else text.replace(CONTEXT, str(context))


def exported(shell: str) -> dict[str, str]:
    """The variables that `export` lines set."""
    words = [shlex.split(line, comments=True) for line in shell.splitlines()]
    return dict(line[1].split("=", 1) for line in words if line[:1] == ["export"])


def address_in(text: str) -> str:
    """The server's address as the configuration has it, which may end in /v1."""
    [address] = set(re.findall(rf"{re.escape(ADDRESS)}[\w/]*", text))
    return address.removeprefix(ADDRESS)
