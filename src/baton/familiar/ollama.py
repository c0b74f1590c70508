"""Ollama has no options: parameters of a Modelfile, which work here as options and keys, and environment variables, which
are not read; `baton serve` says what to use."""

from __future__ import annotations

from baton.familiar.rows import (
    NO_LORA,
    ONE_WAY,
    alias,
    by_request,
    instead,
    not_needed,
)

_EACH_CHAT = "each request has messages of its own"
_NO_SHIFT = "a sequence ends at --max-model-len"

OPTIONS = (
    alias("num_ctx", "max_model_len"),
    alias("num_thread", "threads"),
    alias("num_batch", "max_num_batched_tokens"),
    alias("num_parallel", "max_num_seqs"),
    alias("kv_cache_type", "kv_cache_dtype"),
    alias("max_queue", "queue_requests_max"),
    alias("origins", "allowed_origins"),
    alias("load_timeout", "start_seconds_max"),
    not_needed("num_gpu", "all layers are on the device that --device names"),
    not_needed("main_gpu", "CUDA_VISIBLE_DEVICES says which GPU is used"),
    not_needed("num_gqa", "the model's file says it"),
    not_needed("f16_kv", "--kv-cache-dtype says what the KV cache holds", flag=True),
    not_needed("low_vram", "--gpu-memory-utilization says how much is used", flag=True),
    not_needed("use_mmap", "weights are read into memory", flag=True),
    not_needed("use_mlock", "weights are read into memory", flag=True),
    not_needed("logits_all", "each request may ask for log-probabilities", flag=True),
    not_needed("numa", ONE_WAY),
    not_needed("license", "the files of a model have it"),
    instead("num_keep", _NO_SHIFT),
    instead("num_predict", "each request has max_tokens", nothing=("-1",)),
    by_request("temperature"),
    by_request("top_k"),
    by_request("top_p"),
    by_request("min_p"),
    instead("typical_p", "this way of sampling is not supported"),
    instead("tfs_z", "this way of sampling is not supported"),
    instead("mirostat", "this way of sampling is not supported"),
    instead("mirostat_eta", "this way of sampling is not supported"),
    instead("mirostat_tau", "this way of sampling is not supported"),
    by_request("repeat_penalty"),
    instead("repeat_last_n", "penalties count all of a sequence"),
    by_request("presence_penalty"),
    by_request("frequency_penalty"),
    instead("penalize_newline", "penalties count every token", flag=True),
    instead("stop", "each request may have stop strings", nothing=()),
    instead("template", "a chat template is Jinja, in a file: --chat-template"),
    instead("system", _EACH_CHAT),
    instead("message", _EACH_CHAT),
    instead("adapter", NO_LORA),
    instead("keep_alive", "the model stays loaded; POST /v1/sleep frees its memory (docs/api.md)"),
    instead("max_loaded_models", "a server has one model; start one for each"),
)

ENVIRONMENT = {
    "OLLAMA_HOST": "use --host and --port",
    "OLLAMA_MODELS": "models are in the cache of Hugging Face (HF_HOME), or give a .gguf file",
    "OLLAMA_CONTEXT_LENGTH": "use --max-model-len",
    "OLLAMA_NUM_PARALLEL": "use --max-num-seqs",
    "OLLAMA_MAX_QUEUE": "use --queue-requests-max",
    "OLLAMA_MAX_LOADED_MODELS": "a server has one model; start one for each",
    "OLLAMA_KEEP_ALIVE": "the model stays loaded",
    "OLLAMA_ORIGINS": "use --allowed-origins",
    "OLLAMA_DEBUG": "use --log-level debug",
    "OLLAMA_KV_CACHE_TYPE": "use --kv-cache-dtype",
    "OLLAMA_FLASH_ATTENTION": "there is one way, and it is taken where it helps",
    "OLLAMA_LOAD_TIMEOUT": "use --start-seconds-max",
    "OLLAMA_GPU_OVERHEAD": "use --gpu-memory-utilization",
    "OLLAMA_LLM_LIBRARY": "use --device",
    "OLLAMA_SCHED_SPREAD": "use --tensor-parallel-size",
}
