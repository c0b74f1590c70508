"""Text to token ids and back, the same for every kind of model file.

Decoding is defined on bytes: the bytes of all tokens, read as UTF-8, with U+FFFD for invalid bytes. The Hugging Face libraries
give the same for well-formed text; unlike their byte fallback, it can be done token by token with the same result
(detokenizer.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from baton.errors import CallerError, InvalidConfig
from baton.gguf import read_gguf_metadata
from baton.text.clean import replace_lone_surrogates
from baton.text.gguf_tokenizer import tokenizer_parts_from_gguf
from baton.text.hf_tokenizer import tokenizer_parts_from_folder
from baton.text.tokenizer_parts import TokenizerParts


class _AsciiTexts(dict[int, str | None]):
    """Texts of tokens that are the same in every context: whole characters, and not special. None for others."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts

    def __missing__(self, token_id: int) -> str | None:
        known, special = self._parts.token_bytes, self._parts.special_ids
        piece = known[token_id] if 0 <= token_id < len(known) else b""
        self[token_id] = text = piece.decode("ascii") if piece.isascii() and token_id not in special else None
        return text


_WINDOW = 32 * 1024
"Number of characters per search."
_CHARACTERS_PER_TOKEN = 16
"Characters per allowed token above which a text is tokenised in part first. Most texts have fewer."


_UNSURE_TOKENS = 64
"Number of last tokens of a beginning, which the rest of its text could change."


class TooManyTokens(CallerError):
    """The text has more tokens than the caller allows."""

    def __init__(self, tokens_at_least: int) -> None:
        super().__init__(f"the text has at least {tokens_at_least} tokens")
        self.tokens_at_least = tokens_at_least


class Tokenizer:
    """A tokenizer, thread-safe: its results never change."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._token_bytes = parts.token_bytes
        self._special_ids = parts.special_ids
        self._size = len(parts.token_bytes)
        self.ascii_texts = _AsciiTexts(parts)
        "Texts of tokens by id, for the detokenizer's fast path. Filled on demand."
        self._plain_lock = Lock()
        self._plain: Backend | None = None

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Loads a Hugging Face folder or a GGUF file."""
        path = Path(path)
        if path.is_dir():
            return cls(tokenizer_parts_from_folder(path))
        if path.is_file():
            return cls(tokenizer_parts_from_gguf(read_gguf_metadata(path)))
        raise InvalidConfig(f"no model at {path}: give a Hugging Face folder or a GGUF file")

    @property
    def vocab_size(self) -> int:
        """One more than the highest id with a token. The model's head may be wider, never narrower."""
        return self._size

    @property
    def bos_id(self) -> int | None:
        return self._parts.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence; the first is the chat template's eos_token."""
        return self._parts.eos_ids

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids that the model expects before a prompt."""
        return self._parts.prefix_ids

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """Ids that the model expects after a prompt."""
        return self._parts.suffix_ids

    @property
    def fill_in_ids(self) -> Mapping[str, int]:
        """Tokens for filling in the middle that a GGUF file names (fill_in.py): pre, suf, mid, pad, rep, sep."""
        return self._parts.fill_in_ids

    def id_of(self, piece: str) -> int | None:
        """Id of a token in the vocabulary's spelling."""
        return self._parts.backend.token_to_id(piece)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def strips_leading_space(self) -> bool:
        """Whether encode puts a space before a text, which decode removes."""
        return self._parts.strips_leading_space

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of special tokens, longest first. Single characters are left out."""
        added = self._parts.backend.get_added_tokens_decoder().values()
        return tuple(sorted((token.content for token in added if token.special and len(token.content) > 1), key=len)[::-1])

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """Ids by text of tokens that were added to the vocabulary, special ones and others, such as <tool_call>."""
        return {token.content: token_id for token_id, token in self._parts.backend.get_added_tokens_decoder().items()}

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = False,
        mark: str = "",
        tokens_max: int | None = None,
    ) -> list[int]:
        """Ids of `text`.

        add_special_tokens  add the model's prefix and suffix of a prompt. Off for a rendered chat template, which contains
                            them.
        parse_special       parse "<|im_end|>" and the like as special tokens, for a rendered chat template. Off, they are plain
                            text: a client's text cannot end its own turn.
        mark                with parse_special: text between two special tokens that contains the mark is tokenised as plain
                            text, without the mark (chat_prompt.py).
        tokens_max          raise TooManyTokens if the text has more, mostly after tokenising only its beginning.

        Any string is accepted: a lone surrogate counts as U+FFFD; NUL and BOM are characters like others.
        """
        text = replace_lone_surrogates(text)
        ids: list[int] = []
        for stretch, special in _stretches(self.special_texts, text, mark) if mark else [(text, parse_special)]:
            backend = self._parts.backend if special else self._plain_backend()
            if tokens_max is not None:
                _require_short_beginning(backend, stretch, tokens_max)
            encoding = _cut(backend, stretch)
            if tokens_max is not None and len(ids) + len(encoding) > tokens_max:
                raise TooManyTokens(len(ids) + len(encoding))
            ids += encoding.ids
        if add_special_tokens:
            return [*self._parts.prefix_ids, *ids, *self._parts.suffix_ids]
        return ids

    def encode_beginning(self, text: str, tokens_max: int, *, parse_special: bool = False) -> list[int]:
        """At most `tokens_max` first ids of `text`, without the tokens around a prompt. The rest of a long text is not
        tokenised: it could change only the last tokens of the beginning, and those are left out."""
        backend = self._parts.backend if parse_special else self._plain_backend()
        return _beginning(backend, replace_lone_surrogates(text), tokens_max).ids

    def encode_pair(self, first: str, second: str, tokens_max: int, *, second_max: int | None = None) -> list[int]:
        """Ids of two texts as the tokenizer's own post-processor joins them. The longer text is cut first, as transformers'
        `longest_first` does it; `second_max`: tokens of the second text. Special tokens in the texts are plain characters."""
        backend = self._plain_backend()
        room = tokens_max - backend.num_special_tokens_to_add(True)
        if room < 2:
            raise CallerError(f"a pair of texts does not fit {tokens_max} tokens")
        texts = replace_lone_surrogates(first), replace_lone_surrogates(second)
        one, other = _beginning(backend, texts[0], room), _beginning(backend, texts[1], min(room, second_max or room))
        known = len(one), len(other)
        if known == (room, room) and room % 2 == 1:  # the odd token goes to the longer text: its beginning does not say which
            known = len(_cut(backend, texts[0])), min(len(_cut(backend, texts[1])), second_max or sys.maxsize)
        lengths = longest_first(*known, room)
        one.truncate(lengths[0])
        other.truncate(lengths[1])
        return backend.post_process(one, other).ids

    def encode_words(self, words: list[str]) -> list[list[int]]:
        """Ids of many short texts; special tokens are parsed."""
        batch = self._parts.backend.encode_batch_fast(
            [replace_lone_surrogates(word) for word in words], add_special_tokens=False
        )
        return [encoding.ids for encoding in batch]

    def prepare_plain(self) -> None:
        """Builds the plain backend in advance; otherwise it is built at its first use."""
        self._plain_backend()

    def _plain_backend(self) -> Backend:
        """The backend that reads special tokens as plain text. That is a switch on the library's object, and flipping it per
        call would race between threads, so there are two objects. The second takes some 35 MiB and a fifth of a second: it is
        built at its first use, or by `prepare_plain`."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = Backend.from_str(self._parts.backend.to_str())
                self._plain.encode_special_tokens = True
            return self._plain

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True, at_text_start: bool = True) -> str:
        """Text of `ids`. With at_text_start off they continue earlier text, and a leading space is kept."""
        text = b"".join(self.bytes_of(ids, skip_special_tokens=skip_special_tokens)).decode("utf-8", "replace")
        if at_text_start and self._parts.strips_leading_space and text.startswith(" "):
            return text[1:]
        return text

    def id_to_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id without a token, such as padding of a model's head."""
        return self._token_bytes[token_id] if 0 <= token_id < self._size else b""

    def bytes_of(
        self, ids: Iterable[int], *, skip_special_tokens: bool = True, shown_ids: frozenset[int] = frozenset()
    ) -> list[bytes]:
        """Bytes of each token; special ones are skipped, except those in `shown_ids`."""
        if skip_special_tokens:
            special = self._special_ids
            return [self.id_to_bytes(token) for token in ids if token not in special or token in shown_ids]
        return [self.id_to_bytes(token_id) for token_id in ids]

    def token_text(self, token_id: int | None) -> str:
        """Text of a special token in a prompt; empty for None."""
        return "" if token_id is None else self.id_to_bytes(token_id).decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"<Tokenizer {self._size} tokens, {len(self._special_ids)} special, eos {list(self.eos_ids)}>"


def _cut(backend: Backend, text: str) -> Encoding:
    """Tokenises a batch of one: `encode` gives the same ids but holds the interpreter lock, for seconds with a large text."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0]


def _beginning(backend: Backend, text: str, tokens_max: int) -> Encoding:
    characters = _CHARACTERS_PER_TOKEN * (tokens_max + _UNSURE_TOKENS)
    encoding = _cut(backend, text[:characters])
    while len(text) > characters and len(encoding) < tokens_max + _UNSURE_TOKENS:
        characters *= 8
        encoding = _cut(backend, text[:characters])
    encoding.truncate(tokens_max)
    return encoding


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that are left of two texts of these lengths: the longer one is cut to the length of the other, then both."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = shorter + room % 2
    return (shorter, longer) if first <= second else (longer, shorter)


def _stretches(special: tuple[str, ...], text: str, mark: str) -> Iterator[tuple[str, bool]]:
    """Pieces of the text in order, and whether special tokens in each are parsed. Splits only at special tokens, where a
    tokenizer starts anew: the ids together equal those of the whole."""
    begin = end = 0  # start of the pending text; end of the last special token
    for start, stop in (*_spans(special, text), (len(text), len(text))):
        between = text[end:start]
        if mark in between:
            if begin < end:
                yield text[begin:end], True
            yield between.replace(mark, ""), False
            begin = start
        end = stop
    if begin < end:
        yield text[begin:end], True


def _spans(special: tuple[str, ...], text: str) -> Iterator[tuple[int, int]]:
    """Spans of special tokens. Searched in windows: one search of a large text would hold the interpreter lock."""
    pattern, longest, at = (re.compile("|".join(map(re.escape, special))), len(special[0]), 0)
    while at < len(text):
        found = pattern.search(text, at, at + _WINDOW + longest)
        if found is not None and found.start() < at + _WINDOW:
            yield found.span()
            at = found.end()
        else:
            at += _WINDOW


def _require_short_beginning(backend: Backend, text: str, tokens_max: int) -> None:
    """Tokenises the beginning of a long text. The rest may change its last tokens, but never halves their number."""
    characters = _CHARACTERS_PER_TOKEN * tokens_max
    if len(text) > characters and (count := len(_cut(backend, text[:characters]))) > 2 * tokens_max + 64:
        raise TooManyTokens(count // 2)
