r"""The grammar of an answer in channels (harmony.py) that must call a tool, or be in a format, or both. In Lark, as llguidance
reads it.

    start: head* (call | final)
    head: <|channel|> ("analysis" | "commentary") <|message|> text <|end|> <|start|> "assistant"
    call: <|channel|> ("commentary to=functions.weather " <|constrain|> "json" <|message|> %json {...} | ...)
    final: <|channel|> "final" <|message|> answer

Thoughts stay as free as they are without it. The marks are tokens of the model; the answer ends with one of its ends of text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from baton.text.parsers.call_grammar import arguments_rule, json_rule, quoted
from baton.text.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, NAMESPACE, START

_ANY_TEXT = "/(?s:.*)/"


def harmony_grammar(
    parameters: Mapping[str, Mapping[str, Any]],
    *,
    special: Mapping[str, int],
    strict: Collection[str] = (),
    answer: str | None,
    thinks: bool = True,
) -> str:
    """`parameters`: of the tools that may be called, by name. `strict`: names of those that are
    held to their schemas. `special`: ids of the marks. `answer`: the JSON schema of an
    answer, "" for any text; None: it must be a call. `thinks`: thoughts may come first."""
    mark = {text: f"<[{token}]>" for text, token in special.items()}
    lasts = [*(["call"] if parameters else []), *(["final"] if answer is not None else [])]
    channels = '("analysis" | "commentary")' if thinks else '"commentary"'
    rules = [
        f"start: head* ({' | '.join(lasts)})",
        f'head: {mark[CHANNEL]} {channels} {mark[MESSAGE]} text {mark[END]} {mark[START]} "assistant"',
        f"text: {_ANY_TEXT}",
    ]
    if answer is not None:
        rules.append(f'final: {mark[CHANNEL]} "final" {mark[MESSAGE]} answer')
        rules.append(f"answer: {json_rule(answer)}" if answer else "answer: text")
    if parameters:
        rules.append(f"call: {mark[CHANNEL]} ({' | '.join(f'body_{place}' for place in range(len(parameters)))})")
    for place, (name, schema) in enumerate(parameters.items()):
        head = quoted(f"commentary to={NAMESPACE}{name} ")
        rules.append(f'body_{place}: {head} {mark[CONSTRAIN]} "json" {mark[MESSAGE]} arguments_{place}')
        rules.append(arguments_rule(place, schema, exact=name in strict))
    return "\n".join(rules) + "\n"
