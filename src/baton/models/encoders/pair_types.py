"""The begin of the second text of a pair, as tokenizer.json's post-processor marks it with token types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.files import read_json

TYPES_KEY = "token_type_ids"


def pair_separator(folder: Path) -> int | None:
    """Id of the separator: tokens after the first one have type 1. None: all tokens of a pair have type 0."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    inputs = settings.get("model_input_names")
    if isinstance(inputs, list) and inputs and TYPES_KEY not in inputs:
        return None
    try:
        found = [_separator(step) for step in _steps(read_json(path).get("post_processor"))]
    except (KeyError, TypeError, IndexError, AttributeError, StopIteration) as error:
        raise ModelFileBroken(f"{path}: its post_processor is not readable ({error!r})") from None
    except ValueError as error:
        raise ModelUnsupported(f"{path}: {error}") from None
    return next((separator for separator in found if separator is not None), None)


def _steps(processor: Any) -> Iterator[dict[str, Any]]:
    if processor is None:
        return
    if processor["type"] == "Sequence":
        for step in processor["processors"]:
            yield from _steps(step)
    else:
        yield processor


def _separator(step: dict[str, Any]) -> int | None:
    """The token behind which a pair has type 1. None: all tokens have type 0. Raises ValueError for other types."""
    if step["type"] == "BertProcessing":
        return int(step["sep"][1])
    if step["type"] != "TemplateProcessing":
        return None
    pieces = [next(iter(piece.items())) for piece in step["pair"]]
    types = [int(piece["type_id"]) for _, piece in pieces]
    if not any(types):
        return None
    second = next(place for place, (kind, piece) in enumerate(pieces) if kind == "Sequence" and piece["id"] == "B")
    kind, separator = pieces[second - 1]
    ids = step["special_tokens"][separator["id"]]["ids"] if kind == "SpecialToken" else []
    before = [piece["id"] for kind, piece in pieces[: second - 1] if kind == "SpecialToken"]
    ordered = types == [0] * second + [1] * (len(types) - second)
    if not ordered or len(ids) != 1 or separator["id"] in before:
        raise ValueError("the token types of a pair are not supported; supported is type 1 behind the first separator")
    return int(ids[0])
