"""The routes that generate nothing: health, models, tokens, administration, the chat page."""
