"""Fill in the middle: which tokens a model was trained with for it, and how a prompt is made of them.

    prefix first    <PRE> what is before the gap <SUF> what is after it <MID>
    suffix first    <SUF> what is after it <PRE> what is before the gap          (Codestral)

A GGUF file names the tokens in its metadata. Else a vocabulary that has all the marks of a family is of that family.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Final

from baton.text.tokenizer import Tokenizer

SNIPPET: Final = "\n\n--- snippet ---\n\n"
"""Between files for a model that has no mark for them, as in llama.cpp."""
REPOSITORY: Final = "myproject\n"
THIS_FILE: Final = "filename\n"
"""What llama.cpp calls both."""


@dataclass(frozen=True, slots=True)
class FillIn:
    prefix: int
    suffix: int
    middle: int | None
    "None: the suffix comes first."
    repository: int | None = None
    file: int | None = None
    "Before each file of several."
    ends: tuple[int, ...] = ()
    "Tokens that end what is filled in, besides the model's ends of text."

    def ids(self, prefix: list[int], suffix: list[int]) -> list[int]:
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]

    @property
    def marks(self) -> int:
        """Tokens of a prompt that are marks."""
        return 2 if self.middle is None else 3


_FAMILIES: Final[tuple[tuple[str, str, str | None], ...]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
"""Spellings of prefix, suffix and middle. None: the suffix comes first."""
_REPOSITORIES: Final = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILES: Final = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
_ENDS: Final = ("<|fim_pad|>", "<fim_pad>", "<|cursor|>", "\u2581<EOT>", "<EOT>", "<|endoftext|>")


def fill_in_tokens(tokenizer: Tokenizer) -> FillIn | None:
    """None: the model has none."""
    named = tokenizer.fill_in_ids
    repository = named["rep"] if "rep" in named else _first(tokenizer, _REPOSITORIES)
    file = named["sep"] if "sep" in named else _first(tokenizer, _FILES)
    ends = [named.get("pad"), repository, file, *map(tokenizer.id_of, _ENDS)]
    known = tuple(dict.fromkeys(token for token in ends if token is not None))
    if "pre" in named and "suf" in named:
        found: tuple[int, int, int | None] = (named["pre"], named["suf"], named.get("mid"))
        return FillIn(*found, repository, file, known)
    for prefix, suffix, middle in _FAMILIES:
        pre, suf, mid = (None if text is None else tokenizer.id_of(text) for text in (prefix, suffix, middle))
        if pre is not None and suf is not None and (mid is None) == (middle is None):
            return FillIn(pre, suf, mid, repository, file, known)
    return None


def files_before(tokenizer: Tokenizer, marks: FillIn, files: list[tuple[str, str]], room: int) -> tuple[list[int], int]:
    """Ids of the last files, by name and text, that fit into `room` tokens before the one that is filled in; and their number.
    The layout is llama.cpp's. Each file has a token at least, so no more than `room` of them are tokenised."""
    head = [] if marks.repository is None else [marks.repository, *plain(tokenizer, REPOSITORY)]
    tail = [] if marks.file is None else [marks.file, *plain(tokenizer, THIS_FILE)]
    room -= len(head) + len(tail)
    kept: list[list[int]] = []
    for name, text in reversed(files):
        mark, title = ([], SNIPPET) if marks.file is None else ([marks.file], f"{name}\n")
        ids = [*mark, *plain(tokenizer, title + text)]
        room -= len(ids)
        if room < 0:
            break
        kept.append(ids)
    return [*head, *chain.from_iterable(reversed(kept)), *tail] if kept else [], len(kept)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Special tokens in a client's text are plain characters: it cannot move the gap."""
    return tokenizer.encode(text, add_special_tokens=False)


def plain_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """The same in the middle of a text: some tokenizers put a space before one. (Meta's code for CodeLlama cuts so too.)"""
    if not tokenizer.strips_leading_space:
        return plain(tokenizer, text)
    lead = plain(tokenizer, "\u263a")
    ids = plain(tokenizer, "\u263a" + text)
    return ids[len(lead) :] if ids[: len(lead)] == lead else plain(tokenizer, text)


def _first(tokenizer: Tokenizer, texts: tuple[str, ...]) -> int | None:
    return next((token for text in texts if (token := tokenizer.id_of(text)) is not None), None)
