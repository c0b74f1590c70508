"""Fill in the middle: the model's tokens for it, and the layout of a prompt.

    prefix first    <PRE> text before the gap <SUF> text after it <MID>
    suffix first    <SUF> text after it <PRE> text before the gap          (Codestral)

A GGUF file names the tokens in its metadata. Otherwise a vocabulary with all the marks of a family belongs to that family.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Final

from baton.text.tokenizer import Tokenizer

SNIPPET: Final = "\n\n--- snippet ---\n\n"
"""Separator of files for a model without a mark for them, as in llama.cpp."""
REPOSITORY: Final = "myproject\n"
THIS_FILE: Final = "filename\n"
"""Names of the repository and of the current file, as in llama.cpp."""


@dataclass(frozen=True, slots=True)
class FillIn:
    prefix: int
    suffix: int
    middle: int | None
    "Token before the prefix. None: the suffix comes first."
    repository: int | None = None
    file: int | None = None
    "Token before each file, if there are several."
    ends: tuple[int, ...] = ()
    "Tokens that end the filled-in text, besides the model's stop tokens."

    def ids(self, prefix: list[int], suffix: list[int]) -> list[int]:
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]

    @property
    def marks(self) -> int:
        """Number of mark tokens in a prompt."""
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
"""Texts of the tokens before prefix, suffix and middle. None: the suffix comes first."""
_REPOSITORIES: Final = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILES: Final = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
_ENDS: Final = ("<|fim_pad|>", "<fim_pad>", "<|cursor|>", "\u2581<EOT>", "<EOT>", "<|endoftext|>")


def fill_in_tokens(tokenizer: Tokenizer) -> FillIn | None:
    """The model's tokens. None: it has no such tokens."""
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
    """Ids of the last files (name and text) that fit into `room` tokens before the current one; and their number. The layout is
    llama.cpp's. Each file has at least one token, so at most `room` files are tokenised."""
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
    """Token ids of a client's text. Special tokens in it are plain text: they cannot move the gap."""
    return tokenizer.encode(text, add_special_tokens=False)


def plain_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids as of `plain`, without the space that some tokenizers put before a text. (Meta's code for CodeLlama does the
    same.)"""
    if not tokenizer.strips_leading_space:
        return plain(tokenizer, text)
    lead = plain(tokenizer, "\u263a")
    ids = plain(tokenizer, "\u263a" + text)
    return ids[len(lead) :] if ids[: len(lead)] == lead else plain(tokenizer, text)


def _first(tokenizer: Tokenizer, texts: tuple[str, ...]) -> int | None:
    return next((token for text in texts if (token := tokenizer.id_of(text)) is not None), None)
