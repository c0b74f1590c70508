"""Requests made by the rules of the API and against them, for a server that must never be surprised.

    python tests/chaos/chaos_fuzz.py --requests 10000                # against a server of its own, with a report
    python tests/chaos/chaos_fuzz.py --requests 10000 --products     # large in every field at once (chaos_products.py)

Bodies are drawn from the API's own tables (numbers and their ranges, internal, unsupported and harmless fields), so a new
field is tried as soon as it is in a table; tools, thoughts, formats and other dialects from chaos_fields.py. A good value, one
at the edge, one beyond it, one of the wrong kind; sometimes bytes that are no JSON at all. Pass: every answer has a declared
status and is well-formed, nobody dies, memory stays flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "src")]

from chaos_fields import format_fields, other_dialect, thinking_fields, tool_fields, tool_turns  # noqa: E402
from chaos_model import CONTEXT, VOCABULARY, make_model  # noqa: E402
from chaos_products import Products, memory_problems  # noqa: E402
from chaos_server import Reply, Server, ask  # noqa: E402

from baton.api.limits import RANGES  # noqa: E402
from baton.api.openai.known_fields import CHAT_ONLY, HARMLESS, INTERNAL, UNSUPPORTED  # noqa: E402
from baton.api.openai.structured import CONSTRAINTS  # noqa: E402

DECLARED = {200, 400, 404, 405, 408, 409, 413, 415, 422, 429, 431, 503, 504}
WEIRD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, "", "a", "\x00", "é" * 50,
    "\ud800", "💥", [], [[]], [None], [1, "a"], {}, {"a": 1}, {"type": "text"}, [{"role": "user"}], "x" * 3000,
)  # fmt: skip
PATHS = (
    "/health", "/live", "/ready", "/metrics", "/config", "/version", "/v1/models", "/v1/models/tiny", "/v1/models/%00",
    "/nothing", "/v1/completions", "/", "//", "/v1/models/../config", "/%2e%2e/etc/passwd", "/?a=1",
    "/openapi.json", "/api/tags", "/api/version", "/api/ps", "/v1/responses/resp_1",
    "/v1/responses/resp_1/input_items", "/v1/cluster",
)  # fmt: skip
GENERATED = ("/v1/completions", "/v1/chat/completions")
WORDS = ("hello", " world", "<|end|>", "<|start|>", "\n", "ß", "日本", "\x00", "{{ 7*7 }}", "a" * 50)


LIST = {"schema": {"type": "array", "items": {"type": "integer"}}}
GRAMMARS: tuple[tuple[str, Any], ...] = (
    ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema", "json_schema": LIST}),
    ("guided_regex", "[a-f]{1,30}x"), ("guided_regex", "(a|b)*a(a|b){20}"), ("guided_regex", "("), ("guided_choice", ["a"]),
    ("guided_json", {"$ref": "#"}), ("guided_json", {"type": "nothing"}), ("grammar", 'root ::= "a" root | "b"'),
    ("grammar", "root"), ("guided_grammar", 'start: s\ns: s s | "a" | "ab" | s s s\n'),
)  # fmt: skip


class Fuzz:
    def __init__(self, seed: str) -> None:
        self.dice = random.Random(seed)

    def call(self) -> tuple[str, Any, dict[str, str]]:
        """Path, body (None: a GET) and headers."""
        dice = self.dice
        kind = dice.random()
        headers: dict[str, str] = {}
        if dice.random() < 0.05:
            headers[dice.choice(("x-request-id", "idempotency-key"))] = dice.choice(("a", "x" * 300, "k1", "k2", "~"))
        if kind < 0.3:
            return "/v1/completions", self.spoiled(self.completion()), headers
        if kind < 0.7:
            return "/v1/chat/completions", self.spoiled(self.chat()), headers
        if kind < 0.8:
            path, body = other_dialect(dice, self.chat(), self.text())
            return path, self.spoiled(body), headers
        if kind < 0.85:
            return "/tokenize", self.spoiled({"prompt": self.text(), "return_token_strs": dice.random() < 0.5}), headers
        if kind < 0.9:
            return "/detokenize", self.spoiled({"tokens": self.ids()}), headers
        if kind < 0.93:
            return "/v1/abort", self.spoiled({"request_id": dice.choice(("a", "nobody", "cmpl-1"))}), headers
        return dice.choice(PATHS), None, headers

    # Bodies

    def completion(self) -> dict[str, Any]:
        dice = self.dice
        prompt = dice.choice((self.text, self.ids, lambda: [self.text() for _ in range(dice.randint(1, 4))]))()
        body = {"prompt": prompt, **self.options()}
        if dice.random() < 0.2:
            body["echo"] = True
        if dice.random() < 0.3:
            body["logprobs"] = dice.randint(0, 5)
        return body

    def chat(self) -> dict[str, Any]:
        dice = self.dice
        messages = [
            {"role": dice.choice(("system", "user", "assistant", "tool", "nobody")), "content": self.content()}
            for _ in range(dice.randint(0, 4))
        ]
        body = {"messages": messages, **self.options()}
        if dice.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": dice.randint(0, 20)}
        if dice.random() < 0.2:
            body |= tool_fields(dice)
        if dice.random() < 0.1:
            body |= thinking_fields(dice)
        if dice.random() < 0.08:
            messages += tool_turns(dice)
        if dice.random() < 0.1:
            body["chat_template_kwargs"] = dice.choice(({}, {"a": 1}, {"messages": []}, {"enable_thinking": False}))
        return body

    def options(self) -> dict[str, Any]:
        dice = self.dice
        options: dict[str, Any] = {"max_tokens": dice.randint(1, 12), "stream": dice.random() < 0.3}
        for name in dice.sample(sorted(RANGES), dice.randint(0, 4)):
            if name != "timeout":
                options[name] = self.number(name)
        extras = {
            "stop": lambda: [self.text()[:20] or "a"],
            "stop_token_ids": lambda: self.ids()[:5],
            "logit_bias": lambda: {str(dice.randrange(VOCABULARY)): dice.choice((-100, 5.5, 100)) for _ in range(3)},
            "bad_words": lambda: [dice.choice(WORDS)],
            "ignore_eos": lambda: True,
            "return_token_ids": lambda: True,
            "stream_options": lambda: {"include_usage": True},
            "cache_salt": lambda: dice.choice("ab"),
            "model": lambda: dice.choice(("tiny", "tiny", "other")),
            "user": lambda: "somebody",
        }
        for name in dice.sample(sorted(extras), dice.randint(0, 3)):
            options[name] = extras[name]()
        if dice.random() < 0.06:
            options |= format_fields(dice)
        if dice.random() < 0.08:
            options[dice.choice((*INTERNAL, *UNSUPPORTED, *CONSTRAINTS, *CHAT_ONLY, *HARMLESS))] = dice.choice(WEIRD)
        if dice.random() < 0.08:
            name, value = dice.choice(GRAMMARS)
            options[name] = value
        return options

    def number(self, name: str) -> Any:
        """Mostly in its range: inside, at an edge, just beyond."""
        low, high, _ = RANGES[name]
        near = min(high, low + 16) if RANGES[name].whole else min(high, low + 2.0)
        inside = self.dice.randint(int(low), int(near)) if RANGES[name].whole else self.dice.uniform(low, near)
        return self.dice.choice((*[inside] * 12, low, high, low - 1, high + 1))

    def content(self) -> Any:
        parts = [{"type": "text", "text": self.text()}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]
        return self.dice.choice((self.text(), self.text(), self.text(), None, parts[:1], parts, []))

    def text(self) -> str:
        return "".join(self.dice.choices(WORDS, k=self.dice.choice((0, 1, 3, 8, 20))))

    def ids(self) -> list[int]:
        return [self.dice.randrange(VOCABULARY) for _ in range(self.dice.choice((0, 1, 5, 40, CONTEXT - 2, CONTEXT)))]

    # Against the rules

    def spoiled(self, body: dict[str, Any]) -> Any:
        dice = self.dice
        if dice.random() < 0.15 and body:
            body[dice.choice(sorted(body))] = dice.choice(WEIRD)
        if dice.random() < 0.1:
            body[dice.choice((*RANGES, "surprise", "a" * 300))] = dice.choice(WEIRD)
        content = json.dumps(body, allow_nan=True).encode("utf-8", "surrogatepass")
        if dice.random() < 0.08:
            content = self._broken(content)
        return content

    def _broken(self, content: bytes) -> bytes:
        dice = self.dice
        return dice.choice(
            (
                lambda: content[: dice.randrange(len(content))],
                lambda: content + b"x",
                lambda: b"[" * 200 + b"]" * 200,
                lambda: b"",
                lambda: b"[]",
                lambda: content.replace(b"{", b'{"a":1,"a":2,', 1),
                lambda: bytes(dice.randrange(256) for _ in range(30)),
                lambda: b'{"prompt": "a", "temperature": NaN}',
                lambda: b'{"prompt": "a", "max_tokens": 1e999}',
                lambda: content.replace(b"a", b"\xff", 3),
            )
        )()


def problem_with(path: str, reply: Reply) -> str | None:
    """What is wrong with this answer, if anything."""
    if reply.status not in DECLARED:
        return f"status {reply.status}"
    if reply.status != 200:
        try:
            return _problem_with_error(reply.json["error"], path)
        except (ValueError, KeyError, TypeError):
            return f"status {reply.status} without an error object"
    if path.startswith(GENERATED) and not reply.content.startswith(b"data: "):
        return None if reply.json["choices"] else "no choices"
    if path.startswith(GENERATED) and not reply.complete:
        return f"a stream that does not end well: {reply.content[-200:]!r}"
    if re.search(rb'^(event: error|.*"error": ?[{"])', reply.content, re.MULTILINE):
        return f"a stream with an error: {reply.content[-200:]!r}"
    return None


def _problem_with_error(error: Any, path: str) -> str | None:
    """Each dialect has its own: OpenAI's four keys, Anthropic's two, Ollama's plain text."""
    if path.startswith("/api/") and isinstance(error, str):
        return None
    least = {"message", "type"} if path.startswith(("/v1/messages", "/api/")) else {"message", "type", "param", "code"}
    return None if least <= set(error) else "an error object that lacks something"


async def bombard(
    port: int, seeds: range, concurrent: int = 12, make: Callable[[str], Fuzz | Products] = Fuzz
) -> tuple[Counter[int], list[str]]:
    """Statuses, and everything that was wrong."""
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    todo = iter(seeds)

    async def client() -> None:
        for seed in todo:
            path, body, headers = make(str(seed)).call()
            try:
                reply = await ask(port, path, body, headers=headers)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                problems.append(f"seed {seed} {path}: {type(error).__name__}: {error}")
                continue
            statuses[reply.status] += 1
            if make is Products and reply.status >= 500:
                problems.append(f"seed {seed} {path}: status {reply.status}; {reply.content[:200]!r}")
            elif problem := problem_with(path, reply):
                problems.append(f"seed {seed} {path}: {problem}; {reply.content[:200]!r}")

    await asyncio.gather(*(client() for _ in range(concurrent)))
    return statuses, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first request")
    parser.add_argument("--products", action="store_true", help="sizes and counts are multiplied; any 5xx is a failure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as scratch:
        model = make_model(Path(scratch, "model"))
        with Server(model, Path(scratch, "server")).wait_ready() as server:
            statuses, problems = fuzz_in_parts(server, options.requests, options.seed, Products if options.products else Fuzz)
            print(dict(sorted(statuses.items())), f"{len(problems)} problems", *problems[:20], sep="\n")
            if errors := "\n".join(line for line in server.errors.splitlines() if " info " not in line):
                print(f"stderr:\n{errors[-3000:]}")
    return 1 if problems else 0


def fuzz_in_parts(
    server: Server, count: int, first: int, make: Callable[[str], Fuzz | Products] = Fuzz
) -> tuple[Counter[int], list[str]]:
    processes = {role: server.process(role) for role in server.roles}
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    part = max(1, count // 10)
    for begin in range(first, first + count, part):
        some, wrong = asyncio.run(bombard(server.port, range(begin, min(begin + part, first + count)), make=make))
        statuses += some
        problems += wrong
        server.wait_idle()
        state = {
            role: f"{process.rss_mib:.1f} MiB (peak {process.peak_mib:.0f}), {process.fds} fds"
            for role, process in processes.items()
        }
        print(f"{begin - first + part:6} requests: {state}", flush=True)
        for role, process in processes.items():
            if not process.alive or server.process(role).pid != process.pid:
                problems.append(f"the {role} died")
    if make is Products:
        problems += memory_problems({role: process.peak_mib for role, process in processes.items() if process.alive})
    return statuses, problems


if __name__ == "__main__":
    sys.exit(main())
