"""Which attention the torch forward pass uses on a CPU."""

from __future__ import annotations

import logging

from baton.models.config import ModelConfig
from baton.worker.attention.base import AttentionBackend
from baton.worker.attention.build import NoCompiler
from baton.worker.attention.gathered import GatheredAttention
from baton.worker.attention.native import NativeAttention
from baton.worker.kv_pool import KVPool

log = logging.getLogger(__name__)


def attention_for(config: ModelConfig, pool: KVPool, *, native: bool = True) -> AttentionBackend:
    """Our C kernel, or plain torch where the kernel does not suit, cannot be compiled or is not wanted."""
    if native and NativeAttention.suits(config, pool):
        try:
            return NativeAttention(config, pool)
        except NoCompiler as error:
            log.warning("attention runs in plain torch, which is several times slower: %s", error)
    return GatheredAttention(config, pool)
