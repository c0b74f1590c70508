r"""The grammar of an answer in channels (harmony.py) that must call a tool, follow a format, or both; in llguidance's Lark.

    start: head* (call | final)
    head: <|channel|> ("analysis" | "commentary") <|message|> text <|end|> <|start|> "assistant"
    call: <|channel|> ("commentary to=functions.weather " <|constrain|> "json" <|message|> %json {...} | ...)
    final: <|channel|> "final" <|message|> answer

Reasoning stays unconstrained. The marks are tokens of the model; the answer ends with one of its stop tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from baton.text.harmony_marks import CHANNEL, CONSTRAIN, END, MESSAGE, START
from baton.text.parsers.call_grammar import arguments_rule, json_rule
from baton.text.parsers.harmony import NAMESPACE
from baton.text.parsers.strict_arguments import quoted

_ANY_TEXT = "/(?s:.*)/"


def harmony_grammar(
    parameters: Mapping[str, Mapping[str, Any]],
    *,
    special: Mapping[str, int],
    strict: Collection[str] = (),
    answer: str | None,
    thinks: bool = True,
) -> str:
    """The grammar of an answer in channels. `parameters`: schemas of the callable tools, by name. `strict`: names of tools
    whose schema is binding. `special`: ids of the marks. `answer`: the JSON schema of an answer, "" for any text; None: it must
    be a call. `thinks`: reasoning may come first."""
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
