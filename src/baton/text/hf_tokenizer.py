"""Builds a tokenizer from a Hugging Face folder.

tokenizer.json            the tokenizer's rules and vocabulary. Required.
tokenizer_config.json     bos_token, eos_token, add_bos_token, add_eos_token, tokens added later
special_tokens_map.json   the same names in older folders
generation_config.json    all ids that end a sequence (a chat model often has two); else config.json

No code from the folder is run: `auto_map` and `tokenizer_class` are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from baton.errors import InvalidConfig
from baton.text.pieces import SPACE_MARK, byte_level_bytes, sentencepiece_bytes, word_piece_bytes
from baton.text.tokenizer_parts import TokenizerParts

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_parts_from_folder(folder: Path) -> TokenizerParts:
    """Parts of a tokenizer from a folder. Raises InvalidConfig if a file is missing, broken, or of a kind that cannot be
    decoded exactly."""
    description = read_json(folder / "tokenizer.json")
    if not description:
        raise InvalidConfig(
            f"{folder} has no tokenizer.json. If it has only a SentencePiece tokenizer.model, convert it first "
            "(transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
        )
    settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    backend = _backend_of(folder, settings)
    named = {key: token for key in _NAMED_TOKENS if (token := token_text(settings.get(key))) is not None}
    ids_of_named = {key: i for key, token in named.items() if (i := backend.token_to_id(token)) is not None}
    added = backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special} | set(ids_of_named.values())
    prefix, suffix = _prefix_and_suffix(backend)
    bos, eos = ids_of_named.get("bos_token"), ids_of_named.get("eos_token")
    style = _PieceStyle(description.get("decoder"))
    return TokenizerParts(
        backend=backend,
        token_bytes=_token_bytes(backend, style, special),
        special_ids=frozenset(special),
        prefix_ids=_with_setting(prefix, settings.get("add_bos_token"), bos),
        suffix_ids=_with_setting(suffix[::-1], settings.get("add_eos_token"), eos)[::-1],
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys([*([] if eos is None else [eos]), *_eos_ids_of_generation(folder)])),
        strips_leading_space=style.strips_leading_space,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty if there is no file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidConfig(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def token_text(value: object) -> str | None:
    """The token in a settings file: a string, or an object with a string as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _backend_of(folder: Path, settings: dict[str, Any]) -> Backend:
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception for anything unknown
        raise InvalidConfig(f"{folder / 'tokenizer.json'}: the tokenizers library cannot read it: {error}") from error
    backend.no_truncation()  # the front checks limits and raises; never truncate silently
    backend.no_padding()
    for token_id, token in sorted(_added_later(settings), key=lambda entry: entry[0]):
        if backend.id_to_token(token_id) is None:
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise InvalidConfig(
                f"{folder}: tokenizer_config.json gives an added token the id {token_id}, and in tokenizer.json "
                f"it has {backend.token_to_id(token.content)}: the two files do not belong together"
            )
    return backend


def _added_later(settings: dict[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    entries = settings.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    for key, entry in entries.items():
        text = token_text(entry)
        if not str(key).isdecimal() or not text:
            raise InvalidConfig("tokenizer_config.json: added_tokens_decoder must map ids to tokens with a content")
        flags = {name: bool(entry.get(name, False)) for name in ("special", "normalized", "lstrip", "rstrip")}
        yield int(key), AddedToken(text, single_word=bool(entry.get("single_word", False)), **flags)


def _prefix_and_suffix(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that tokenizer.json's post-processor puts before and after a text, found by a trial."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise InvalidConfig("tokenizer.json: its post-processor rewrites the text's own tokens, which is not supported")


def _with_setting(ids: tuple[int, ...], wanted: object, token_id: int | None) -> tuple[int, ...]:
    """Applies add_bos_token or add_eos_token, which override the post-processor as in transformers.

    The token is the outermost: first of a prefix, and last of a suffix (which the caller passes reversed).
    """
    if wanted is False:
        return tuple(i for i in ids if i != token_id)
    if wanted is True and token_id is not None and token_id not in ids:
        return (token_id, *ids)
    return ids


def _eos_ids_of_generation(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise InvalidConfig(f"{folder / name}: eos_token_id must be a token id or a list of them")
        if ids:
            return ids
    return []


class _PieceStyle:
    """The encoding of pieces, according to the decoder in tokenizer.json."""

    def __init__(self, decoder: object) -> None:
        self.is_byte_level = False
        self.strips_leading_space = False
        self.word_prefix = ""
        "Mark of a WordPiece piece that continues a word. All other pieces begin a word, behind a space."
        for step in _steps(decoder):
            self._learn(step)

    def bytes_of(self, piece: str) -> bytes:
        if self.word_prefix:
            return word_piece_bytes(piece, self.word_prefix)
        return byte_level_bytes(piece) if self.is_byte_level else sentencepiece_bytes(piece)

    def _learn(self, step: dict[str, Any]) -> None:
        """Read one step of the decoder: how a token becomes bytes. Raises InvalidConfig for a step that is not supported."""
        match step.get("type"):
            case "ByteLevel":
                self.is_byte_level = True
            case "Replace" if step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " ":
                pass
            case "ByteFallback" | "Fuse":
                pass
            case "Strip" if step.get("content") == " " and step.get("start") in (0, 1) and step.get("stop") == 0:
                self.strips_leading_space = step["start"] == 1
            case "Metaspace" if step.get("replacement") == SPACE_MARK:
                never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
                self.strips_leading_space = not never
            case "WordPiece" if isinstance(step.get("prefix"), str) and step["prefix"]:
                self.word_prefix, self.strips_leading_space = step["prefix"], True
            case kind:
                raise InvalidConfig(
                    f"tokenizer.json: the decoder step {kind} cannot be turned into the bytes of a token. "
                    "Supported are byte-level, SentencePiece and WordPiece tokenizers"
                )


def _steps(decoder: object) -> Iterable[dict[str, Any]]:
    if not isinstance(decoder, dict):
        raise InvalidConfig("tokenizer.json has no decoder: byte-level and SentencePiece tokenizers have one")
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]


def _token_bytes(backend: Backend, style: _PieceStyle, special: set[int]) -> tuple[bytes, ...]:
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token_id in vocabulary.items():
        # A byte-level added token is plain text; a SentencePiece one may still contain the mark for a space.
        as_it_is = token_id in special or (token_id in added and style.is_byte_level)
        table[token_id] = piece.encode("utf-8", "replace") if as_it_is else style.bytes_of(piece)
    return tuple(table)
