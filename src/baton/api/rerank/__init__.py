"""Scores of pairs of texts (/rerank, /v1/rerank, /v2/rerank, /score) and classes of texts (/classify)."""
