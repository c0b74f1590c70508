"""Ollama's dialect: /api/chat, /api/generate, /api/embed, and what its clients ask before they call those."""
