"""Names of settings that users of other engines type: on the command line, in a file, or as keywords of `LLM`.

One table for each engine, all of the same form (rows.py): vllm.py, sglang.py, llama_cpp.py, ollama.py, fastdeploy.py. Here
they become one, which command line, YAML file and `LLM` share:

ALIASES       other names of a setting, with the same meaning
VALUES        other words for a value of a setting
FOREIGN       options that are no setting here, and what is answered; or several settings (speculation.py)
ENVIRONMENT   variables of other engines, which are not read, and what to use
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from baton.familiar import fastdeploy, llama_cpp, ollama, sglang, vllm
from baton.familiar.rows import Row

ENGINES: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        "vLLM": vllm.OPTIONS,
        "SGLang": sglang.OPTIONS,
        "llama.cpp": llama_cpp.OPTIONS,
        "Ollama": ollama.OPTIONS,
        "FastDeploy": fastdeploy.OPTIONS,
    }
)

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    vllm.ENVIRONMENT | sglang.ENVIRONMENT | llama_cpp.ENVIRONMENT | ollama.ENVIRONMENT | fastdeploy.ENVIRONMENT
)

FORMER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "max_model_len": ("context_tokens_max",),
        "max_num_seqs": ("slots",),
        "max_num_batched_tokens": ("tokens_per_step",),
        "gpu_memory_utilization": ("memory_utilization",),
        "kv_cache_dtype": ("kv_dtype",),
        "enable_prefix_caching": ("prefix_caching",),
        "kv_blocks": ("num_blocks",),
    }
)
"""Former names of settings. Accepted for ever, and shown only on the page of options."""

VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dtype": {"half": "auto", "float16": "auto", "float": "float32"},
        "device": {"gpu": "cuda", "CUDA0": "cuda", "none": "cpu"},
        "quantization": {
            "wint8": "int8",
            "wint4": "int4",
            "block_wise_fp8": "fp8",
            # the files say what they are in
            **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4", "gguf"), "auto"),
        },
        "kv_cache_dtype": {"fp8_e4m3": "fp8", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "q8_0": "int8"},
        "generation_config": {"vllm": "none"},
        "load_format": {"safetensors": "auto", "gguf": "auto", "default_v1": "auto"},
        "order": {"fcfs": "arrival"},
        "speculate": {"NGRAM": "ngram"},
        "kv_write": {"write_through": "through", "write_through_selective": "selective", "write_back": "back"},
        "reasoning_parser": {"deepseek": "auto", "deepseek-legacy": "auto"},
    }
)
"""Another engine's word for a value, and ours, by setting. Equal words need no entry."""

SAID: Mapping[tuple[str, str], str] = MappingProxyType(
    dict.fromkeys(
        (("dtype", "half"), ("dtype", "float16")),
        "float16 is not computed in here: activations are float32 on a CPU and bfloat16 on a GPU",
    )
)
"""A line about the actual arithmetic, by setting and value, where the word alone would promise something else."""


class Alias(NamedTuple):
    setting: str
    row: Row | None = None
    "The engine. None: a former name."


def _rows() -> Iterator[Row]:
    for rows in ENGINES.values():
        yield from rows


def _aliases() -> dict[str, Alias]:
    found = {name: Alias(setting) for setting, names in FORMER.items() for name in names}
    return found | {row.name: Alias(row.setting, row) for row in _rows() if row.kind == "alias"}


PAIR = frozenset({"cache_type_k", "cache_type_v"})
"""Names of llama.cpp for a setting that has separate types for keys and values there. Both may be given if they agree."""

BY_ALIAS: Mapping[str, Alias] = MappingProxyType(_aliases())
ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        setting: tuple(name for name, found in BY_ALIAS.items() if found.setting == setting)
        for setting in dict.fromkeys(found.setting for found in BY_ALIAS.values())
    }
)
"""Other names by field of ServeConfig, former names first."""

FOREIGN: Mapping[str, Row] = MappingProxyType(
    {row.name: row for row in _rows() if row.kind in ("not needed", "only", "instead", "several")}
)


def _short() -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for row in _rows():
        found.setdefault(row.name, {}).update(dict.fromkeys(row.short))
    return {name: tuple(short) for name, short in found.items()}


SHORT: Mapping[str, tuple[str, ...]] = MappingProxyType(_short())
"""Short options by their long name."""


class Verdict(NamedTuple):
    taken: Literal["not needed", "refused"]
    words: str


def verdict_on(name: str, value: object) -> Verdict | None:
    """The verdict on an option that is not a setting here. None: no known engine has it."""
    row = FOREIGN.get(name)
    if row is None:
        return None
    text = str(value).strip()
    if row.kind == "not needed":
        return Verdict("not needed", f"is not needed here: {row.words}")
    if row.kind == "only":
        if text in row.only:
            return Verdict("not needed", "is not needed here: it is always so")
        return Verdict("refused", f"must be {' or '.join(row.only)}: {row.words}")
    if text in row.nothing:
        return Verdict("not needed", "asks for nothing")
    return Verdict("refused", f"is no setting here: {row.words}")


CLOSE = 0.8
"""Minimum similarity for a suggestion."""


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that is spelled nearly like `name`. Empty: none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=CLOSE)), "")


def switched_on(name: str, value: Any, flags: frozenset[str]) -> tuple[str, Any]:
    """The opposite setting of a negated one: `no_mmap: true` is `mmap: false`, where that is a flag."""
    if name.startswith("no_") and isinstance(value, bool) and name[3:] in flags:
        return name[3:], not value
    return name, value


def in_our_words(name: str, setting: str, value: Any) -> Any:
    """The value of a setting given by this name, in our unit and word."""
    found = BY_ALIAS.get(name)
    if found is not None and found.row is not None and found.row.convert is not None:
        value = found.row.convert(value)
    return VALUES.get(setting, {}).get(value, value) if isinstance(value, str) else value


def line_about(setting: str, value: object) -> str:
    """A remark on a given value, printed before it is used. Empty: none."""
    return SAID.get((setting, value), "") if isinstance(value, str) else ""


def environment_lines(environment: Mapping[str, str]) -> list[str]:
    """Remarks on environment variables of other engines that are set."""
    return [f"{name} is not read; {words}" for name, words in ENVIRONMENT.items() if environment.get(name)]
