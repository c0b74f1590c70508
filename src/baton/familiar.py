"""Names of settings that users of other engines type, on the command line, in a file, or as keywords of `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FAMILIAR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "context_tokens_max": ("max_model_len",),
        "slots": ("max_num_seqs",),
        "tokens_per_step": ("max_num_batched_tokens",),
        "kv_blocks": ("num_blocks", "num_gpu_blocks_override"),
        "memory_utilization": ("gpu_memory_utilization",),
        "kv_dtype": ("kv_cache_dtype",),
        "prefix_caching": ("enable_prefix_caching",),
        "drain_seconds_max": ("shutdown_timeout",),
    }
)
"""By field of ServeConfig. Names that are the same here (block_size, api_key, ...) need no line."""
