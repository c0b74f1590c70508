"""Checks from the first bytes of its files whether a model is supported: before its weights are downloaded, and before its
tokenizer is read. Imports no numpy, because the command line uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.gguf import leading_metadata
from baton.models.architecture import ACTIVATIONS, Architecture
from baton.models.config_fields import ConfigFields
from baton.models.encoders.families import encoder_config_from_hf, encoder_family
from baton.models.files import read_json, refuse_git_lfs_pointer
from baton.models.packing import packing_of
from baton.models.registry import architecture_of_gguf, architecture_of_hf
from baton.models.tensor_types import SCALE_BLOCK
from baton.models.text_part import text_config

GGUF_HEAD_BYTES = 1 << 16
"""Bytes of a GGUF file that are read first: settings are its first pairs; the vocabulary, which is megabytes, follows."""


def refuse_unsupported(path: Path) -> None:
    """Raises ModelUnsupported for an unsupported model. `path`: from names.resolve()."""
    if path.is_dir():
        refuse_unsupported_config(read_json(path / "config.json"), str(path / "config.json"))
        return
    refuse_git_lfs_pointer(path)
    with path.open("rb") as file:
        refuse_unsupported_gguf(file.read(GGUF_HEAD_BYTES), str(path))


def refuse_unsupported_config(raw: Mapping[str, Any], origin: str) -> None:
    """Raises ModelUnsupported for an unsupported config. `raw`: config.json, of a decoder or an encoder."""
    if encoder_family(raw) is not None:
        encoder_config_from_hf(raw, origin)
    else:
        supported_architecture(raw, origin)


def refuse_unsupported_gguf(head: bytes, origin: str) -> None:
    """Raises ModelUnsupported for an unsupported GGUF file. `head`: its first bytes. Settings beyond them are checked when the
    file is opened."""
    metadata = leading_metadata(head, origin)
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return
    architecture_of_gguf(name, origin)


def supported_architecture(raw: Mapping[str, Any], origin: str) -> type[Architecture]:
    """The architecture of a config.json, or of its text part. Raises ModelUnsupported."""
    raw = text_config(raw, origin)
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise ModelFileBroken(f"{origin}: architectures is {names!r}; it must be a list of names")
    model = architecture_of_hf(map(str, names), origin)
    _refuse_unsupported_parts(ConfigFields(raw, origin), model)
    return model


def _refuse_unsupported_parts(fields: ConfigFields, model: type[Architecture]) -> None:
    quantised = fields.get("quantization_config")
    if quantised:
        _refuse_other_than_fp8_blocks(quantised, fields.origin, mxfp4=model.hf_stacked_experts)
    activation = str(fields.get("hidden_activation") or fields.get("hidden_act", model.activation))
    if {**ACTIVATIONS, **model.hf_activations}.get(activation, activation) != model.activation:
        raise ModelUnsupported(
            f"{fields.origin}: activation {activation} is not supported; supported for {model.name} is {model.activation}"
        )


def _refuse_other_than_fp8_blocks(quantised: Any, origin: str, *, mxfp4: bool) -> None:
    """Raises for fp8 other than in blocks. `modules_to_not_convert` is not read: each tensor's type shows whether it is
    quantised."""
    settings = quantised if isinstance(quantised, dict) else {"quant_method": quantised}
    method = settings.get("quant_method")
    if (mxfp4 and method == "mxfp4") or packing_of(settings, origin) is not None:
        return
    if method != "fp8":
        raise ModelUnsupported(
            f"{origin}: the weights are quantised ({method}); supported are plain float32, float16 and bfloat16 "
            "safetensors, fp8 ones with scales of blocks, 4 bits of AWQ, GPTQ and compressed-tensors, and quantised GGUF files"
        )
    blocks, scheme = settings.get("weight_block_size"), settings.get("activation_scheme", "dynamic")
    if blocks != [SCALE_BLOCK, SCALE_BLOCK] or scheme != "dynamic" or settings.get("fmt", "e4m3") != "e4m3":
        raise ModelUnsupported(
            f"{origin}: fp8 weights with weight_block_size {blocks} and activation_scheme {scheme}; supported are e4m3 with "
            f"blocks of [{SCALE_BLOCK}, {SCALE_BLOCK}] and dynamic"
        )
