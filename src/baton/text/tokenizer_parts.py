"""What every kind of tokenizer file is turned into, and all that Tokenizer knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """Made by hf_tokenizer.py and gguf_tokenizer.py."""

    backend: Backend
    "Cuts text into ids. Asked for plain ids only: what stands before and after a prompt is in the fields below."
    token_bytes: tuple[bytes, ...]
    "Indexed by id. Empty for an id without a token."
    special_ids: frozenset[int]
    "Ids that decode leaves out when asked to skip special tokens."
    prefix_ids: tuple[int, ...] = ()
    "Put before a prompt with add_special_tokens (usually the begin-of-text id, or nothing)."
    suffix_ids: tuple[int, ...] = ()
    "Put after it."
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    "Any of these ends a sequence. The first is the one a chat template knows as eos_token."
    fill_in_ids: Mapping[str, int] = field(default_factory=dict)
    "Tokens for filling in the middle that the file names (fill_in.py)."
    strips_leading_space: bool = False
    "The tokenizer puts a space before a text, so decode takes one away."
