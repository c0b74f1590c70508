"""Allowed values of settings: names, and the range of each kind of number. ranges.py checks them."""

from __future__ import annotations

from typing import Annotated, Literal

from baton.errors import InvalidConfig
from baton.ranges import Names, Range

Quantization = Literal["auto", "int8", "int4", "fp8", "none"]
"""Storage and arithmetic of weights. models/quantise.py has the type of each tensor."""
KVCacheType = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"]
"""Data types of the KV cache. bfloat16 and fp8 need a GPU, int8 heads whose width is a multiple of 64."""
Compute = Literal["auto", "native", "torch"]
PLATFORMS = "baton.platforms"
"""Entry point group of devices that plug-ins add (docs/internals/adding-a-platform.md)."""
Device = Annotated[str, Names(("auto", "cpu", "cuda"), PLATFORMS)]
Dtype = Literal["auto", "float32", "bfloat16"]
"""Data type of activations, and on a GPU also of weights and KV cache."""
LoadFormat = Literal["auto", "dummy"]
GenerationConfig = Literal["auto", "none"]
"""Whether default sampling follows the recommendation of the model's files (models/generation.py)."""
TransferDigest = Literal["auto", "checksum", "keyed"]
"""Digest of KV blocks between machines (kvcache/digests.py)."""
Role = Literal["mixed", "prefill", "decode"]
"""Work of an instance: prefill, decode, or both."""
PoolAccess = Literal["private", "announced", "attached"]
"""How a worker gets its KV pool: creates a private one, creates and announces it, or attaches to one."""
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
_CallFormat = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "json",
    "none",
]
_CallAlias = Literal["qwen", "qwen25", "qwen3_xml", "llama3", "llama4_pythonic", "openai", "gpt-oss"]
ToolCallParser = Literal[_CallFormat, _CallAlias]
ReasoningParser = Literal["auto", "qwen3", "deepseek_r1", "mistral", "harmony", "none", "openai_gptoss", "gpt-oss"]
"""Names of formats of text/parsers/styles.py, and after `none` their names in vLLM and SGLang."""


API_KEY_CHARACTERS_MAX = 1024
SERVED_NAME_CHARACTERS_MAX = 256
ANY_NAME = "*"
"""A served model name that accepts any name in a request."""
NODE_NAME_CHARACTERS_MAX = 64


def require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidConfig(message)


RANKS_MAX = 64
Ranks = Annotated[int, Range(1, RANKS_MAX)]
Threads = Annotated[int, Range(0, 1024)]
ContextTokens = Annotated[int, Range(2, 2**31 - 1)]
Blocks = Annotated[int, Range(1, 2**31 - 1)]
BlockSize = Annotated[int, Range(1, 1024)]
Share = Annotated[float, Range(0, 1, above=True)]
Gibibytes = Annotated[float, Range(0, 1_000_000, above=True)]
Slots = Annotated[int, Range(1, 65_536)]
StepTokens = Annotated[int, Range(1, 1_048_576)]
DRAFT = "draft:"
"""Prefix of a draft model's name."""
Speculate = Annotated[str, Names(("none", "ngram", "grammar", "auto"), forms=(f"{DRAFT}MODEL",))]


def draft_model_of(speculate: str) -> str:
    """The name of the draft model. Empty: no model drafts."""
    return speculate.removeprefix(DRAFT) if speculate.startswith(DRAFT) else ""


DRAFTS_MAX = 16
"""Maximum of draft tokens per sequence and step."""
Seconds = Annotated[float, Range(0, 31_536_000, above=True)]


def is_api_key(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key and 1 <= len(key) <= API_KEY_CHARACTERS_MAX
