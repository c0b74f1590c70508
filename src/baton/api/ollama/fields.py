"""Fields of Ollama's requests, and what becomes of each (translate.py says what the rules mean)."""

from __future__ import annotations

from typing import Final

from baton.api.translate import ONE_ANSWER, Table, harmless, own, refused, same

OPTIONS: Final[Table] = {
    "num_predict": same("max_tokens", "tokens of the answer; -1 and -2: up to the context"),
    "temperature": same("temperature"),
    "top_k": same("top_k"),
    "top_p": same("top_p"),
    "min_p": same("min_p"),
    "seed": same("seed"),
    "stop": same("stop"),
    "repeat_penalty": same("repetition_penalty", "over all tokens so far, not over the last repeat_last_n"),
    "presence_penalty": same("presence_penalty"),
    "frequency_penalty": same("frequency_penalty"),
    "typical_p": refused(1),
    "tfs_z": refused(1),
    "mirostat": refused(0),
    "mirostat_tau": harmless("of mirostat"),
    "mirostat_eta": harmless("of mirostat"),
    "repeat_last_n": harmless("repeat_penalty is over all tokens"),
    "penalize_newline": harmless("a penalty is for all tokens alike"),
    "num_ctx": harmless("the context is the server's: --max-model-len"),
    "num_keep": harmless("a prompt is never cut"),
    "num_batch": harmless("a setting of the server"),
    "num_gpu": harmless("a setting of the server"),
    "main_gpu": harmless("a setting of the server"),
    "num_thread": harmless("a setting of the server"),
    "numa": harmless("a setting of the server"),
    "low_vram": harmless("a setting of the server"),
    "f16_kv": harmless("a setting of the server"),
    "use_mmap": harmless("a setting of the server"),
    "use_mlock": harmless("a setting of the server"),
    "logits_all": harmless("a setting of the server"),
    "vocab_only": harmless("a setting of the server"),
    "embedding_only": harmless("a setting of the server"),
}
"""The object `options`."""

_BOTH: Final[Table] = {
    **ONE_ANSWER,
    "model": own("the served name, also with :latest", "string"),
    "stream": own("true where it is not given", "boolean"),
    "options": own("settings, see below", "object"),
    "format": own('"json", or a JSON schema', "string or object"),
    "think": same("think", "reasoning: true, false, or how much of it"),
    "keep_alive": harmless("the model stays"),
    "stream_options": refused(),
}
CHAT: Final[Table] = {
    **_BOTH,
    "messages": own("role, content, tool_calls, tool_name, thinking", "array"),
    "tools": own("functions that the model may call", "array"),
    "logprobs": refused(False, about="log-probabilities are told by /v1/chat/completions"),
    "top_logprobs": refused(0, about="log-probabilities are told by /v1/chat/completions"),
}
GENERATE: Final[Table] = {
    **_BOTH,
    "prompt": own("a text", "string"),
    "system": own("a message before it", "string"),
    "raw": own("the prompt goes to the model without the chat template", "boolean"),
    "template": refused("", about="templates come from the model or the operator, never from a request"),
    "context": refused([], about="send the history as messages to /api/chat"),
    "suffix": refused("", about="this server cannot fill in the middle yet; put what comes before the gap in prompt"),
    "images": refused([], about="only text is supported"),
    "logprobs": refused(False, about="log-probabilities are told by /v1/completions"),
    "top_logprobs": refused(0, about="log-probabilities are told by /v1/completions"),
}
