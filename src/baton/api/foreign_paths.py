"""Paths of vLLM, SGLang, llama.cpp and habit that have no route here, and the route to use instead: for the text of a 404."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_COMPLETIONS = "POST /v1/completions"
_CONFIG = "GET /config, which has the settings in force"
_METRICS = "GET /metrics, which has the numbers of running and waiting requests"
_HEALTH = "GET /health, GET /live or GET /ready"
_CLEAR = "POST /reset_prefix_cache"
_ABORT = "POST /v1/abort"
_WEIGHTS = "POST /v1/weights"
_LORA = "LoRA adapters are not supported"
_TEXT_ONLY = "only text is served"

FOREIGN_PATHS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/generate": _COMPLETIONS,
        "/completion": _COMPLETIONS,
        "/inference/v1/generate": _COMPLETIONS,
        "/v1": "GET /v1/models",
        "/v1/": "GET /v1/models",
        "/ping": _HEALTH,
        "/healthz": _HEALTH,
        "/livez": _HEALTH,
        "/readyz": _HEALTH,
        "/v1/health": _HEALTH,
        "/health_generate": _HEALTH,
        "/load": _METRICS,
        "/get_load": _METRICS,
        "/slots": _METRICS,
        "/props": _CONFIG,
        "/server_info": _CONFIG,
        "/get_server_info": _CONFIG,
        "/get_model_info": "GET /v1/models",
        "/model_info": "GET /v1/models",
        "/v1/version": "GET /version",
        "/docs": "GET /openapi.json",
        "/redoc": "GET /openapi.json",
        "/flush_cache": _CLEAR,
        "/abort_request": _ABORT,
        "/sleep": "POST /v1/sleep",
        "/wake_up": "POST /v1/wake",
        "/is_sleeping": "GET /metrics, which has it as baton:engine_mode",
        "/pause": "POST /v1/pause",
        "/resume": "POST /v1/resume",
        "/release_memory_occupation": "POST /v1/sleep",
        "/resume_memory_occupation": "POST /v1/wake",
        "/update_weights_from_disk": _WEIGHTS,
        "/embedding": "POST /v1/embeddings",
        "/encode": "POST /v1/embeddings",
        "/apply-template": "POST /tokenize with messages, for the token ids of a chat",
        "/reranking": "POST /rerank",
        "/lora-adapters": _LORA,
        "/v1/load_lora_adapter": _LORA,
        "/v1/unload_lora_adapter": _LORA,
        "/v1/audio/transcriptions": _TEXT_ONLY,
        "/v1/audio/translations": _TEXT_ONLY,
        "/v1/audio/speech": _TEXT_ONLY,
        "/v1/images/generations": _TEXT_ONLY,
    }
)
