"""Builds a tokenizer from the metadata of a GGUF file.

Two families, named by `tokenizer.ggml.model`:

gpt2    byte-level BPE. The file has only a name for the way text is split into words before merging (`tokenizer.ggml.pre`);
        _WORD_SPLITS holds the known names. A wrong guess would give other ids without any error, so an unknown name is refused.
llama   SentencePiece BPE. The file has a score for each piece and no merges: two neighbours merge when their
        concatenation is a piece, best score first. _merges_by_score converts that to a merge list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from typing import TypeVar

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from baton.errors import InvalidConfig
from baton.gguf import GGUFValue
from baton.text.pieces import SPACE_MARK, byte_level_bytes, sentencepiece_bytes
from baton.text.tokenizer_parts import TokenizerParts

Metadata = Mapping[str, GGUFValue]
T = TypeVar("T", int, float, bool, str)


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST}"
)
_TEKKEN_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
_SEED_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


def _split_at(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _byte_level(words: bool) -> pre_tokenizers.PreTokenizer:
    """Maps bytes to characters; with `words` splits as GPT-2 does first."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


def _cut_words(*cuts: str) -> pre_tokenizers.PreTokenizer:
    """Each cut applies inside the pieces of the one before."""
    return pre_tokenizers.Sequence([*(_split_at(cut) for cut in cuts), _byte_level(words=False)])


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return _byte_level(words=True)


def _smollm_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(words=True)])


def _llama3_words() -> pre_tokenizers.PreTokenizer:
    return _cut_words(_LLAMA3_WORDS)


def _qwen2_words() -> pre_tokenizers.PreTokenizer:
    return _cut_words(_QWEN2_WORDS)


def _default_words() -> pre_tokenizers.PreTokenizer:
    """Splits words as llama.cpp does by default."""
    return _cut_words(_PUNCTUATION, _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")


def _gpt4o_words() -> pre_tokenizers.PreTokenizer:
    return _cut_words(_GPT4O_WORDS)


def _tekken_words() -> pre_tokenizers.PreTokenizer:
    return _cut_words(_TEKKEN_WORDS)


def _seed_words() -> pre_tokenizers.PreTokenizer:
    return _cut_words(_SEED_WORDS)


def _deepseek_coder_words() -> pre_tokenizers.PreTokenizer:
    return _cut_words(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


_WORD_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    **dict.fromkeys(("gpt-2", "olmo", "exaone4"), _gpt2_words),
    **dict.fromkeys(("smollm", "refact", "command-r", "starcoder", "minerva-7b", "exaone"), _smollm_words),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _llama3_words),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), _llama3_words),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _qwen2_words),
    "gpt-4o": _gpt4o_words,
    "tekken": _tekken_words,
    "seed-coder": _seed_words,
    "deepseek-coder": _deepseek_coder_words,
    "default": _default_words,
}
"""By `tokenizer.ggml.pre`. tests/text/llama_cpp_ids.py asks llama.cpp for the ids of each."""
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""A word that is a token is not merged from its parts; and a begin-of-text is added unless the file says otherwise."""
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Characters are composed first (NFC), as in Qwen's own tokenizer.json; llama.cpp omits it."""


def tokenizer_parts_from_gguf(metadata: Metadata) -> TokenizerParts:
    """Parts of a tokenizer from the file's metadata. Raises InvalidConfig if it has no tokenizer, or an unsupported kind."""
    family = _one(metadata, "tokenizer.ggml.model", str)
    match family:
        case "gpt2":
            return replace(_byte_level_parts(metadata), fill_in_ids=_fill_in_ids(metadata))
        case "llama":
            return replace(_sentencepiece_parts(metadata), fill_in_ids=_fill_in_ids(metadata))
        case None:
            raise InvalidConfig("the GGUF file has no tokenizer (no 'tokenizer.ggml.model'): use a file that has one")
        case _:
            raise InvalidConfig(
                f"the GGUF file's tokenizer is of the kind '{family}'; supported are 'gpt2' and 'llama'. "
                "Serve the model from its Hugging Face folder (with tokenizer.json) instead"
            )


def _fill_in_ids(metadata: Metadata) -> dict[str, int]:
    """Ids of the tokens for filling in, under llama.cpp's names; older files have other keys."""
    older = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
    found: dict[str, int] = {}
    for name in ("pre", "suf", "mid", "pad", "rep", "sep"):
        keys = [f"tokenizer.ggml.fim_{name}_token_id", *([f"tokenizer.ggml.{older[name]}_token_id"] if name in older else [])]
        for key in keys:
            if (token := _one(metadata, key, int)) is not None and token >= 0:
                found.setdefault(name, token)
    return found


# --- gpt2 -----------------------------------------------------------------------------------------------------------


def _byte_level_parts(metadata: Metadata) -> TokenizerParts:
    """Build a byte-level tokenizer from the metadata. Raises InvalidConfig for an unknown way to split words."""
    name = _one(metadata, "tokenizer.ggml.pre", str) or "default"
    words = _WORD_SPLITS.get(name)
    if words is None:
        raise InvalidConfig(
            f"the GGUF file cuts words in the way '{name}' (tokenizer.ggml.pre), which is not known here. "
            f"Known: {', '.join(_WORD_SPLITS)}. Serve the model from its Hugging Face folder instead"
        )
    pieces, types = _vocabulary(metadata)
    merges = [_merge_pair(merge) for merge in _many(metadata, "tokenizer.ggml.merges", str)]
    if not merges:
        raise InvalidConfig("the GGUF file's tokenizer has no merges (tokenizer.ggml.merges): it cannot be built")
    whole_words = name in _WHOLE_WORDS_FIRST
    backend = _backend_of(pieces, merges, ignore_merges=whole_words)
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = words()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, pieces, types)
    return _parts(metadata, backend, pieces, types, byte_level_bytes, adds_bos=whole_words, strips_leading_space=False)


def _merge_pair(merge: str) -> tuple[str, str]:
    # The separator is the first space after the first character: in odd files a piece begins with one.
    at = merge.find(" ", 1)
    if at < 0:
        raise InvalidConfig("the GGUF file's tokenizer.ggml.merges has an entry without a space between its two parts")
    return merge[:at], merge[at + 1 :]


# --- llama ----------------------------------------------------------------------------------------------------------


def _sentencepiece_parts(metadata: Metadata) -> TokenizerParts:
    pieces, types = _vocabulary(metadata)
    scores = _many(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(pieces):
        raise InvalidConfig(f"the GGUF file has {len(pieces)} tokens and {len(scores)} scores: it is damaged")
    # Only these can result from a merge. A "<s>" or "<0x41>" typed by a user must not become that token.
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    score_of: dict[str, float] = {}
    for piece, kind, score in zip(pieces, types, scores, strict=True):
        if kind in mergeable and piece:
            score_of.setdefault(piece, score)
    unknown_id = _one(metadata, "tokenizer.ggml.unknown_token_id", int)
    unknown = pieces[unknown_id] if unknown_id is not None and 0 <= unknown_id < len(pieces) else None
    has_byte_pieces = types.count(TokenType.BYTE) == 256
    backend = _backend_of(pieces, _merges_by_score(score_of), unk_token=unknown, fuse_unk=True, byte_fallback=has_byte_pieces)
    space_first = _flag(metadata, "tokenizer.ggml.add_space_prefix", default=True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE_MARK)] if space_first else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(backend, pieces, types)
    return _parts(metadata, backend, pieces, types, sentencepiece_bytes, adds_bos=True, strips_leading_space=space_first)


def _merges_by_score(score_of: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every split of a piece into two others, best piece first; equal scores in file order."""
    merges: list[tuple[float, int, str, str]] = []
    for order, (piece, score) in enumerate(score_of.items()):
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in score_of and right in score_of:
                merges.append((-score, order, left, right))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


# --- both -----------------------------------------------------------------------------------------------------------


def _vocabulary(metadata: Metadata) -> tuple[list[str], list[int]]:
    pieces = _many(metadata, "tokenizer.ggml.tokens", str)
    if not pieces:
        raise InvalidConfig("the GGUF file's tokenizer has no tokens (tokenizer.ggml.tokens)")
    types = _many(metadata, "tokenizer.ggml.token_type", int) or [int(TokenType.NORMAL)] * len(pieces)
    if len(types) != len(pieces):
        raise InvalidConfig(f"the GGUF file has {len(pieces)} tokens and {len(types)} token types: it is damaged")
    return pieces, types


def _backend_of(pieces: list[str], merges: list[tuple[str, str]], **options: object) -> Backend:
    vocabulary: dict[str, int] = {}
    for token_id, piece in enumerate(pieces):
        vocabulary.setdefault(piece, token_id)  # a duplicate piece is encoded as its first id
    try:
        return Backend(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception, e.g. for a merge whose result is not a token
        raise InvalidConfig(f"the GGUF file's vocabulary and merges do not fit together: {error}") from error


def _add_tokens(backend: Backend, pieces: list[str], types: list[int]) -> None:
    """Adds the pieces that are matched in the text before it is split into words."""
    control = [piece for piece, kind in zip(pieces, types, strict=True) if kind == TokenType.CONTROL and piece]
    defined = [piece for piece, kind in zip(pieces, types, strict=True) if kind == TokenType.USER_DEFINED and piece]
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in defined])


def _parts(
    metadata: Metadata,
    backend: Backend,
    pieces: list[str],
    types: list[int],
    bytes_of: Callable[[str], bytes],
    *,
    adds_bos: bool,
    strips_leading_space: bool,
) -> TokenizerParts:
    special = frozenset(i for i, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN))
    as_it_is = (TokenType.CONTROL, TokenType.UNKNOWN)
    token_bytes = tuple(
        piece.encode("utf-8") if kind in as_it_is else bytes_of(piece) for piece, kind in zip(pieces, types, strict=True)
    )
    bos = _token_id(metadata, "bos", len(pieces))
    ends = [_token_id(metadata, name, len(pieces)) for name in ("eos", "eot", "eom")]
    eos_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
    with_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", default=adds_bos)
    with_eos = _flag(metadata, "tokenizer.ggml.add_eos_token", default=False)
    return TokenizerParts(
        backend=backend,
        token_bytes=token_bytes,
        special_ids=special,
        prefix_ids=(bos,) if with_bos and bos is not None else (),
        suffix_ids=eos_ids[:1] if with_eos else (),
        bos_id=bos,
        eos_ids=eos_ids,
        strips_leading_space=strips_leading_space,
    )


def _token_id(metadata: Metadata, name: str, size: int) -> int | None:
    token_id = _one(metadata, f"tokenizer.ggml.{name}_token_id", int)
    if token_id is not None and not 0 <= token_id < size:
        raise InvalidConfig(f"the GGUF file's {name}_token_id is {token_id}, outside its {size} tokens")
    return token_id


def _flag(metadata: Metadata, key: str, *, default: bool) -> bool:
    value = _one(metadata, key, bool)
    return default if value is None else value


def _one(metadata: Metadata, key: str, kind: type[T]) -> T | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, kind):
        raise InvalidConfig(f"the GGUF file's '{key}' is of type {type(value).__name__}, not {kind.__name__}")
    return value


def _many(metadata: Metadata, key: str, kind: type[T]) -> list[T]:
    value = metadata.get(key, [])
    if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
        raise InvalidConfig(f"the GGUF file's '{key}' is not a list of {kind.__name__}")
    return [item for item in value if isinstance(item, kind)]
