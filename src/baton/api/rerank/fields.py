"""Fields of requests for scores (translate.py defines the rules)."""

from __future__ import annotations

from typing import Final

from baton.api.translate import ONE_ANSWER, Table, harmless, own, refused

_ALL: Final[Table] = {
    **ONE_ANSWER,
    "model": own("a served name", "string"),
    "instruction": own("what counts as relevant, for rerankers of Qwen3's kind", "string"),
    "truncate_prompt_tokens": own("cut documents so that a pair has at most this many tokens; -1: as many as fit", "integer"),
    "stream": refused(False),
    "stream_options": refused(),
    "prompt": refused(about="nothing is generated"),
    "max_tokens": refused(about="nothing is generated"),
    "logprobs": refused(False, about="nothing is generated"),
    "use_activation": refused(True, about="a score is what the model's files say: from 0 to 1, a cosine, or a logit"),
    "activation": refused(True, about="a score is what the model's files say: from 0 to 1, a cosine, or a logit"),
    "raw_scores": refused(False, about="a score is what the model's files say: from 0 to 1, a cosine, or a logit"),
}
RERANK: Final[Table] = {
    **_ALL,
    "query": own("a text", "string"),
    "documents": own("texts, or objects with a text", "array"),
    "top_n": own("how many of the best are returned; default: all", "integer"),
    "return_documents": own("answer with the documents' texts; true where it is left out", "boolean"),
    "max_tokens_per_doc": own("cut each document after this many tokens", "integer"),
    "texts": refused(about="here they are called documents"),
    "rank_fields": refused(["text"], about="send the fields as one text"),
    "max_chunks_per_doc": harmless("a document is one chunk"),
    "overlap_tokens": harmless("a document is one chunk"),
}
COHERE: Final[Table] = {
    **RERANK,
    "return_documents": own("answer with the documents' texts; false where it is left out", "boolean"),
    "max_tokens_per_doc": own("cut each document after this many tokens; 4096 where it is left out", "integer"),
}
"""Fields of /v2/rerank."""
SCORE: Final[Table] = {
    **_ALL,
    "text_1": own("a text, or texts", "string or array"),
    "text_2": own("a text, or as many as text_1 has; to a text_1 that is one text, any number", "string or array"),
    "queries": own("another name of text_1", "string or array"),
    "documents": own("another name of text_2", "string or array"),
}
