"""Quantised folders of Hugging Face whose matrices are packed in 4 bits: AWQ, GPTQ, compressed-tensors. Imports no numpy
(support.py); loaders/packed_int4.py unpacks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ModelUnsupported


@dataclass(frozen=True, slots=True)
class Packing:
    """Settings of packed matrices: quantization_config of config.json."""

    method: str
    group: int
    "Inputs that share a scale. -1: all."
    less_one: bool = False
    "Whether stored zeros are 1 less than the real ones."
    symmetric: bool = True
    "Whether the numbers are symmetric, so that there need be no zeros (compressed-tensors)."


def packing_of(settings: Any, origin: str) -> Packing | None:
    """Settings of packed matrices. `settings`: quantization_config of config.json. None: another method, or none. Raises
    ModelUnsupported for settings of these methods that are not supported."""
    if not isinstance(settings, Mapping):
        return None
    method = settings.get("quant_method")
    if method == "awq":
        _require(settings, origin, bits=(4,), version=("gemm", "GEMM", None))
        return Packing("awq", _group(settings.get("group_size"), origin))
    if method == "gptq":
        _require(settings, origin, bits=(4,), checkpoint_format=("gptq", "gptq_v2", None))
        return Packing("gptq", _group(settings.get("group_size"), origin), settings.get("checkpoint_format") != "gptq_v2")
    if method != "compressed-tensors":
        return None
    _require(settings, origin, format=("pack-quantized",), kv_cache_scheme=(None,))
    groups = settings.get("config_groups")
    weights = [each.get("weights") for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    if len(weights) != 1 or not isinstance(weights[0], dict):
        raise ModelUnsupported(f"{origin}: compressed-tensors with {len(weights)} groups of modules; supported is one")
    _require(weights[0], origin, num_bits=(4,), type=("int",), strategy=("group", "channel"), actorder=(None, False, "weight"))
    _require(weights[0], origin, symmetric=(True, False, None))
    group = -1 if weights[0].get("strategy") == "channel" else _group(weights[0].get("group_size"), origin)
    return Packing(method, group, symmetric=weights[0].get("symmetric") in (None, True))


def _require(settings: Mapping[str, Any], origin: str, **allowed: tuple[Any, ...]) -> None:
    for name, values in allowed.items():
        if settings.get(name) not in values:
            known = ", ".join(str(value) for value in values if value is not None) or "none"
            raise ModelUnsupported(f"{origin}: quantization_config.{name} is {settings.get(name)!r}; supported is {known}")


def _group(size: Any, origin: str) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ModelUnsupported(f"{origin}: quantization_config.group_size is {size!r}; it must be a positive number, or -1")
    return size
