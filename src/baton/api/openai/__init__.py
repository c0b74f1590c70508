"""OpenAI's dialect, with what vLLM's clients add: its fields and the shapes of its answers."""
