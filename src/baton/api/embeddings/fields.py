"""Fields of requests for embeddings, by route (translate.py defines the rules)."""

from __future__ import annotations

from typing import Final

from baton.api.translate import ONE_ANSWER, Table, harmless, own, refused, same

_ALL: Final[Table] = {
    **ONE_ANSWER,
    "model": own("a served name", "string"),
    "input": same("prompt", "a text, token ids, or a list of those"),
    "pooling": own(
        '"mean" of all tokens, the "last" or the first ("cls"); where it is left out: as the model\'s files say, else "mean"',
        "string",
    ),
    "dimensions": own(
        "how many numbers of the vector are returned, scaled to length 1 again; the model's width at most", "integer"
    ),
    "stream": refused(False),
    "stream_options": refused(),
    "prompt": refused(about="here it is called input"),
    "max_tokens": refused(about="nothing is generated"),
    "logprobs": refused(False, about="nothing is generated"),
    "truncate_prompt_tokens": same(
        "truncate_prompt_tokens", "cut longer inputs to this number of tokens; -1: to what fits, the default of encoders"
    ),
}
OPENAI: Final[Table] = {**_ALL, "encoding_format": own('"float" (the default) or "base64"', "string")}
POOLING: Final[Table] = {
    **OPENAI,
    "task": own('"embed", the only one', "string"),
    "normalize": refused(True, about="vectors have length 1"),
    "use_activation": refused(True, about="vectors have length 1"),
    "messages": refused(about="send their text as input"),
}
CLASSIFY: Final[Table] = {
    **_ALL,
    "pooling": refused(about="as the model's head does it"),
    "dimensions": refused(about="there is a probability per class"),
    "use_activation": refused(True, about="probabilities are from 0 to 1"),
    "activation": refused(True, about="probabilities are from 0 to 1"),
    "messages": refused(about="send their text as input"),
}
OLLAMA: Final[Table] = {
    **_ALL,
    "truncate": own("cut inputs to the context; true where it is left out. false: one that is too long is refused", "boolean"),
    "options": harmless("nothing is generated"),
    "keep_alive": harmless("the model stays"),
}
OLLAMA_OLDER: Final[Table] = {**OLLAMA, "prompt": same("prompt", "a text"), "input": refused(about="here it is called prompt")}
"""Fields of /api/embeddings."""
