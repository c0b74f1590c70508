"""Words of a command line as users of other engines write them, in the form that click reads.

--max_model_len 5             --max-model-len 5                                       vLLM
M --served-model-name a b     M --served-model-name a --served-model-name b           vLLM
-fa -ngl 99                   -fa on -ngl 99                                          llama.cpp before `-fa on`

Words behind `--` are values and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

from baton.familiar import FOREIGN

LISTS = ("--served-model-name",)
"""Options that take several words in vLLM. Here each value repeats the option."""


def in_our_form(command: Any, ctx: Any, args: Sequence[str]) -> list[str]:
    words = [*takewhile(lambda word: word != "--", args)]
    behind = [*args[len(words) :]]
    words = [with_dashes(word) for word in words]
    words = [*with_left_out_values(command.params, words)]
    return with_lists(command, ctx, words, behind) + behind


def with_dashes(word: str) -> str:
    """Replaces underscores: --max_model_len is --max-model-len, as in vLLM."""
    name, separator, value = word.partition("=")
    return name.replace("_", "-") + separator + value if name.startswith("--") else word


def with_left_out_values(params: Iterable[Any], words: Sequence[str]) -> Iterator[str]:
    """Adds the value to an option that may stand without one."""
    values = {
        name: row.values
        for param in params
        if (row := FOREIGN.get(str(param.name))) is not None and row.values
        for name in param.opts
    }
    for word, following in pairwise([*words, ""]):
        yield word
        if word in values and following not in values[word]:
            yield values[word][0]


def with_lists(command: Any, ctx: Any, words: list[str], behind: Sequence[str]) -> list[str]:
    """Repeats the option before each further word, if the model is given elsewhere: else the second word is the model."""
    for place, word in enumerate(words):
        if word in LISTS:
            more = [*takewhile(lambda each: not each.startswith("-"), words[place + 2 :])]
            rest = words[place + 2 + len(more) :]
            if more and _has_model(command, ctx, [*words[: place + 2], *rest, *behind]):
                repeated = [part for each in more for part in (word, each)]
                return [*words[: place + 2], *repeated, *with_lists(command, ctx, rest, behind)]
    return words


def _has_model(command: Any, ctx: Any, words: list[str]) -> bool:
    """Whether the words contain a model. Click's parser only sorts words: no value is checked, no function is called."""
    try:
        found, _, _ = command.make_parser(ctx).parse_args(words)
    except Exception:  # click itself complains about these words later
        return False
    return any(found.get(name) for name in ("positional", "model", "hf_repo", "model_path"))
