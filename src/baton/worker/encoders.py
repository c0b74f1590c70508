"""Platforms that support encoders, and the settings of encoders. torch is imported when one is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from baton.config import WorkerConfig
from baton.errors import InvalidConfig, ModelUnsupported
from baton.kvpool.layout import KVKind
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedEncoder
from baton.worker.executors.base import LoadedExecutor
from baton.worker.platforms.base import EncoderPlatform, Platform

KINDS: Final = {"cpu": KVKind("float32"), "cuda": KVKind("float32", "token-major")}
"""KV types by platform. The blocks of an encoder are empty."""


def encoder_kind(platform: Platform) -> KVKind:
    if platform.name not in KINDS:
        raise ModelUnsupported(f"the model is an encoder, which --device {platform.name} does not compute: take cpu or cuda")
    return KINDS[platform.name]


def encoder_settings(config: WorkerConfig, longest: int) -> WorkerConfig:
    """Settings of an encoder. `longest`: maximum input length of the model. The engine counts one token more, for the answer.
    Raises InvalidConfig."""
    if config.quantization not in ("auto", "none"):
        raise InvalidConfig(f"--quantization {config.quantization} is for decoders: an encoder is not rounded; leave it out")
    if config.compute == "native":
        raise InvalidConfig("--compute native is for decoders: an encoder runs in torch; leave it out")
    asked = config.context_tokens_max
    if asked is not None and asked > longest:
        raise InvalidConfig(f"max_model_len is {asked}, and the model was made for inputs of {longest} tokens: lower it")
    return replace(config, quantization="none", context_tokens_max=None if asked is None else asked + 1)


def load_encoder(
    platform: Platform, opened: OpenedEncoder, settings: WorkerConfig, progress: Progress | None
) -> LoadedExecutor:
    """Loads an encoder in torch, on the platform's device. Raises InvalidConfig without torch."""
    try:
        from baton.worker.executors.torch_encoder import loaded_encoder
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"the model is an encoder and runs in torch, and {error.name} is not installed: pip install torch"
        ) from error
    kind = encoder_kind(platform)
    assert isinstance(platform, EncoderPlatform)
    raw = RawWeights(opened.weights, opened.config, progress)
    encoder = platform.encoder(opened, raw, settings)
    raw.close()
    return loaded_encoder(encoder, kind, settings.tokens_per_step)
