"""Reads tokenizer and chat templates of a model on disk, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.errors import InvalidConfig
from baton.gguf import GGUFValue, read_gguf_metadata
from baton.text.chat_template import CHATML, ChatTemplate, TemplateLimits
from baton.text.gguf_tokenizer import tokenizer_parts_from_gguf
from baton.text.hf_tokenizer import read_json, tokenizer_parts_from_folder
from baton.text.template_process import shared_process
from baton.text.tokenizer import Tokenizer

Templates = str | dict[str, str] | None


@dataclass(frozen=True, slots=True)
class ModelText:
    """The tokenizer and the chat template of a model."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate


def load_model_text(
    path: str | Path,
    *,
    chat_template: str | None = None,
    no_template: Literal["chatml", "refuse"] = "chatml",
    limits: TemplateLimits | None = None,
) -> ModelText:
    """Reads tokenizer and templates from a Hugging Face folder or a GGUF file.

    chat_template   replaces the model's own
    no_template     for a model without a template: render chats as ChatML, or refuse them
    """
    shared_process().start()  # in parallel with the loading of the tokenizer
    path = Path(path)
    if path.is_dir():
        tokenizer, own = Tokenizer(tokenizer_parts_from_folder(path)), templates_of_folder(path)
    elif path.is_file():
        metadata = read_gguf_metadata(path)
        tokenizer, own = Tokenizer(tokenizer_parts_from_gguf(metadata)), templates_of_gguf(metadata)
    else:
        raise InvalidConfig(f"no model at {path}: give a Hugging Face folder or a GGUF file")
    template = ChatTemplate(
        chat_template or own or (CHATML if no_template == "chatml" else None),
        bos_token=tokenizer.token_text(tokenizer.bos_id),
        eos_token=tokenizer.token_text(tokenizer.eos_ids[0] if tokenizer.eos_ids else None),
        limits=limits,
    )
    return ModelText(tokenizer, template)


def read_template(file: str | Path) -> str:
    """Reads the operator's template. Raises InvalidConfig."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidConfig(f"--chat-template {file}: cannot be read ({why}); give a file with a Jinja template") from None


def templates_of_folder(folder: Path) -> Templates:
    """Templates of a folder: chat_template.jinja, else `chat_template` of tokenizer_config.json, as one template or a list with
    names."""
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{folder / 'chat_template.jinja'} cannot be read: {error}") from error
    own = read_json(folder / "tokenizer_config.json").get("chat_template")
    if own is None or isinstance(own, str):
        return own
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in own}
    except (TypeError, KeyError):
        raise InvalidConfig(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of {{name, template}}"
        ) from None


def templates_of_gguf(metadata: Mapping[str, GGUFValue]) -> Templates:
    """Templates of a GGUF file: `tokenizer.chat_template`, and further ones as `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    found = {k: v for k, v in metadata.items() if isinstance(v, str) and (k == key or k.startswith(key + "."))}
    return {k.removeprefix(key).removeprefix(".") or "default": source for k, source in found.items()} or None
