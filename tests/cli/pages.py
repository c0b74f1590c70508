"""README and docs/ as data: links, code, and the lines of commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
READERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""Pages for users."""
ALL = [
    *READERS,
    *sorted((ROOT / "docs" / "internals").rglob("*.md")),
    ROOT / "bench" / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def fences(page: Path) -> list[tuple[str, str]]:
    """Blocks of code, as (language, text)."""
    return _FENCE.findall(text_of(page))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", text_of(page))


def spans(page: Path) -> list[str]:
    """Code in a line of text."""
    return [span.replace(r"\|", "|") for span in _SPAN.findall(prose(page))]


def links(page: Path) -> list[str]:
    return [link for link in _LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def command_lines(page: Path) -> Iterator[str]:
    """Lines of shell blocks without a prompt and a comment, continued ones joined, and code in the text."""
    for language, text in fences(page):
        if language in ("", "sh", "bash", "shell"):
            for line in text.replace("\\\n", " ").splitlines():
                yield re.sub(r"\s#\s.*$", "", line.removeprefix("$ ")).strip()
        else:  # a unit of systemd, a service of compose
            yield from ("baton " + line for line in re.findall(r"(?:^ExecStart=\S*baton|^ *command:) (.+)$", text, re.M))
    yield from spans(page)
