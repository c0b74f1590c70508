"""What settings may be: the names to choose from, and the range of each kind of number. ranges.py checks them."""

from __future__ import annotations

from typing import Annotated, Literal

from baton.errors import InvalidConfig
from baton.ranges import Names, Range

Quantization = Literal["auto", "int8", "int4", "fp8", "none"]
"""How weights are kept and computed on. What becomes of which tensor: models/quantise.py."""
KVCacheType = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"]
"""What the KV cache holds. bfloat16 and fp8 need a GPU, int8 heads whose width is a multiple of 64."""
Compute = Literal["auto", "native", "torch"]
PLATFORMS = "baton.platforms"
"""Group of the entry points that bring devices which are not ours (docs/internals/adding-a-platform.md)."""
Device = Annotated[str, Names(("auto", "cpu", "cuda"), PLATFORMS)]
Dtype = Literal["auto", "float32", "bfloat16"]
"""Of activations, and on a GPU of weights and KV cache too."""
LoadFormat = Literal["auto", "dummy"]
GenerationConfig = Literal["auto", "none"]
"""Whether requests that do not say are sampled as the model's files recommend (models/generation.py)."""
Role = Literal["mixed", "prefill", "decode"]
"""What an instance does: both, or one half of a split deployment."""
PoolAccess = Literal["private", "announced", "attached"]
"""How a worker comes to its KV pool: it makes one for itself, makes and announces it, or attaches to the one it is handed."""
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
"""Formats of text/parsers/styles.py, and behind `none` their names in vLLM and SGLang."""


API_KEY_CHARACTERS_MAX = 1024
SERVED_NAME_CHARACTERS_MAX = 256
ANY_NAME = "*"
"""As a served model name: a request may call the model what it likes."""
NODE_NAME_CHARACTERS_MAX = 64


def require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidConfig(message)


Threads = Annotated[int, Range(0, 1024)]
ContextTokens = Annotated[int, Range(2, 2**31 - 1)]
Blocks = Annotated[int, Range(1, 2**31 - 1)]
BlockSize = Annotated[int, Range(1, 1024)]
Share = Annotated[float, Range(0, 1, above=True)]
Gibibytes = Annotated[float, Range(0, 1_000_000, above=True)]
Slots = Annotated[int, Range(1, 65_536)]
StepTokens = Annotated[int, Range(1, 1_048_576)]
Seconds = Annotated[float, Range(0, 31_536_000, above=True)]


def is_api_key(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key and 1 <= len(key) <= API_KEY_CHARACTERS_MAX
