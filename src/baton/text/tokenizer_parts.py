"""The common form of all tokenizer files, from which a Tokenizer is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """Parts from which a Tokenizer is built, by hf_tokenizer.py and gguf_tokenizer.py."""

    backend: Backend
    "Converts text to ids. Used without special tokens: prefix and suffix are in the fields below."
    token_bytes: tuple[bytes, ...]
    "Bytes of tokens, indexed by id. Empty for an id without a token."
    special_ids: frozenset[int]
    "Ids that decode omits when it skips special tokens."
    prefix_ids: tuple[int, ...] = ()
    "Ids before a prompt with add_special_tokens (usually the begin-of-text id, or none)."
    suffix_ids: tuple[int, ...] = ()
    "Ids after a prompt."
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    "Ids that end a sequence. The first is the chat template's eos_token."
    fill_in_ids: Mapping[str, int] = field(default_factory=dict)
    "Fill-in-the-middle tokens that the file names (fill_in.py)."
    strips_leading_space: bool = False
    "Whether the tokenizer puts a space before a text, so that decode removes one."
