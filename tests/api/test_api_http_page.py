"""docs/api.md says what the code does: routes, fields, ranges, defaults, error codes. Where one is missing, add its row."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import baton
from baton.api import errors
from baton.api.anthropic.fields import MESSAGES
from baton.api.app import PAGE, ROUTES
from baton.api.config import ApiConfig, ServedModel
from baton.api.embeddings import fields as embeddings
from baton.api.fields import Fields
from baton.api.generate.options import Options
from baton.api.limits import RANGES, FieldRange, Limits
from baton.api.ollama.fields import CHAT, GENERATE, OPTIONS
from baton.api.openai.known_fields import CHAT_ONLY, COMPLETION_ONLY, HARMLESS, UNSUPPORTED
from baton.api.openai.schemas import Schema
from baton.api.responses.fields import RESPONSES
from baton.api.routes.cluster import cluster_route
from baton.api.translate import ONE_ANSWER, Table
from baton.models.generation import UNADVISED_SAMPLING
from baton.protocol.request import OPENAI_SAMPLING, SamplingParams

PAGE_FILE = Path(__file__).parent.parent.parent / "docs" / "api.md"
TEXT = PAGE_FILE.read_text("utf-8")
SOURCES = Path(baton.__file__).parent


def section(title: str) -> list[list[str]]:
    """The cells of its table, without the head."""
    body = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body.splitlines() if line.startswith("| ")]
    return [[cell.strip(" |") for cell in row] for row in rows[2:]]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


FIELDS = {names_in(row[0])[0]: row for row in section("Fields of `/v1/chat/completions` and `/v1/completions`")}


# Routes


def test_every_route_with_its_right():
    cluster = cluster_route(lambda: None)  # type: ignore[arg-type]
    routes = {
        f"{method} {route.path}": route.right
        for route in (*ROUTES, PAGE, cluster)
        for method in (route.methods or ())
        if method != "HEAD"
    }
    assert {names_in(row[0])[0]: row[1] for row in section("Routes")} == routes


# Fields


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[set[str], Any]]:
    """By route: the fields that its schema reads, and what an empty body means."""
    read: list[set[str]] = []
    with pytest.MonkeyPatch.context() as patched:
        finish = Fields.finish
        patched.setattr(Fields, "finish", lambda self, how: (read.append(set(self._known)), finish(self, how))[1])
        schema = Schema(ServedModel(name="m", context_tokens=100, head_width=100), ApiConfig())
        bodies = schema.chat({"messages": []}), schema.completion({"prompt": "x"})
    others = {*HARMLESS, *UNSUPPORTED}
    chat, completions = read[0] - others - set(COMPLETION_ONLY), read[1] - others - set(CHAT_ONLY)
    return {"chat": (chat, bodies[0]), "completions": (completions, bodies[1])}


def test_every_field_of_both_routes_has_a_row(known: dict[str, tuple[set[str], Any]]):
    """An alias is named in the row of the field whose other name it is."""
    for route, (fields, _) in known.items():
        rows = [row for row in FIELDS.values() if row[1] in ("both", route)]
        told = {name for row in rows for name in (*names_in(row[0]), *names_in(row[4].split(".")[0]))}
        missing = sorted(fields - told - {"echo"})
        assert not missing, f"docs/api.md has no row for {missing} of {route}"
    fields = known["chat"][0] | known["completions"][0]
    assert sorted(set(FIELDS) - fields) == [], "rows for fields that nothing reads"


def text_of(name: str, bounds: FieldRange) -> str:
    high = Limits().request_seconds if name == "timeout" else bounds.high
    low, high = (str(number) if isinstance(number, int) else f"{number:g}" for number in (bounds.low, high))
    return f"{'above ' if bounds.low_excluded else ''}{low} to {high}"


@pytest.mark.parametrize("name", [name for name in RANGES if name != "drain_seconds"])
def test_every_range(name: str):
    assert FIELDS[name][2].removeprefix("chat: a boolean; completions: ") == text_of(name, RANGES[name])


def test_the_range_of_the_other_routes_number():
    (row,) = [row for row in section("Fields of other routes") if names_in(row[1]) == ["drain_seconds"]]
    assert row[2] == text_of("drain_seconds", RANGES["drain_seconds"])


def defaults(options: Options) -> Iterator[tuple[str, Any]]:
    renamed = {"include_stop": "include_stop_str_in_output", "timeout_seconds": "timeout"}
    renamed |= {
        "drafts_max": "speculative.n_max",
        "repetition_stop": "repetition_detection",
        "truncate": "truncate_prompt_tokens",
    }
    hidden = ("stream", "sampling", "grammar", "grammar_field", "ignored", "max_tokens", "add_special_tokens")
    shown = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    sampled = {name: getattr(options.sampling, name) for name in SamplingParams.__struct_fields__}
    for name, value in {**sampled, **shown}.items():
        if name not in (*hidden, "thinking", "pooling", "label_ids"):
            yield renamed.get(name, name), value


def test_every_default(known: dict[str, tuple[set[str], Any]]):
    for name, value in defaults(known["chat"][1].options):
        cell = FIELDS[name][3]
        if name in OPENAI_SAMPLING:
            assert cell == f"model, else {UNADVISED_SAMPLING[name]:g}", name
        elif value in (None, (), ""):
            assert cell == "none", name
        else:
            assert json.loads(cell) == value, name
    completion = known["completions"][1].options
    assert FIELDS["max_tokens"][3].endswith(f"completions: {completion.max_tokens}")
    for name, flag in (("add_generation_prompt", True), ("continue_final_message", False)):
        assert json.loads(FIELDS[name][3]) is flag is getattr(known["chat"][1], name)


# Dialects

TABLES: dict[str, tuple[Table, ...]] = {
    "OpenAI: `/v1/responses`": (RESPONSES,),
    "Anthropic: `/v1/messages`, `/v1/messages/count_tokens`": (MESSAGES,),
    "Ollama: `/api/chat`, `/api/generate`, and its lists": (CHAT, GENERATE, OPTIONS),
    "Embeddings: `/v1/embeddings`, `/api/embed`, `/api/embeddings`": (
        embeddings.OPENAI,
        embeddings.OLLAMA,
        embeddings.OLLAMA_OLDER,
    ),
}


@pytest.mark.parametrize("title", TABLES)
def test_a_dialect_names_every_field_that_is_refused_or_has_no_effect(title: str):
    """What is as in the original needs no line; /openapi.json has every field (test_openapi.py)."""
    body = TEXT.split(f"\n### {title}\n")[1].split("\n#")[0]
    shown = set(re.findall(r"`(\w+)`", body))
    for table in TABLES[title]:
        differing = {name for name, field in table.items() if field.rule in ("refused", "harmless") and name not in ONE_ANSWER}
        assert not differing - shown, f"docs/api.md does not say what happens to {sorted(differing - shown)}"


# Errors


def raised() -> dict[str, set[int]]:
    """Every code that stands in the source, with its statuses."""
    found: dict[str, set[int]] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("ApiError", "bad"):
                continue
            code = next((word.value for word in node.keywords if word.arg == "code"), None)
            status = 400 if node.func.id == "bad" else node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if isinstance(code, ast.Constant) and status is not None:
                found.setdefault(code.value, set()).add(status)
    for reason, status in errors._STATUS_OF_REFUSAL.items():
        found.setdefault(reason, set()).add(status)
    for error in (errors.Overloaded, errors.Unavailable):
        found.setdefault(error.__name__.lower(), set()).add(error.http_status)
    return found


def test_every_error_code_with_its_status():
    told = {code: {int(status) for status in row[1].split(", ")} for row in section("Errors") for code in names_in(row[0])}
    assert told == raised()


def test_every_type_of_error_has_a_status_in_the_table():
    told = {int(status) for row in section("Errors") for status in row[1].split(", ")}
    assert set(errors._TYPES) <= told
