"""What the text side needs from a model's files: where the tokenizer is, and the chat template. Reads no weights.

Needs no numpy, so a process that only handles text can ask for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.models.files import read_json
from baton.models.loaders.gguf_reader import GGUFFile


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    path: Path | None
    "A tokenizer.json, or the .gguf file whose metadata holds the vocabulary. None: the model comes without one."
    chat_template: str | None
    "Jinja source, if the model has one."
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    "tokenizer_config.json, or every tokenizer.* key of the GGUF metadata."


def read_tokenizer_source(path: Path) -> TokenizerSource:
    """`path` is what names.resolve() gave."""
    return tokenizer_in_folder(path) if path.is_dir() else tokenizer_in_gguf(GGUFFile(path))


def tokenizer_in_folder(folder: Path) -> TokenizerSource:
    tokenizer, settings_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else None
    return TokenizerSource(
        tokenizer if tokenizer.is_file() else None, template or _default(settings.get("chat_template")), settings
    )


def tokenizer_in_gguf(file: GGUFFile) -> TokenizerSource:
    settings = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    has_vocabulary = "tokenizer.ggml.tokens" in settings
    return TokenizerSource(file.path if has_vocabulary else None, settings.get("tokenizer.chat_template"), settings)


def _default(template: Any) -> str | None:
    """One template, or a list of named ones of which "default" is for plain chats."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
