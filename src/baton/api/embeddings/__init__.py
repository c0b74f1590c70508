"""Vectors of texts: OpenAI's /v1/embeddings, Ollama's /api/embed and /api/embeddings."""
