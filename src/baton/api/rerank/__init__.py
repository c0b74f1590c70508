"""Scores of pairs of texts: /rerank, /v1/rerank and /v2/rerank for vLLM's, Jina's and Cohere's clients, /score for vLLM's."""
