"""A conversation with a server: answers on stdout as they arrive, all else on stderr.

Reasoning is shown too, dimmed on a terminal: a minute without output looks like a hang. Ctrl-C stops the answer that is being
written; at the prompt it ends the conversation.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import typer

from baton.cli.http_stream import HttpError, ServerAddress, stream_events
from baton.cli.say import Failed

REASONING_NAMES = ("reasoning_content", "reasoning")
"""Keys of reasoning in a delta, by server."""


@dataclass(slots=True)
class Timing:
    """Arrival times of an answer's pieces, in seconds of one clock."""

    begin: float
    reasoning: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    tokens: int = 0
    "The server's count of tokens, reasoning included. 0: not reported."
    reasoning_tokens: int | None = None

    def note_usage(self, usage: dict[str, Any]) -> None:
        self.tokens = usage.get("completion_tokens", self.tokens)
        details = usage.get("completion_tokens_details") or {}
        self.reasoning_tokens = details.get("reasoning_tokens", self.reasoning_tokens)

    def text(self) -> str:
        """A line about speed; reasoning and answer have rates of their own."""
        pieces = [*self.reasoning, *self.answer]
        if not pieces:
            return "no text"
        first = f"first after {pieces[0] - self.begin:.2f} s"
        tokens = self.tokens or len(pieces)
        if not self.reasoning:
            return f"{_rated(tokens, self.answer)}, {first}"
        thought = self.reasoning_tokens
        if thought is None:  # not reported, so estimated by the number of pieces
            thought = round(tokens * len(self.reasoning) / len(pieces))
        words = f"{_rated(thought, self.reasoning)} of reasoning"
        if not self.answer:
            return f"{words}, {first}, and no answer: --max-tokens was used up"
        return f"{words}; {_rated(tokens - thought, self.answer, self.reasoning[-1])} of answer, {first}"


def _rated(tokens: int, times: list[float], since: float | None = None) -> str:
    """Tokens and their rate as text. `since`: time of the last token before these. None: these are the first, and the rate
    counts from the first one."""
    seconds = times[-1] - (times[0] if since is None else since)
    timed = tokens - (since is None)
    rate = f" at {timed / seconds:.1f} tok/s" if timed > 0 and seconds > 0 else ""
    return f"{tokens} tokens{rate}"


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the server that continues them."""

    server: ServerAddress
    model: str
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def ask(self, text: str) -> str:
        """Prints the answer as it arrives; returns a line about its speed. Messages are kept only if the answer is complete."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        printed = Printed(Timing(monotonic()))
        async with aclosing(stream_events(self.server, "/v1/chat/completions", {**body, **self.options})) as events:
            async for event in events:
                if event == b"[DONE]":
                    break
                content = json.loads(event)
                if "error" in content:
                    raise HttpError(str(content["error"].get("message", content["error"])))
                printed.timing.note_usage(content.get("usage") or {})
                for choice in content.get("choices", ()):
                    printed.add(choice.get("delta") or {})
        printed.end()
        self.messages = [*messages, {"role": "assistant", "content": "".join(printed.pieces)}]
        return printed.timing.text()


class Printed:
    """Prints one answer to the terminal."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.pieces: list[str] = []

    def add(self, delta: dict[str, Any]) -> None:
        if thought := next((delta[name] for name in REASONING_NAMES if delta.get(name)), None):
            self.timing.reasoning.append(monotonic())
            typer.secho(thought, nl=False, err=True, dim=True)
        if piece := delta.get("content"):
            if self.timing.reasoning and not self.timing.answer:
                typer.echo("\n", err=True)
            self.timing.answer.append(monotonic())
            self.pieces.append(piece)
            typer.echo(piece, nl=False)

    def end(self) -> None:
        if self.timing.reasoning and not self.timing.answer:
            typer.echo(err=True)
        typer.echo()


def talk(conversation: Conversation) -> None:
    """Runs the conversation. If stdin is not a terminal, each line is a turn."""
    person = sys.stdin.isatty()
    if person:
        typer.echo(f"{conversation.model}: /reset forgets, /exit ends", err=True)
    for text in _turns(person):
        match text.strip():
            case "":
                continue
            case "/exit" | "/quit" | "/bye":
                return
            case "/reset" | "/clear":
                conversation.reset()
                typer.echo("forgotten", err=True)
                continue
        try:
            answer(conversation, text)
        except KeyboardInterrupt:
            if not person:
                raise
        except Failed as error:
            if not person:
                raise
            typer.echo(f"[{error}]", err=True)


def answer(conversation: Conversation, text: str) -> None:
    """Prints the answer, then its speed."""
    try:
        typer.echo(f"[{asyncio.run(conversation.ask(text))}]", err=True)
    except KeyboardInterrupt:
        typer.echo("\n[stopped]", err=True)
        raise
    except HttpError as error:
        raise Failed(str(error)) from None


def _turns(person: bool) -> Iterator[str]:
    if not person:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  # arrows and history at the prompt

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
