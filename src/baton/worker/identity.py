"""Everything besides tokens that KV depends on, as one digest: the root of every block key, on every tier and in every engine.
Computed after loading: "auto" is resolved, and paths are not included."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Final

from baton.config import Quantization, WorkerConfig
from baton.kvpool.layout import KVLayout
from baton.models.config import ModelConfig
from baton.models.encoders.config import EncoderConfig
from baton.models.open import Opened
from baton.models.parameters import expected_shapes
from baton.models.quantise import type_for

PART_DIGITS: Final = 16
PART_TEXT_MAX: Final = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class KVIdentity:
    """Two engines that differ in any field share no block. The rank is not a field: it is part of an object's name."""

    weights: bytes
    "Digest of the content of the weight files (worker/weights_digest.py)."
    model: str
    "The model's shape, and the config's numbers that the arithmetic uses."
    weight_types: str
    "Compute types of the weights, which follow from the files and from `quantization`, which may be auto."
    adapter: bytes = b""
    "Digest of the adapter's content, not its name."
    dtype: str = "float32"
    "Data type of activations."
    kernels: str
    "Backend, and its variant if the arithmetic differs."
    layout: bytes
    "KVLayout.fingerprint(): KV data type, order and padding of a block's bytes."
    block_size: int
    tp_size: int = 1

    def digest(self) -> bytes:
        digest = sha256(b"baton identity 1")
        for field in fields(self):
            value = getattr(self, field.name)
            part = value if isinstance(value, bytes) else str(value).encode()
            # with lengths, so that no two identities give the same bytes
            digest.update(f"{field.name} {len(part)} ".encode() + part)
        return digest.digest()

    def parts(self) -> dict[str, str]:
        """The fields by name, each in a few characters, to compare two identities."""
        return {field.name: _short(getattr(self, field.name)) for field in fields(self)}


def identity_of(opened: Opened, weights: bytes, config: WorkerConfig, layout: KVLayout, kernels: str) -> KVIdentity:
    return KVIdentity(
        weights=weights,
        model=model_text(opened.config),
        weight_types=weight_types(opened, config.quantization),
        dtype=config.dtype,
        kernels=kernels,
        layout=layout.fingerprint(),
        block_size=layout.block_size,
        tp_size=config.ranks,
    )


def _short(value: bytes | str | int) -> str:
    """The first digits of a digest; long texts are digested first."""
    if isinstance(value, bytes):
        return value[: PART_DIGITS // 2].hex()
    text = str(value)
    return text if len(text) <= PART_TEXT_MAX else sha256(text.encode()).hexdigest()[:PART_DIGITS]


def model_text(config: ModelConfig | EncoderConfig) -> str:
    """The config without fields that only limit the length of an answer or end it."""
    if isinstance(config, EncoderConfig):
        return repr(replace(config, context_tokens_max=2))
    return repr(replace(config, context_tokens_max=1, bos_id=None, eos_ids=()))


def weight_types(opened: Opened, quantization: Quantization) -> str:
    stored = opened.weights.stored()
    types = (f"{name} {type_for(stored[name], name, quantization).name}" for name in sorted(expected_shapes(opened.config)))
    return sha256("\n".join(types).encode()).hexdigest()
