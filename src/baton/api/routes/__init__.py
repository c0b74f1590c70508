"""Routes that generate nothing: health, models, tokens, administration, the chat page."""
